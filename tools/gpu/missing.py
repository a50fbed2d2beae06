"""pytest, where packages are missing: a test file that cannot be imported for want of one is
skipped by its name."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import pytest

_MISSING = re.compile(
    r"ModuleNotFoundError: No module named '((?!relax_hpc|tests)[\w.]+)'"
    r"|PackageNotFoundError: No package metadata was found for ([\w.-]+)"
)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    if report.failed and (found := _MISSING.search(str(report.longrepr))):
        report.outcome, report.longrepr = (
            "skipped",
            (str(collector.path), 0, f"Skipped: needs package {found[1] or found[2]}"),
        )
    return report
