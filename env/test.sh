#!/usr/bin/env bash
# Installs what is missing and runs the tests; arguments go to pytest (`-m unit`: the quick ones, `-m run`, `-m slurm`).
# Three test files run at a time, as whole runs mostly wait; `-n 0`: one after the other, which -s and --pdb need.
# A test of something installed here may not skip.
# --root: only the tests that need root, or that prove something else as root; other arguments follow.
# --record-budgets writes what each file took to tests/budgets.json; one that takes twice that fails.
# --all: all tests at full length (learning runs, all layouts of ranks, fuzzers, real engines in every fault), and as root
# all faults again as a plain user (hours); at the end the table of docs/faults.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ${1:-} == --root && $(id -u) != 0 ]]; then
    echo "env/test.sh --root: found user $(id -un), allowed: root" >&2
    exit 2
fi
bash env/setup.sh dev
installed=$SECONDS
VENV=$(realpath -m "${RELAX_VENV:-.venv}")
export PATH="$VENV/bin:$PATH"
# Tests start a thousand processes, which read compiled modules. Each worker of pytest rewrites the assertions of all test
# files, which takes 4 CPU seconds, unless an earlier session could keep them.
unset PYTHONDONTWRITEBYTECODE
python -m compileall -q relax_hpc examples tests || true
INSTALLED=sglang,mpi,torch,megatron,transformers,h5py,matplotlib,pyarrow,pexpect,math_verify,triton,gymnasium,datasets,qwen_vl_utils
# The Slurm that setup.sh installs on a Debian machine.
if dpkg-query -W -f='${Version}' slurm-wlm munge >/dev/null 2>&1 && command -v sinfo >/dev/null; then
    INSTALLED+=,slurm
fi
# As root, setup.sh installs it too. If that failed, the tests that need it fail.
if dpkg-query -W ffmpeg >/dev/null 2>&1 || { [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; }; then
    INSTALLED+=,ffmpeg
fi
if dpkg-query -W chromium >/dev/null 2>&1; then INSTALLED+=,chromium; fi
if dpkg-query -W podman runc uidmap >/dev/null 2>&1; then INSTALLED+=,podman; fi
if [[ -f $VENV/.stamp-rdma ]]; then INSTALLED+=,nixl; fi
export RELAX_REQUIRE=${RELAX_REQUIRE-$INSTALLED}
# All workers must find the same tests in the same order; the order of sets is another in each session all the same.
export PYTHONHASHSEED=${PYTHONHASHSEED-$RANDOM}

if [[ ${1:-} == --all ]]; then
    shift
    RELAX_FAULT_TABLE=$(mktemp)
    chmod a+w "$RELAX_FAULT_TABLE"
    export RELAX_FAULT_TABLE RELAX_REAL_ENGINES=1 RELAX_WHOLE=1
    faults=(tests/cluster/test_slurm_{het,jobs,ends,closed,waits,user,by_hand,modes}.py
        tests/runs/test_{full_disk,power_loss,rollout_killed}.py tests/project/test_guardian.py)
    options=(-m pytest -p no:cacheprovider -q --timeout=3600 "$@")
    failed=0
    "$VENV/bin/python" "${options[@]}" tests || failed=1
    if [[ $(id -u) == 0 ]]; then
        "$VENV/bin/python" -m tests.plain_user "${options[@]}" "${faults[@]}" || failed=1
    fi
    "$VENV/bin/python" -m tests.fault_table "$RELAX_FAULT_TABLE"
    exit "$failed"
fi

root=()
if [[ ${1:-} == --root ]]; then
    shift
    root=(-m root)
fi
if [[ $# -eq 0 || $* == --record-budgets ]]; then set -- tests -q --durations=15 "$@"; fi
beside=(-n 3 --dist loadfile --no-loadscope-reorder)
for word in "$@"; do
    case $word in -n* | --numprocesses* | -s | --pdb | --capture=no) beside=() ;; esac
done
failed=0
"$VENV/bin/python" -m pytest -p no:cacheprovider ${beside[@]+"${beside[@]}"} "$@" "${root[@]}" || failed=$?
# pytest's code for "no tests collected": the chosen files have no test for root.
if [[ ${#root[@]} != 0 && $failed == 5 ]]; then failed=0; fi
echo "installation $installed s, tests $((SECONDS - installed)) s"
exit "$failed"
