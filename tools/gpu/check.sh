#!/usr/bin/env bash
# Measure this code on this machine's GPU, compare it with transformers and with targets, then run the tests.
# The most valuable figure is measured first. Each figure has its own process and deadline. If it needs more memory than
# the machine has, its line says so. The check installs nothing: it uses the machine's Python (RELAX_PYTHON, otherwise
# python3) with its torch, and lists missing packages.
# RELAX_CHECK_LOG=FILE keeps the output of jobs that failed.
# Exit code: 1 if a test or a figure of this code failed, 78 if a needed package or GPU is missing.
#
#   tools/gpu/check.sh                       # everything, about an hour
#   tools/gpu/check.sh --store               # stores each figure in tools/bench/results; the next call measures the others
#   tools/gpu/check.sh --seconds 560         # starts nothing that would end later
#   tools/gpu/check.sh --device cpu --small  # every part on tiny shapes, without a GPU
#   tools/gpu/check.sh --only step experts   # programs of tools/gpu, or jobs by name; `found`: only list packages and GPUs;
#                                            # `tests`: only the tests
#   tools/gpu/check.sh --wheels FOLDER       # puts missing packages from wheels in a temporary folder
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${RELAX_PYTHON:-python3}
device=cuda small=() store=() only=() seconds= wheels=
while [[ $# -gt 0 ]]; do
    case $1 in
        --device) device=${2:?--device: name cuda or cpu} && shift ;;
        --only)
            while [[ $# -gt 1 && $2 != --* ]]; do only+=("$2") && shift; done
            [[ ${#only[@]} -gt 0 ]] || { echo "check: --only: no name follows, allowed: found, tests, programs or jobs" && exit 78; }
            ;;
        --small) small=(--small) ;;
        --store)
            store=(--store)
            if [[ $# -gt 1 && $2 != --* ]]; then store+=("$2") && shift; fi
            ;;
        --seconds)
            seconds=${2:-} && shift
            [[ $seconds =~ ^[0-9]+$ ]] || { echo "check: --seconds: found '$seconds', allowed: a whole number" && exit 78; }
            ;;
        --wheels)
            wheels=${2:-} && shift
            compgen -G "$wheels/*.whl" >/dev/null || { echo "check: --wheels: found no wheel in '$wheels', allowed: a folder of wheels" && exit 78; }
            ;;
        *) sed -n '2,15s/^# \{0,1\}//p' "$0" && exit 78 ;;
    esac
    shift
done
started=$SECONDS
packages=
trap '[[ -z $packages ]] || rm -rf "$packages"' EXIT
if [[ -n $wheels ]]; then
    packages=$(mktemp -d)
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$packages" "$wheels"/*.whl
fi
export PYTHONPATH="$PWD${packages:+:$packages}${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
"$PYTHON" tools/gpu/requirements.py --device "$device"

wanted() { # wanted NAME: whether --only, if present, names NAME
    [[ ${#only[@]} == 0 || " ${only[*]} " == *" $1 "* ]]
}
figures=()
for name in "${only[@]}"; do [[ $name == found || $name == tests ]] || figures+=("$name"); done
failed=0 unmeasured=0
if [[ ${#only[@]} == 0 || ${#figures[@]} -gt 0 ]]; then
    [[ $device == cuda ]] || export CUDA_VISIBLE_DEVICES=
    options=(--device "$device" "${small[@]}" "${store[@]}")
    [[ ${#figures[@]} == 0 ]] || options+=(--only "${figures[@]}")
    [[ -z $seconds ]] || options+=(--seconds "$((seconds - SECONDS + started))")
    "$PYTHON" tools/gpu/measure.py "${options[@]}" || unmeasured=$?
    [[ $unmeasured -lt 2 ]] || exit 78
fi
tests() { # tests DEVICE ARGUMENTS...: run pytest
    local test_device=$1 code=0 && shift
    RELAX_TEST_DEVICE=$test_device "$PYTHON" -m pytest -p no:cacheprovider -p tools.gpu.missing -q "$@" || code=$?
    # pytest exits with 5 if no test was selected.
    [[ $code == 0 || $code == 5 ]] || failed=1
}
if wanted tests && [[ -z $seconds || $((seconds - SECONDS + started)) -gt 60 ]]; then
    if [[ ${#small[@]} -gt 0 ]]; then
        tests "$device" -m gpu tests/training/test_causal_attention.py
        tests cpu -m unit tests/rollout/test_deadline.py
    else
        tests "$device" -m gpu tests
        tests cpu -m unit tests
    fi
fi
if [[ $failed == 1 ]]; then echo "check: tests FAILED, see above"; else echo "check: no test failed"; fi
if [[ $unmeasured == 1 ]]; then echo "check: some figures could not be measured, see above"; fi
[[ $failed == 0 && $unmeasured == 0 ]]
