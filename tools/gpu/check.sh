#!/usr/bin/env bash
# What this code does on this machine's GPU, in one command: tests, then figures beside transformers' in the same run.
# Nothing is installed or fetched: it takes the Python that is there (RELAX_PYTHON, else python3) with its own torch, says
# what is missing, and fails (1) only if a test or a figure of ours fails; 78: too little is there to begin.
#
#   tools/gpu/check.sh                       # everything, half an hour; --store keeps the figures for docs/benchmarks.md
#   tools/gpu/check.sh --device cpu --small  # every line of it on tiny shapes, without a GPU
#   tools/gpu/check.sh --only tests          # or step, or staleness
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${RELAX_PYTHON:-python3}
device=cuda small=() store=0 only="tests step staleness"
while [[ $# -gt 0 ]]; do
    case $1 in
        --device) device=${2:?--device: name cuda or cpu} && shift ;;
        --only) only=${2:?--only: name tests, step or staleness} && shift ;;
        --small) small=(--small) ;;
        --store) store=1 ;;
        *) sed -n '2,8s/^# \{0,1\}//p' "$0" && exit 78 ;;
    esac
    shift
done
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0

"$PYTHON" tools/gpu/found.py --device "$device"

tests() { # $1: device; the rest goes to pytest
    local where=$1 code=0 && shift
    RELAX_TEST_DEVICE=$where "$PYTHON" -m pytest -p no:cacheprovider -p tools.gpu.missing -q "$@" || code=$?
    # 5: nothing was selected.
    [[ $code == 0 || $code == 5 ]] || failed=1
}
if [[ $only == *tests* ]]; then
    if [[ ${#small[@]} -gt 0 ]]; then
        tests "$device" -m gpu tests/test_causal_attention.py
        tests cpu -m unit tests/test_deadline.py
    else
        tests "$device" -m gpu tests
        tests cpu -m unit tests
    fi
fi
figures() { # $1: name; the rest: the benchmark
    local name=$1 && shift
    "$PYTHON" "$@" --device "$device" "${small[@]}" --json | tee "$folder/$name" || failed=1
    # What could not be measured, for want of a package, has printed no figures.
    if [[ $store == 1 && ${#small[@]} == 0 ]] && grep -q '^{"columns"' "$folder/$name"; then
        "$PYTHON" tools/docs/benchmarks.py "gpu_$name" tools/gpu/check.sh <"$folder/$name" || failed=1
    fi
}
if [[ $only == *step* ]]; then figures step tools/gpu/step.py; fi
if [[ $only == *staleness* ]]; then figures staleness tools/gpu/staleness.py; fi
if [[ $failed == 0 ]]; then echo "check: no failure"; else echo "check: FAILED, see above"; fi
exit "$failed"
