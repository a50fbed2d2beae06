#!/usr/bin/env bash
# Runs the tests of plane rdma over real verbs, without a card: in a QEMU guest whose kernel emulates one (rdma_rxe).
#
#   tools/nightly/soft_roce.sh [pytest arguments]      (default: TRIED)
#
# What is in TRIED has passed, in three separate calls of three to four minutes; the whole of it in one call has not been
# run yet, nor have the other tests of plane rdma, those of deaths among them.
#
# On Debian 12 or alike, with NIXL in .venv (env/setup.sh rdma). QEMU and the kernel are Debian packages that are
# unpacked into a cache: nothing is installed, no root is needed. The guest sees this machine's files; what it writes is
# gone with it. It has no KVM: everything is slow, and no speed is measured. NIXL's own libibverbs knows no emulated
# card; in the guest the system's takes its place.
#
# RELAX_CACHE: where packages are kept (default ~/.cache/relax-soft-roce).  RELAX_VENV: the environment.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
VENV=$(realpath "${RELAX_VENV:-$ROOT/.venv}")
CACHE=${RELAX_CACHE:-$HOME/.cache/relax-soft-roce}
PACKAGES=(qemu-system-x86 qemu-system-common qemu-system-data seabios linux-image-amd64 busybox-static kmod libkmod2
    libcapstone4 libfdt1 libslirp0 libspice-server1 libusbredirparser1 libvdeplug2 libbrlapi0.8 libcacard0 libexecs0
    libpmem1 liburing2 libfuse3-3 libaio1 libdaxctl1 libndctl6)
MODULES=(virtio_pci 9pnet_virtio 9p overlay virtio_net ib_uverbs rdma_ucm crc32_generic rdma_rxe)
TRIED=(tests/net/test_planes.py tests/net/test_plane_rdma.py
    -k "rdma and (bytes_come_as or many_threads or retired) or verbs and bytes_come")
MEMORY_MIB=2048
LIMIT_S=3600

die() { echo "soft_roce: $*" >&2; exit 1; }

unpack() {  # fills the cache once
    [[ ! -e $CACHE/done ]] || return 0
    mkdir -p "$CACHE/root"
    local image
    image=$(apt-cache depends linux-image-amd64 | sed -n 's/^ *Depends: //p')
    (cd "$CACHE" && apt-get download -qq "${PACKAGES[@]}" "$image") || die "apt-get download failed; run apt-get update"
    for package in "$CACHE"/*.deb; do dpkg -x "$package" "$CACHE/root"; done
    ln -sf kmod "$CACHE/root/bin/depmod"
    "$CACHE/root/bin/depmod" -b "$CACHE/root" "$(ls "$CACHE/root/lib/modules")"
    touch "$CACHE/done"
}

modules() {  # prints the files of MODULES and of what they need, in the order in which to load them
    local name line
    for name in "${MODULES[@]}"; do
        line=$(grep -E "/$name\.ko:" "$CACHE"/root/lib/modules/*/modules.dep) || die "the kernel has no module $name"
        tr ' ' '\n' <<<"${line/:/}" | tac
    done | awk 'NF && !seen[$0]++'
}

initramfs() {  # $1: file to make; $2...: the command of the guest
    local image=$1 folder file
    shift
    folder=$(mktemp -d)
    mkdir -p "$folder"/{bin,modules,proc,sys,dev,host,rw,new}
    cp "$CACHE/root/bin/busybox" "$folder/bin/busybox"
    {
        echo '#!/bin/busybox sh'
        for file in $(modules); do
            cp "$CACHE"/root/lib/modules/*/"$file" "$folder/modules/"
            echo "/bin/busybox insmod /modules/${file##*/}"
        done
        cat <<'INIT'
b() { /bin/busybox "$@"; }
b mount -t proc proc /proc; b mount -t sysfs sys /sys; b mount -t devtmpfs dev /dev
b mkdir -p /dev/shm /dev/pts; b mount -t tmpfs shm /dev/shm; b mount -t devpts pts /dev/pts
b mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=262144 host /host
b mount -t tmpfs rw /rw; b mkdir /rw/up /rw/work
b mount -t overlay -o lowerdir=/host,upperdir=/rw/up,workdir=/rw/work overlay /new
for place in proc sys dev; do b mount -o rbind "/$place" "/new/$place"; done
b ip link set lo up; b ip address add 10.0.2.15/24 dev eth0; b ip link set eth0 up
b chroot /new rdma link add rxe0 type rxe netdev eth0 || { echo "soft_roce: exit 1, no card"; b poweroff -f; }
b chmod 666 /dev/infiniband/*
ulimit -l unlimited
INIT
        printf 'b chroot /new %s\n' "${*@Q}"
        echo 'echo "soft_roce: exit $?"; b poweroff -f'
    } >"$folder/init"
    chmod +x "$folder/init"
    (cd "$folder" && find . | bin/busybox cpio -o -H newc 2>/dev/null | gzip -1) >"$image"
    rm -r "$folder"
}

main() {
    ls "$VENV"/lib/python3.11/site-packages/nixl_cu1?.libs >/dev/null 2>&1 || die "no NIXL in $VENV: env/setup.sh rdma"
    command -v rdma >/dev/null || die "no program rdma: install iproute2"
    unpack
    [[ $# -gt 0 ]] || set -- "${TRIED[@]}"
    local guest
    WORK=$(mktemp -d)
    trap 'rm -r "$WORK"' EXIT
    guest="export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root PYTHONPATH=${ROOT@Q} UCX_TLS=rc,ud,self RELAX_TEST_PATIENCE=3
        cd ${ROOT@Q}; for file in ${VENV@Q}/lib/python3.11/site-packages/nixl_cu1?.libs/libibverbs-*; do
        ln -sf /usr/lib/x86_64-linux-gnu/libibverbs.so.1 \$file; done
        ${VENV@Q}/bin/python -m pytest -p no:cacheprovider --timeout=1200 --color=no -v ${*@Q}"
    initramfs "$WORK/initramfs" /bin/bash -c "$guest"
    LD_LIBRARY_PATH=$CACHE/root/usr/lib/x86_64-linux-gnu:$CACHE/root/lib/x86_64-linux-gnu timeout "$LIMIT_S" \
        "$CACHE/root/usr/bin/qemu-system-x86_64" -L "$CACHE/root/usr/share/qemu" -L "$CACHE/root/usr/share/seabios" \
        -machine q35 -accel tcg,thread=multi -cpu max -smp 2 -m "$MEMORY_MIB" -nographic -no-reboot \
        -kernel "$CACHE"/root/boot/vmlinuz-* -initrd "$WORK/initramfs" -append "console=ttyS0 panic=-1 quiet" \
        -netdev user,id=net -device virtio-net-pci,netdev=net,romfile= \
        -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
        | tee "$WORK/console"
    grep -q "^soft_roce: exit 0" "$WORK/console" || die "the tests failed, or the guest did not come to their end"
}

main "$@"
