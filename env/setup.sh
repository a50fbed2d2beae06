#!/usr/bin/env bash
# Installs the toolkit with everything pinned into a virtual environment. Safe to call again: when nothing has changed
# it returns at once and touches no network; what an interrupted call left half done, the next one repairs.
#
#   env/setup.sh [cpu|gpu] [dev] [rdma]     (default: cpu, or gpu where gpu was installed before)
#
# RELAX_VENV: the environment's folder (default .venv).  RELAX_PYTHON: the Python 3.11 to make it from.
# RELAX_SETUP_WAIT_S: how long to wait for another call in progress (default 1800).
set -euo pipefail
unset PYTHONPATH PYTHONHOME
export PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$(realpath -m "${RELAX_VENV:-$ROOT/.venv}")
LOG=$VENV/install.log
LOCK=$VENV.lock
ME=$(uname -n):$$

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

is_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }
has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

find_python() {  # prints the first Python 3.11 that can make environments
    local candidate
    for candidate in ${RELAX_PYTHON:-python3.11 /usr/bin/python3.11 python3}; do
        if is_311 "$candidate" && has_venv "$candidate"; then echo "$candidate"; return; fi
    done
    return 1
}

may_apt() { [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null && command -v dpkg-query >/dev/null; }

apt_install() {
    say "installing system packages: $*"
    mkdir -p "$VENV"
    apt_quietly "$@" >>"$LOG" 2>&1
}

apt_quietly() (  # a subshell, whose end removes the policy that keeps new packages from starting daemons
    policy=/usr/sbin/policy-rc.d
    if [[ ! -e $policy ]]; then
        trap 'rm -f "$policy"' EXIT
        trap 'exit 130' INT TERM HUP
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
    fi
    apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
)

apt_python() {  # the one system package without which nothing works, and only where root may install it
    [[ -z ${RELAX_PYTHON:-} ]] && may_apt && apt_install python3.11-venv
}

slurm_packages() {  # prints what the Slurm tests lack, unless Slurm is there and is not Debian's: a cluster's own
    local have wanted
    may_apt && [[ -z $(find "$VENV/.apt-failed" -mmin -60 2>/dev/null) ]] || return 0
    have=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' | sed -n 's/^installed //p' | sort)
    grep -qx slurm-client <<<"$have" || ! command -v sinfo >/dev/null || return 0
    wanted=$(grep -v '^#' "$ROOT/env/debian-packages.txt" | sort)
    comm -13 <(echo "$have") <(echo "$wanted")
}

install_slurm() {  # a convenience: without it the Slurm tests skip; a failure is not tried again for an hour
    local packages
    mapfile -t packages < <(slurm_packages)
    if ((${#packages[@]} == 0)) || apt_install "${packages[@]}"; then return; fi
    touch "$VENV/.apt-failed"
    say "apt-get failed (see $LOG): tests on a real Slurm will skip"
}

make_venv() {
    local python
    if ! python=$(find_python); then
        apt_python && python=$(find_python) || die "no Python 3.11 with its venv module (tried \
${RELAX_PYTHON:-python3.11, python3}): install python3.11-venv, load a module, or set RELAX_PYTHON=/path/to/python3.11"
    fi
    say "making $VENV"
    rm -f "$VENV"/bin/python*  # links to an interpreter that is gone would stay
    "$python" -m venv "$VENV"
}

check_venv() {  # makes the environment, or remakes its interpreter when that is broken
    if ! is_311 "$VENV/bin/python" || ! "$VENV/bin/python" -I -m pip --version >/dev/null 2>&1; then make_venv; fi
    head -n 3 "$VENV/bin/pip" | grep -qF "$VENV/bin/" || die "$VENV was made at another place: remove it and call again"
}

pip_install() {
    say "$1"
    shift
    "$VENV/bin/python" -I -m pip install --progress-bar off "$@" >>"$LOG" 2>&1 && return
    tail -n 20 "$LOG" >&2
    die "pip failed; the end of $LOG is above. Calling again goes on from here"
}

stamp_of() {  # what installed lock $1 is a function of
    local files=("$ROOT/env/requirements-$1.txt")
    [[ $1 != package ]] || files=("$ROOT/setup.py" "$ROOT/pyproject.toml")
    { cat "${files[@]}"; echo "$VENV $ROOT"; "$VENV/bin/python" -V; } 2>/dev/null | sha256sum
}

current() { [[ -x $VENV/bin/python && -f $VENV/.stamp-$1 && $(<"$VENV/.stamp-$1") == "$(stamp_of "$1")" ]]; }
all_current() { local part; for part in "$@"; do current "$part" || return 1; done; }

compile_all() {  # to bytecode, on all cores, which pip does not; some packages hold files meant not to compile
    say "compiling to bytecode"
    "$VENV/bin/python" -I -m compileall -q -j 0 "$VENV"/lib/python3.11/site-packages >>"$LOG" 2>&1 || true
}

install_lock() {
    local file=$ROOT/env/requirements-$1.txt todo=$VENV/install-$1.txt count
    rm -f "$VENV/.stamp-$1"
    "$VENV/bin/python" -I "$ROOT/env/verify.py" "$file" >"$todo"
    count=$(wc -l <"$todo")
    if ((count > 20)); then
        pip_install "installing $count packages of ${file##*/}" --no-deps --force-reinstall --no-compile -r "$todo"
        compile_all
    elif ((count > 0)); then
        pip_install "installing $count packages of ${file##*/}" --no-deps --force-reinstall -r "$todo"
    fi
    if grep -q '^torch==' "$file" && ! "$VENV/bin/python" -I -c 'import torch' >>"$LOG" 2>&1; then
        # Only the CUDA build of torch was to be had: it runs on the CPU too, once its own libraries are there.
        pip_install "installing the libraries of torch's CUDA build" -c "$file" "$(grep '^torch==' "$file")"
        "$VENV/bin/python" -I -c 'import torch' || die "torch cannot be imported (see above)"
    fi
    "$VENV/bin/python" -I "$ROOT/env/verify.py" "$file" >"$todo"
    [[ ! -s $todo ]] || die "still not as ${file##*/} says: $(tr '\n' ' ' <"$todo")"
    rm "$todo"
    stamp_of "$1" >"$VENV/.stamp-$1"
}

install_package() {
    rm -f "$VENV/.stamp-package"
    pip_install "installing relax_hpc from $ROOT" --no-deps --no-build-isolation -e "$ROOT"
    stamp_of package >"$VENV/.stamp-package"
}

take_lock() {  # a symbolic link names the holder and is made or refused in one step, on any filesystem
    local deadline=$((SECONDS + ${RELAX_SETUP_WAIT_S:-1800})) holder
    mkdir -p "$(dirname "$VENV")"
    [[ -w $(dirname "$VENV") ]] || die "cannot write in $(dirname "$VENV"): set RELAX_VENV to a folder of yours"
    until ln -sT "$ME" "$LOCK" 2>/dev/null; do
        holder=$(readlink "$LOCK") || holder=somebody
        if [[ ${holder%:*} == "${ME%:*}" && ! -d /proc/${holder#*:} ]]; then rm -f "$LOCK"; continue; fi
        ((SECONDS < deadline)) || die "$holder (host:pid) still holds $LOCK; if it is gone, remove that link"
        sleep 1
    done
    trap 'rm -f "$LOCK"' EXIT
    trap 'exit 130' INT TERM HUP
}

main() {
    local base=cpu parts=() arg
    [[ ! -f $VENV/.stamp-gpu ]] || base=gpu
    for arg in "$@"; do
        case $arg in
            cpu | gpu) base=$arg ;;
            dev | rdma) parts+=("$arg") ;;
            *) die "unknown argument '$arg' (cpu, gpu, dev, rdma)" ;;
        esac
    done
    parts=("$base" "${parts[@]}" package)
    if all_current "${parts[@]}" && [[ " ${parts[*]} " != *" dev "* || -z $(slurm_packages) ]]; then return; fi
    take_lock
    check_venv
    [[ $base != cpu ]] || rm -f "$VENV/.stamp-gpu"
    [[ $base != gpu ]] || rm -f "$VENV/.stamp-cpu"
    for arg in "${parts[@]}"; do
        if current "$arg"; then continue; fi
        if [[ $arg == package ]]; then install_package; else install_lock "$arg"; fi
    done
    [[ " ${parts[*]} " != *" dev "* ]] || install_slurm
    say "done: $VENV"
}

main "$@"
