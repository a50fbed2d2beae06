"""Plugin of pytest that skips a test file if a package that it imports is not installed."""

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
    match = _MISSING.search(str(report.longrepr)) if report.failed else None
    if match:
        report.outcome = "skipped"
        reason = f"Skipped: needs package {match[1] or match[2]}"
        report.longrepr = (str(collector.path), 0, reason)
    return report
