"""Write the parts of docs/ that follow from the code and from stored results, or say which are out
of date.

    python tools/docs           # write them
    python tools/docs --check   # exit code 1 and their names if they would change

Whole files: configuration/*.md, metrics.md, pictures/*.svg. Tables between `<!-- table NAME -->`
and `<!-- end -->` in any other page.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import benchmarks
import configuration
import gpu
import metrics
import option_names
import packages
import pictures

import examples

ROOT = Path(__file__).resolve().parents[2]
TABLES = {
    "packages": packages.table,
    "benchmarks": benchmarks.table,
    "gpu": gpu.table,
    "option_names": option_names.table,
    "example": examples.block,
}
"""Name -> from the word behind it in the marker, if there is one, to the lines."""
_TABLE = re.compile(r"(<!-- table (\w+) ?([\w-]*) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> Iterator[tuple[Path, str]]:
    """Each file that is generated, in whole or in part, and the text that it should have."""
    whole = {**configuration.pages(), "metrics.md": metrics.page(), **pictures.pictures()}
    for name, text in whole.items():
        yield ROOT / "docs" / name, text
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if str(path.relative_to(ROOT / "docs")) in whole:
            continue
        text = path.read_text()
        if "<!-- table " in text:
            yield path, _TABLE.sub(lambda m: f"{m[1]}{TABLES[m[2]](m[3])}\n{m[4]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check, stale = parser.parse_args().check, []
    for path, text in pages():
        if not path.exists() or path.read_text() != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
    print(
        "\n".join(
            f"{name}: {'out of date, run: python tools/docs' if check else 'written'}"
            for name in stale
        )
    )
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
