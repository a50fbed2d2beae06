#!/usr/bin/env bash
# The whole system on two CPU cores: installs what is missing, then trains the quickstart model in a few minutes.
# Arguments go to `relax-hpc run`, after the defaults: env/demo.sh --steps 50
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash env/setup.sh
VENV=$(realpath -m "${RELAX_VENV:-.venv}")
mkdir -p runs
exec "$VENV/bin/relax-hpc" run --config configs/runs/quickstart.yaml \
    --run_dir "runs/quickstart-$(date +%Y%m%d-%H%M%S)" "$@"
