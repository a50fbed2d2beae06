#!/usr/bin/env bash
# Proves on a machine without a GPU that the GPU lock can be installed and imported, and stores the result:
#
#   tools/nightly/gpu_lock.sh      (30 minutes on two cores; 14 GB in $TMPDIR and 4 GB of downloads)
#
# 1. `env/setup.sh gpu` makes an environment in a folder of its own.
# 2. A short run with SGLang's engine on CPUs, without any libcuda.so.1, as on a login node.
# 3. nvcc of the wheels compiles a kernel, and links it with the files that setup.sh adds, as SGLang does on nodes.
# 4. All packages of the lock and all modules of relax_hpc are imported; a stub of libcuda.so.1 is in the library path.
# The result is tools/docs/results/gpu_lock.json. It names the digest of the lock; if the lock has changed, a test asks
# for a new run.
#
# RELAX_GPU_VENV: where to make the environment, which then stays (default: a temporary folder).
set -euo pipefail
unset PYTHONPATH

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
STORED=$ROOT/tools/docs/results/gpu_lock.json
RUN_LIMIT_S=3600

say() { echo "gpu_lock: $*" >&2; }
die() { say "$*"; exit 1; }

has_libcuda() { python3 -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null; }

compile_stub() {  # compile_stub VENV FOLDER: a libcuda.so.1 in FOLDER with every function of the wheels' cuda.h
    local header
    header=$(echo "$1"/lib/python3.*/site-packages/nvidia/cu[0-9]*/include/cuda.h)
    [[ -f $header ]] || die "no cuda.h in $1"
    mkdir -p "$2"
    # The stub defines these four itself.
    grep -ohE '\bcu[A-Z][A-Za-z0-9_]*' "$header" | sort -u |
        grep -vxE 'cuDriverGetVersion|cuDeviceGetCount|cuGetErrorString|cuGetErrorName' |
        sed 's/.*/FUNCTION(&)/' >"$2/cuda_functions.h"
    { grep -m 1 '^#define CUDA_VERSION ' "$header"; cat "$ROOT/tools/nightly/libcuda_stub.c"; } |
        gcc -shared -fPIC -w -I "$2" -Wl,-soname,libcuda.so.1 -o "$2/libcuda.so.1" -x c -
}

run_on_cpus() {  # run_on_cpus VENV FOLDER: two steps of the quickstart with SGLang's engine on CPUs
    timeout "$RUN_LIMIT_S" "$1/bin/relax-hpc" run --config quickstart --steps 2 --warm_start.steps 1 \
        --eval.samples 8 --run_dir "$2" >"$2.log" 2>&1 || { tail -n 40 "$2.log" >&2; die "the run on CPUs failed"; }
}

compile_kernel() {  # compile_kernel VENV FOLDER: prints the release of nvcc
    local home
    home=$(echo "$1"/lib/python3.*/site-packages/nvidia/cu[0-9]*)
    cat >"$2/kernel.cu" <<'CUDA'
#include <cuda.h>
#include <cuda_runtime.h>
__global__ void scale(float *values) { values[threadIdx.x] *= 2; }
extern "C" int run(float *values) {
    CUdevice device;
    scale<<<1, 32>>>(values);
    return cudaGetLastError() + cuDeviceGet(&device, 0);
}
CUDA
    "$home/bin/nvcc" -gencode=arch=compute_90a,code=sm_90a -Xcompiler -fPIC -shared -o "$2/kernel.so" "$2/kernel.cu" \
        -L"$home/lib64" -lcudart -L"$home/lib64/stubs" -lcuda || die "nvcc of the wheels cannot compile and link a kernel"
    "$home/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p'
}

main() {
    command -v gcc >/dev/null || die "no gcc, with which the stub is compiled; install it"
    ! has_libcuda || die "this machine has a libcuda.so.1; use one without the NVIDIA driver"
    local venv started=$SECONDS setup_s run_s nvcc
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
    venv=${RELAX_GPU_VENV:-$WORK/venv}
    say "installing into $venv"
    RELAX_VENV=$venv bash "$ROOT/env/setup.sh" gpu
    setup_s=$((SECONDS - started))
    "$venv/bin/relax-hpc" --help >/dev/null || die "relax_hpc is not installed in $venv"
    say "running the quickstart on CPUs"
    started=$SECONDS
    run_on_cpus "$venv" "$WORK/run"
    run_s=$((SECONDS - started))
    nvcc=$(compile_kernel "$venv" "$WORK")
    say "importing all packages"
    compile_stub "$venv" "$WORK/stub"
    (cd "$WORK" && LD_LIBRARY_PATH=$WORK/stub "$venv/bin/python" "$ROOT/tools/nightly/gpu_imports.py" \
        --setup-s "$setup_s" --run-s "$run_s" --nvcc "$nvcc" --out "$WORK/result.json")
    cp "$WORK/result.json" "$STORED"
    say "stored $STORED"
}

main "$@"
