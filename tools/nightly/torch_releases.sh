#!/usr/bin/env bash
# Runs the tests of groups of one rank with other releases of torch than the lock's, and stores the result:
#
#   tools/nightly/torch_releases.sh [VERSION...]      (default: the oldest that setup.py allows, and newest)
#
# `newest` is the newest release that pip installs here.
#
# Each release gets an environment of its own, whose other packages are those of .venv. The result is
# tools/docs/results/torch_releases.json; tests/project/test_torch_releases.py reads it. A release takes 20 minutes on two
# cores, and 7 GB: PyPI's torch is a CUDA build, which runs on CPUs too.
#
# RELAX_VENV: the environment with all other packages (default .venv).  RELAX_TORCH_ROOT: where to make the environments,
# which then stay (default: a temporary folder).
set -euo pipefail
unset PYTHONPATH

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
VENV=$(realpath "${RELAX_VENV:-$ROOT/.venv}")
STORED=$ROOT/tools/docs/results/torch_releases.json
TESTS=(tests/training/test_{meeting,packs,training_model,training_step,training_adam,training_inner,training_away}.py
    tests/training/test_{routing_replay,checkpoint}.py)
LIMIT_S=7200

say() { echo "torch_releases: $*" >&2; }
die() { say "$*"; exit 1; }

oldest() { sed -n 's/.*"torch>=\([0-9.]*\)".*/\1.0/p' "$ROOT/setup.py"; }

make_environment() {  # make_environment FOLDER VERSION
    [[ ! -e $1/done ]] || return 0
    local torch=torch
    [[ $2 == newest ]] || torch=torch==$2
    "$VENV/bin/python" -m venv --clear "$1"
    # torchvision has a release for each release of torch.
    "$1/bin/python" -m pip install --quiet --no-compile --only-binary :all: "$torch" torchvision
    # Behind the environment's own packages in the search path. pip must not see them: it would keep their torch.
    "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/relax_hpc_packages.pth"
    touch "$1/done"
}

run_tests() {  # run_tests FOLDER VERSION: the report of pytest in FOLDER/report.xml
    say "torch $2: tests"
    (cd "$ROOT" && RELAX_REQUIRE=torch,megatron timeout "$LIMIT_S" "$1/bin/python" -W ignore -m pytest \
        -p no:cacheprovider -q -n 0 --timeout=1200 --junitxml="$1/report.xml" "${TESTS[@]}") || say "torch $2: some failed"
    [[ -s $1/report.xml ]] || die "torch $2: no report of the tests"
}

main() {
    [[ -x $VENV/bin/python ]] || die "no environment in $VENV: env/setup.sh dev"
    local versions=("$@") version folder folders=()
    [[ $# -gt 0 ]] || versions=("$(oldest)" newest)
    WORK=${RELAX_TORCH_ROOT:-$(mktemp -d)}
    [[ -n ${RELAX_TORCH_ROOT:-} ]] || trap 'rm -rf "$WORK"' EXIT
    for version in "${versions[@]}"; do
        [[ $version =~ ^([0-9.]+|newest)$ ]] || die "found the version '$version', allowed: newest, or a number such as 2.11.0"
        folder=$WORK/torch-$version
        folders+=("$folder")
        say "torch $version: environment in $folder"
        make_environment "$folder" "$version"
        run_tests "$folder" "$version"
    done
    "$VENV/bin/python" "$ROOT/tools/nightly/torch_reports.py" --out "$STORED" "${folders[@]}"
    say "stored $STORED"
}

main "$@"
