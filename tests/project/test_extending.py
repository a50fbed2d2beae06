"""docs/extending/: users copy the examples of these pages, so a test runs each of them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.helpers.pages import ROOT, Example, examples

PAGES = sorted((ROOT / "docs" / "extending").glob("*.md"))
EXAMPLES = [example for page in PAGES for example in examples(page)]


@pytest.mark.run
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.title)
def test_examples_run(example: Example, tmp_path: Path) -> None:
    example.run(tmp_path)


PAGE = """# Page

## One
```python a.py
print(2 + 2)
exit(CODE)
```
```console
$ python a.py
PRINTED
```
"""


@pytest.mark.parametrize(
    ("printed", "code", "holds"), [("4", "0", True), ("5", "0", False), ("4", "1", False)]
)
def test_an_example_that_says_something_wrong_is_found(
    printed: str, code: str, holds: bool, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("CODE", code).replace("PRINTED", printed))
    [example] = examples(page)
    with (
        contextlib.nullcontext()
        if holds
        else pytest.raises(AssertionError, match=r"One: \$ python a\.py")
    ):
        example.run(tmp_path)


def test_every_example_is_in_the_page() -> None:
    """With the content of its file: tools/docs includes it, and tests/project/test_docs.py compares
    both."""
    names = {path.name for path in (ROOT / "examples").glob("*.py")} - {
        "__init__.py",
        "one_process.py",
    }
    shown = {
        name: text
        for example in EXAMPLES
        for name, text in example.files.items()
        if name.startswith("examples/")
    }
    assert shown == {f"examples/{name}": (ROOT / "examples" / name).read_text() for name in names}
