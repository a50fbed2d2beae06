"""A real browser, where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_browser = pytest.mark.skipif(
    not shutil.which("chromium"),
    reason="a real browser is looked into where there is one: chromium",
)


def seen(page: Path, fragment: str = "") -> str:
    """Elements of ``page``, as the browser has them once its scripts have run."""
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={page.parent / 'browser'}",
    ]
    command += ["--virtual-time-budget=5000", "--dump-dom", f"{page.as_uri()}#{fragment}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
