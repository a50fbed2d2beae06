#!/usr/bin/env bash
# Installs the toolkit with everything pinned into a virtual environment. Safe to call again: when nothing has changed
# it returns at once and touches no network; what an interrupted call left half done, the next one repairs.
#
#   env/setup.sh [cpu|gpu] [dev] [rdma]     (default: cpu, or gpu where gpu was installed before)
#   env/setup.sh system                     (as root: only the Debian packages that other users cannot install)
#
# RELAX_VENV: the environment's folder (default .venv).  RELAX_PYTHON: the Python 3.11 or 3.12 to make it from.
# RELAX_UNHASHED=1: take builds that no lock lists, such as a site's own wheels.
# RELAX_UNCHECKED=1: continue on a machine that does not meet the minimum requirements.
# RELAX_FACTS: a file with facts of the machine that will use the environment, where it is another one (env/README.md).
# RELAX_SETUP_WAIT_S: how long to wait for another call in progress (default 1800).
# RELAX_SETUP_SAY_S: how often a step that goes on says so in a log (default 20; in a terminal, every second).
set -euo pipefail
unset PYTHONPATH PYTHONHOME
export PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$(realpath -m "${RELAX_VENV:-$ROOT/.venv}")
LOG=$VENV/install.log
LOCK=$VENV.lock
ME=$(uname -n):$$
TICKER=
STEP=1  # where the step in progress begins in the log
NEEDS=$VENV/minimum_requirements.json  # what the installed lock needs; the doctor and the check of nodes read it
EXIT_CONFIG=78

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

supported() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; }
has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

find_python() {  # prints the first Python that can make environments; the system's own stays when others come and go
    local candidate known="/usr/bin/python3.11 /usr/bin/python3.12 /usr/bin/python3 python3.11 python3.12 python3"
    for candidate in ${RELAX_PYTHON:-$known}; do
        if supported "$candidate" && has_venv "$candidate"; then command -v "$candidate"; return; fi
    done
    return 1
}

stop_ticker() {
    [[ -n $TICKER ]] || return 0
    kill "$TICKER" 2>/dev/null || true
    wait "$TICKER" 2>/dev/null || true
    TICKER=
    [[ ! -t 2 ]] || printf '\r\033[K' >&2
}

tick() {  # shows that step $1 moves: every second on a terminal, seldom in a log
    local started=$SECONDS every=${RELAX_SETUP_SAY_S:-20} seconds next
    next=$every
    while sleep 1 && kill -0 $$ 2>/dev/null; do
        seconds=$((SECONDS - started))
        if [[ -t 2 ]]; then
            printf '\r\033[Ksetup: %s: %s' "$1" "$(progress "$seconds")" >&2
        elif ((seconds >= next)); then
            say "$1: $(progress "$seconds")"
            next=$((seconds + every))
        fi
    done
}

step_log() { tail -c "+$STEP" "$LOG"; }

progress() {  # how far pip has come in $1 seconds, as far as one can see
    local found installed
    found=$(step_log | grep -cE '^(Collecting|Processing) ') || true
    installed=$(find "$VENV"/lib -maxdepth 3 -name '*.dist-info' -newermt "-$1 seconds" 2>/dev/null | wc -l)
    ((found == 0)) || echo -n "$found found, $installed installed, "
    echo "$1 s"
}

shown() {  # runs a command with its words in the log: shown TEXT COMMAND...
    local status=0
    STEP=$(($(stat -c %s "$LOG" 2>/dev/null || echo 0) + 1))
    say "$1"
    tick "$1" &
    TICKER=$!
    "${@:2}" >>"$LOG" 2>&1 || status=$?
    stop_ticker
    return "$status"
}

