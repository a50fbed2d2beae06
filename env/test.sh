#!/usr/bin/env bash
# Installs what is missing and runs the tests; arguments go to pytest. A test of something installed here may not skip.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash env/setup.sh dev
VENV=$(realpath -m "${RELAX_VENV:-.venv}")
export PATH="$VENV/bin:$PATH"
export RELAX_REQUIRE=${RELAX_REQUIRE-sglang,mpi,torch,megatron,transformers,h5py,matplotlib}
[[ $# -gt 0 ]] || set -- tests -q --durations=15
exec "$VENV/bin/python" -m pytest -p no:cacheprovider "$@"
