#!/usr/bin/env bash
# What this code does on this machine's GPU, in one command: tests, then a table of figures beside transformers' and
# targets. Nothing is installed or fetched: it takes the Python that is there (RELAX_PYTHON, else python3) with its own
# torch, and says what is missing. Each figure is measured in a process of its own, with a deadline: one that has not the
# memory is a line that says so. It fails (1) only if a test fails; 78: too little is there to begin.
#
#   tools/gpu/check.sh                       # everything, about an hour; --store keeps the figures in tools/bench/results
#   tools/gpu/check.sh --device cpu --small  # every line of it on tiny shapes, without a GPU
#   tools/gpu/check.sh --only tests          # or found (what is there and what is not), step, packing, overlap, copies,
#                                            # staleness
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${RELAX_PYTHON:-python3}
device=cuda small=() store=() only="tests step packing overlap copies staleness"
while [[ $# -gt 0 ]]; do
    case $1 in
        --device) device=${2:?--device: name cuda or cpu} && shift ;;
        --only)
            only=${2:-}
            [[ " found tests step packing overlap copies staleness " == *" $only "* ]] || {
                echo "check: --only: found '$only', allowed: one of found tests step packing overlap copies staleness" && exit 78
            }
            shift
            ;;
        --small) small=(--small) ;;
        --store) store=(--store) ;;
        *) sed -n '2,11s/^# \{0,1\}//p' "$0" && exit 78 ;;
    esac
    shift
done
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
failed=0

"$PYTHON" tools/gpu/found.py --device "$device"

tests() { # $1: device; the rest goes to pytest
    local where=$1 code=0 && shift
    RELAX_TEST_DEVICE=$where "$PYTHON" -m pytest -p no:cacheprovider -p tools.gpu.missing -q "$@" || code=$?
    # 5: nothing was selected.
    [[ $code == 0 || $code == 5 ]] || failed=1
}
if [[ " $only " == *" tests "* ]]; then
    if [[ ${#small[@]} -gt 0 ]]; then
        tests "$device" -m gpu tests/training/test_causal_attention.py
        tests cpu -m unit tests/rollout/test_deadline.py
    else
        tests "$device" -m gpu tests
        tests cpu -m unit tests
    fi
fi
figures=()
for part in $only; do [[ $part == tests || $part == found ]] || figures+=("$part"); done
unmeasured=0
if [[ ${#figures[@]} -gt 0 ]]; then
    [[ $device == cuda ]] || export CUDA_VISIBLE_DEVICES=
    "$PYTHON" tools/gpu/table.py --device "$device" "${small[@]}" "${store[@]}" --only "${figures[@]}" || unmeasured=1
fi
if [[ $failed == 1 ]]; then echo "check: tests FAILED, see above"; else echo "check: no test failed"; fi
if [[ $unmeasured == 1 ]]; then echo "check: some figures could not be measured, see above"; fi
exit "$failed"
