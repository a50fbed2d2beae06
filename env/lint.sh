#!/usr/bin/env bash
# Checks the code without running it: ruff (rules and format) and mypy. `env/setup.sh dev` installs both.
# Settings are in pyproject.toml. Exit code 1: one of them found something.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=$(realpath -m "${RELAX_VENV:-.venv}")/bin
failed=0
"$bin/ruff" check . || failed=1
"$bin/ruff" format --check . || failed=1
"$bin/mypy" || failed=1
exit "$failed"
