"""The program of a response is its last fenced block of Python, by the rules of CommonMark."""

from __future__ import annotations

import pytest

from relax_hpc.rewards.program_text import program_of

PYTHON = "print(1)\n"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (f"Install:\n```bash\ntrue\n```\nThen run this:\n```python\n{PYTHON}```\n", PYTHON),
        (f'```json\n{{"a": 1}}\n```\nThen\n```py\n{PYTHON}```', PYTHON),
        (
            f"```python\n{PYTHON}```\nIt prints\n```text\n1\n```\nin\n```bash\npython a.py\n```",
            PYTHON,
        ),
        (f"```python\n{PYTHON}```\nIt prints:\n```\n1\n```", PYTHON),
        (f"```python\n{PYTHON}```\nIt prints:\n```\n1 2 3\n```", PYTHON),
        (f"```python\nprint(0)\n```\nBetter:\n```\n{PYTHON}```", PYTHON),
        (f"```python\nprint(0)\n```\nBetter:\n```Python3\n{PYTHON}```", PYTHON),
        (f"~~~python\n{PYTHON}~~~", PYTHON),
        (f"````python\n{PYTHON}````\n", PYTHON),
        ('```python\ns = """\n~~~\n"""\n```', 's = """\n~~~\n"""\n'),
        ('````python\ns = """\n```\n"""\n````', 's = """\n```\n"""\n'),
        (f"````markdown\n```python\nprint(0)\n```\n````\n```python\n{PYTHON}```", PYTHON),
        ("````markdown\n```python\nprint(0)\n```\n````", ""),
        ("1. First\n\n   ```python\n   if 1:\n       print(1)\n   ```\n", "if 1:\n    print(1)\n"),
        (f"- So:\n  ```python\n  {PYTHON}  ```\nDone", PYTHON),
        (f"> ```python\n> {PYTHON}> ```", PYTHON),
        (f"  ```python\n  {PYTHON}  ```", PYTHON),
        (f'```python title="a.py"\n{PYTHON}```', PYTHON),
        (f"```{{python}}\n{PYTHON}```", PYTHON),
        (f"<answer>\n```python\n{PYTHON}```\n</answer>", PYTHON),
        (f"```python\r\n{PYTHON}```\r\n", PYTHON),
        (f"```python\n{PYTHON}", PYTHON),
        ("Use `print(1)` or ```print(2)```.", ""),
        ("```js\nx\n```", ""),
        ("```pycon\n>>> print(1)\n```", ""),
        ("```python-repl\n>>> print(1)\n```", ""),
        (f"```python3.11\n{PYTHON}```\n```pytb\nTraceback\n```", PYTHON),
        ("no block", ""),
        ("```\n```", ""),
    ],
)
def test_the_last_python_block_is_the_program(text: str, program: str) -> None:
    assert program_of(text) == program


@pytest.mark.timeout(60)
def test_no_response_takes_long_to_search() -> None:
    for text in ("- a\n", "> ", "```\n", "1. ", "(", "\t", "a.a"):
        for form in ("{}", "```\n{}\n```"):
            program_of(form.format(text * (99_000 // len(text))))
    assert program_of(f"{'a' * 100_000}\n```python\n1\n```") == "", "too long"