may_apt() { [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null && command -v dpkg-query >/dev/null; }

apt_install() {
    mkdir -p "$VENV"
    shown "installing system packages: $*" apt_quietly "$@"
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
    [[ -z ${RELAX_PYTHON:-} ]] && may_apt && { apt_install python3.11-venv || apt_install python3.12-venv; }
}

system_packages() {  # prints the packages that the tests lack
    local have wanted
    may_apt && [[ -z $(find "$VENV/.apt-failed" -mmin -60 2>/dev/null) ]] || return 0
    have=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' | sed -n 's/^installed //p' | sort)
    wanted=$(grep -v '^#' "$ROOT/env/debian-packages.txt" | sort)
    # On a cluster with its own Slurm, only ffmpeg.
    if ! grep -qx slurm-client <<<"$have" && command -v sinfo >/dev/null; then
        wanted=$(command -v ffmpeg >/dev/null || echo ffmpeg)
    fi
    comm -13 <(echo "$have") <(echo "$wanted") | grep . || true
}

install_system_packages() {  # a convenience: tests that need them skip; a failure is not tried again for an hour
    local packages
    mapfile -t packages < <(system_packages)
    if ((${#packages[@]} == 0)) || apt_install "${packages[@]}"; then return; fi
    touch "$VENV/.apt-failed"
    say "apt-get failed (see $LOG): tests on a real Slurm, and those that need ffmpeg, will skip"
}

make_venv() {
    local python
    if ! python=$(find_python); then
        if ! apt_python || ! python=$(find_python); then
            say "no Python 3.11 or 3.12 with its venv module (tried ${RELAX_PYTHON:-python3.11, python3.12, python3}): \
install python3.11-venv, load a module, or set RELAX_PYTHON=/path/to/python3.11"
            exit "$EXIT_CONFIG"
        fi
    fi
    say "making $VENV with $python, $("$python" -V) (RELAX_PYTHON names another)"
    rm -f "$VENV"/bin/python*  # links to an interpreter that is gone would stay
    "$python" -m venv "$VENV"
}

check_venv() {  # makes the environment, or remakes its interpreter when that is broken
    if ! supported "$VENV/bin/python" || ! "$VENV/bin/python" -I -m pip --version >/dev/null 2>&1; then make_venv; fi
    head -n 3 "$VENV/bin/pip" | grep -qF "$VENV/bin/" || die "$VENV was made at another place: remove it and call again"
}

pip_quietly() {  # pip_quietly TEXT WORD...
    shown "$1" "$VENV/bin/python" -I -m pip install --progress-bar off "${@:2}"
}

mismatch() { step_log | grep 'DO NOT MATCH THE HASHES' >/dev/null; }

pip_install() {  # pip_install TEXT WORD...
    pip_quietly "$@" && return
    tail -n 20 "$LOG" >&2
    ! mismatch || say "a build that the lock does not list was refused; where it is your site's own and you trust it, \
RELAX_UNHASHED=1 takes it (env/README.md)"
    die "pip failed; the end of $LOG is above. Calling again goes on from here"
}

pip_lock() {  # installs the pins in file $2, one a line with their hashes: pip_lock TEXT FILE WORD...
    local hashed=(--require-hashes)
    if [[ ${RELAX_UNHASHED:-} == 1 ]]; then
        say "RELAX_UNHASHED=1: builds are not compared with the lock"
        sed -i 's/ --hash=.*//' "$2"
        hashed=()
    fi
    pip_install "$1" --no-deps --force-reinstall "${hashed[@]}" -r "$2" "${@:3}"
}

cpu_torch() {  # installs the torch of file $1 as a CPU build, if there is one; in a whole lock pip would prefer others
    local pin=$VENV/install-torch.txt words=(--no-deps --force-reinstall --require-hashes)
    grep '^torch==' "$1" | sed 's/ /+cpu /' >"$pin" || return 0
    [[ ${RELAX_UNHASHED:-} != 1 ]] || return 0
    pip_quietly "looking for a CPU build of torch" "${words[@]}" -r "$pin" "${@:2}" && return
    ! mismatch || say "the lock does not list this site's CPU build of torch: left out (RELAX_UNHASHED=1 takes it)"
}

stamp_of() {  # what installed lock $1 is a function of
    local files=("$ROOT/env/requirements-$1.txt")
    [[ $1 != cpu ]] || files+=("$ROOT/env/requirements-cuda.txt")
    [[ $1 != package ]] || files=("$ROOT/setup.py" "$ROOT/pyproject.toml")
    { cat "${files[@]}"; echo "$VENV $ROOT"; "$VENV/bin/python" -V; } 2>/dev/null | sha256sum
}

current() { [[ -x $VENV/bin/python && -f $VENV/.stamp-$1 && $(<"$VENV/.stamp-$1") == "$(stamp_of "$1")" ]]; }
all_current() { local part; for part in "$@"; do current "$part" || return 1; done; }

compile_all() {  # to bytecode, on all cores, which pip does not; some packages hold files meant not to compile
    local folders=("$VENV"/lib/python3.*/site-packages)
    shown "compiling to bytecode" "$VENV/bin/python" -I -m compileall -q -j 0 "${folders[@]}" || true
}

missing() { "$VENV/bin/python" -I "$ROOT/env/verify.py" "$1"; }

drop_replaced() {  # decord2 has decord's module: files of the old package would stay beside it, or replace its own
    local old=("$VENV"/lib/python3.*/site-packages/decord-*.dist-info)
    [[ ! -e ${old[0]} ]] || shown "removing decord, which decord2 replaces" "$VENV/bin/python" -I -m pip uninstall -y decord
}

install_lock() {
    local file=$ROOT/env/requirements-$1.txt todo=$VENV/install-$1.txt count options=()
    rm -f "$VENV/.stamp-$1"
    drop_replaced
    missing "$file" >"$todo"
    (($(wc -l <"$todo") <= 20)) || options=(--no-compile)
    if [[ $1 == cpu ]]; then
        cpu_torch "$todo" "${options[@]}"
        missing "$file" >"$todo"
    fi
    count=$(wc -l <"$todo")
    ((count == 0)) || pip_lock "installing $count packages of ${file##*/}" "$todo" "${options[@]}"
    ((${#options[@]} == 0)) || compile_all
    missing "$file" >"$todo"
    [[ ! -s $todo ]] || die "still not as ${file##*/} says: $(sed 's/ .*//' "$todo" | tr '\n' ' ')"
    rm -f "$todo" "$VENV/install-torch.txt"
    # Where only the CUDA build of torch is to be had, it runs on the CPU too, once its own libraries are there.
    if [[ $1 == cpu ]] && cuda_torch; then install_lock cuda; fi
    stamp_of "$1" >"$VENV/.stamp-$1"
}

cuda_torch() {
    "$VENV/bin/python" -I -c 'from importlib.metadata import requires
raise SystemExit(not any("cuda" in line for line in requires("torch") or ()))'
}

check_machine() {  # compares this machine with what lock $1 needs, before anything is downloaded
    local python lines line status=0 words=(--needs "$ROOT/env/requirements-$1.json" --use installation)
    [[ $1 != gpu ]] || words+=(--use gpu)
    [[ -z ${RELAX_FACTS:-} ]] || words+=(--facts "$(realpath -m "$RELAX_FACTS")")
    # Once most of it is installed, it is unknown how much space the rest needs.
    compgen -G "$VENV/lib/python3.*/site-packages/torch" >/dev/null || words+=(--disk "$VENV")
    if ! python=$(find_python); then
        # Any Python from 3.6 on can compare; RHEL 8 has one for its own programs only.
        python=$(command -v python3 || command -v /usr/libexec/platform-python) || return 0
        [[ -n ${RELAX_PYTHON:-} ]] || ! may_apt || words+=(--ignore-python)
    fi
    lines=$(cd "$ROOT/relax_hpc/base" && "$python" -S -E -B -m machine "${words[@]}" 2>&1) || status=$?
    if ((status != 0 && status != EXIT_CONFIG)); then
        say "minimum requirements not checked: ${lines##*$'\n'}"
        return
    fi
    while read -r line; do [[ -z $line ]] || say "$line"; done <<<"$lines"
    ((status == EXIT_CONFIG)) || return 0
    if [[ ${RELAX_UNCHECKED:-} == 1 ]]; then
        say "RELAX_UNCHECKED=1: continuing"
        return
    fi
    say "nothing was downloaded; RELAX_UNCHECKED=1 continues all the same"
    exit "$EXIT_CONFIG"
}

needs_kept() { [[ ! -f $ROOT/env/requirements-$1.json ]] || cmp -s "$ROOT/env/requirements-$1.json" "$NEEDS"; }

keep_facts() {  # the doctor and submit compare the nodes by these facts
    [[ -z ${RELAX_FACTS:-} ]] || cp "$RELAX_FACTS" "$VENV/machine_facts.json"
}

toolkit() {  # prints the root of the CUDA toolkit among the wheels, where they have a compiler
    local home
    for home in "$VENV"/lib/python3.*/site-packages/nvidia/cu[0-9]*; do
        if [[ -x $home/bin/nvcc ]]; then echo "$home"; fi
    done
}

toolkit_linked() {  # whether nothing is left to do for `link_toolkit`
    local home
    home=$(toolkit)
    [[ -z $home || -e $home/lib/stubs/libcuda.so ]] || ! command -v gcc >/dev/null
}

link_toolkit() {  # the names under which SGLang, tvm-ffi and flashinfer link the kernels that they compile
    local home library
    home=$(toolkit)
    [[ -n $home ]] || return 0
    ln -sfnT lib "$home/lib64"
    for library in "$home"/lib/lib*.so.*; do
        [[ -e ${library%%.so.*}.so ]] || ln -sf "${library##*/}" "${library%%.so.*}.so"
    done
    if ! command -v gcc >/dev/null; then
        say "found no gcc: engines compile kernels on the nodes, and cannot without it; install gcc and call again"
        return
    fi
    # A stub, as toolkits have it: at run time the functions are those of the driver's libcuda.so.1 on the node.
    mkdir -p "$home/lib/stubs"
    grep -ohE '\bcu[A-Z][A-Za-z0-9_]*' "$home/include/cuda.h" | sort -u | sed 's/.*/void &(void) {}/' |
        gcc -shared -w -Wl,-soname,libcuda.so.1 -o "$home/lib/stubs/libcuda.so" -x c -
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
    trap 'stop_ticker; rm -f "$LOCK"' EXIT
    trap 'exit 130' INT TERM HUP
}

main() {
    local base=cpu parts=() arg
    if [[ $* == system ]]; then
        take_lock
        find_python >/dev/null || apt_python || true
        install_system_packages
        return
    fi
    [[ ! -f $VENV/.stamp-gpu ]] || base=gpu
    for arg in "$@"; do
        case $arg in
            cpu | gpu) base=$arg ;;
            dev | rdma) parts+=("$arg") ;;
            *) die "unknown argument '$arg' (cpu, gpu, dev, rdma; system alone)" ;;
        esac
    done
    parts=("$base" "${parts[@]}" package)
    if all_current "${parts[@]}" && needs_kept "$base" && toolkit_linked && [[ " ${parts[*]} " != *" dev "* || -z $(system_packages) ]]; then
        keep_facts
        return
    fi
    current "$base" || check_machine "$base"
    take_lock
    check_venv
    [[ $base != cpu ]] || rm -f "$VENV/.stamp-gpu"
    [[ $base != gpu ]] || rm -f "$VENV/.stamp-cpu" "$VENV/.stamp-cuda"
    for arg in "${parts[@]}"; do
        if current "$arg"; then continue; fi
        if [[ $arg == package ]]; then install_package; else install_lock "$arg"; fi
    done
    needs_kept "$base" || cp "$ROOT/env/requirements-$base.json" "$NEEDS"
    keep_facts
    link_toolkit
    [[ " ${parts[*]} " != *" dev "* ]] || install_system_packages
    say "done: $VENV"
}

main "$@"
