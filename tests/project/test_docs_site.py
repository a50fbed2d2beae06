"""The documentation site: a strict build finds no broken link, and every page is short and in the
navigation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
_MOST_LINES = 300
_TO_SPLIT = ("extending/index.md",)
"""Pages that are still too long, and have no introduction."""


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of the mkdocs.yml in ``folder`` into ``site``."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_the_site_builds_in_strict_mode(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("*.md")}
    built = {
        path.parent.relative_to(tmp_path / "site")
        for path in (tmp_path / "site").rglob("index.html")
    }
    assert {page.parent if page.name == "index" else page for page in pages} <= built
    assert (tmp_path / "site" / "search" / "search_index.json").stat().st_size > 100_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_is_short_and_says_what_it_is_for(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert len(lines) <= _MOST_LINES, (
        f"{page}: found {len(lines)} lines, allowed: {_MOST_LINES}; split it by task"
    )
    assert lines[0].startswith("# ")
    assert lines[2].startswith("After reading this page"), (
        f"{page}: say first what readers can do after reading it"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[x](missing.md)", "missing.md"),
        ("[x](#missing)", "#missing"),
        ("[x](other.md#missing)", "#missing"),
        ("[x](../missing.py)", "../missing.py"),
        ("fine", "not_in_the_navigation.md"),
    ],
)
def test_a_mistake_ends_the_build(text: str, message: str, tmp_path: Path) -> None:
    """Broken links within docs/ and out of it, broken anchors, and a page that the navigation
    lacks."""
    make_site(tmp_path, text)
    if message == "not_in_the_navigation.md":
        (tmp_path / "docs" / message).write_text("# Lost\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0 and message in done.stderr


@pytest.mark.parametrize(
    ("repository", "html"),
    [("https://host/o/r", '<a href="https://host/o/r/blob/HEAD/setup.py">x</a>'), ("", "<p>x and")],
)
def test_links_out_of_docs_lead_to_the_repository(
    repository: str, html: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAX_DOCS_REPO", repository)
    make_site(tmp_path, "[x](../setup.py) and [y](other.md#one-two)")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert html in (tmp_path / "site" / "index.html").read_text()


def make_site(folder: Path, text: str) -> None:
    """A site of two pages with the settings of this project's; ``text`` stands on the first."""
    (folder / "tools" / "docs").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "docs" / "site_links.py", folder / "tools" / "docs")
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[0]
    (folder / "mkdocs.yml").write_text(f"{settings}\nnav: [index.md, other.md]\n")
    (folder / "setup.py").write_text("")
    (folder / "docs").mkdir()
    (folder / "docs" / "index.md").write_text(f"# First\n\n{text}\n")
    (folder / "docs" / "other.md").write_text("# Other\n\n## One two\n")
