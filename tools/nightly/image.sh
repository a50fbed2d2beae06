#!/usr/bin/env bash
# Runs %post and %test of env/relax_hpc.def in a Debian root, without Apptainer, and stores the result:
#
#   tools/nightly/image.sh [cpu|gpu]      (default: gpu; as root; 16 GB in $TMPDIR, 4 GB of downloads)
#
# debootstrap, a Debian package, makes the root; it is unpacked and not installed. The root is of the suite of the
# definition's base image, with Debian's Python in place of that image's. Everything is removed at the end.
# The result is tools/docs/results/image.json. It names the digests of the definition and of the lock; if one of them has
# changed, a test asks for a new run.
#
# RELAX_MIRROR: Debian mirror (default http://deb.debian.org/debian).
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
DEFINITION=$ROOT/env/relax_hpc.def
STORED=$ROOT/tools/docs/results/image.json
MIRROR=${RELAX_MIRROR:-http://deb.debian.org/debian}
PYTHON="python3.11-venv libpython3.11"
LIMIT_S=7200

say() { echo "image: $*" >&2; }
die() { say "$*"; exit 1; }

section() { sed -n "/^%$1\$/,/^%/p" "$DEFINITION" | grep -v '^%'; }

debootstrap_here() {  # debootstrap_here ARGUMENT...: runs debootstrap from its package
    mkdir -p "$WORK/debootstrap"
    (cd "$WORK/debootstrap" && apt-get download -qq debootstrap) || die "apt-get download failed; run apt-get update"
    dpkg -x "$WORK"/debootstrap/*.deb "$WORK/debootstrap"
    DEBOOTSTRAP_DIR=$WORK/debootstrap/usr/share/debootstrap "$WORK/debootstrap/usr/sbin/debootstrap" "$@"
}

copy_files() {  # the files of the image, without what a clean clone does not have
    local source target
    while read -r source target; do
        [[ -n $source ]] || continue
        mkdir -p "$IMAGE$(dirname "$target")"
        (cd "$ROOT" && git ls-files -z -- "$source" | tar --create --null --files-from=- --file=-) |
            tar --extract --file=- --directory "$WORK/copied"
        mv "$WORK/copied/$source" "$IMAGE$target"
    done < <(section files)
}

copy_network_settings() {  # of this machine: Apptainer mounts the first two and inherits the environment
    cp /etc/resolv.conf /etc/hosts "$IMAGE/etc/"
    mapfile -t NETWORK < <(env | grep -E '^(PIP_INDEX_URL|https?_proxy|no_proxy|HTTPS?_PROXY|NO_PROXY)=' || true)
    if [[ -f ${SSL_CERT_FILE:-} ]]; then
        cp "$SSL_CERT_FILE" "$IMAGE/etc/site-certificates.crt"
        NETWORK+=(SSL_CERT_FILE=/etc/site-certificates.crt PIP_CERT=/etc/site-certificates.crt)
    fi
}

run_inside() {  # run_inside SECTION: runs a section of the definition by sh, as Apptainer does
    local variables=(PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "${NETWORK[@]}")
    {
        [[ $1 != post ]] || echo "apt-get update && apt-get install -y --no-install-recommends $PYTHON"
        section "$1" | sed "s/{{ lock }}/$LOCKED/"
    } >"$IMAGE/section"
    # The mounts exist only in this namespace and vanish with it.
    # shellcheck disable=SC2016
    timeout "$LIMIT_S" unshare --mount --pid --fork --kill-child env -i "${variables[@]}" sh -euc '
        mount -t proc proc "$1/proc"
        mount --rbind /dev "$1/dev"
        exec chroot "$1" /bin/sh -e /section' sh "$IMAGE" >"$WORK/log" 2>&1 ||
        { tail -n 40 "$WORK/log" >&2; die "%$1 failed"; }
    rm "$IMAGE/section"
}

store() {
    local lock=$ROOT/env/requirements-$LOCKED.txt
    cat >"$STORED" <<JSON
{
 "commit": "$(git -C "$ROOT" rev-parse --short HEAD)",
 "date": "$(date +%F)",
 "machine": "$(nproc) cores, $(uname -m)",
 "command": "tools/nightly/image.sh $LOCKED",
 "definition_sha256": "$(sha256sum <"$DEFINITION" | cut -d' ' -f1)",
 "lock": "$LOCKED",
 "lock_sha256": "$(sha256sum <"$lock" | cut -d' ' -f1)",
 "python": "$(chroot "$IMAGE" /opt/relax_hpc/.venv/bin/python -V | cut -d' ' -f2)",
 "image_bytes": $(du --summarize --bytes --one-file-system "$IMAGE" | cut -f1),
 "post_s": $1
}
JSON
    say "stored $STORED"
}

main() {
    LOCKED=${1:-gpu}
    [[ $LOCKED == cpu || $LOCKED == gpu ]] || die "unknown argument '$LOCKED' (cpu, gpu)"
    [[ $(id -u) == 0 ]] || die "only root can make a Debian root; run it as root"
    local suite started
    suite=$(sed -n 's/^From: .*-//p' "$DEFINITION")
    WORK=$(mktemp -d)
    IMAGE=$WORK/image
    trap 'rm -rf --one-file-system "$WORK"' EXIT
    mkdir "$WORK/copied"
    say "making a root of Debian $suite"
    debootstrap_here --variant=minbase "$suite" "$IMAGE" "$MIRROR" >"$WORK/log" 2>&1 ||
        { tail -n 20 "$WORK/log" >&2; die "debootstrap failed"; }
    copy_files
    copy_network_settings
    say "running %post"
    started=$SECONDS
    run_inside post
    started=$((SECONDS - started))
    say "running %test"
    run_inside test
    store "$started"
}

main "$@"
