"""Whether this process has a context on a GPU, whichever library made it: some 0.5 GiB of the
device's memory."""

from __future__ import annotations

import ctypes
import os

_DRIVER = "libcuda.so.1"
_SUCCESS = 0


def has_cuda_context() -> bool:
    """Whether CUDA's driver, if a library has loaded it, knows of a context of this process;
    nothing is loaded or made.

    torch knows of its own contexts alone; MPI, UCX, NIXL and Triton make them too.
    """
    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    device, flags, active = 0, ctypes.c_uint(), ctypes.c_int()
    # An error says that the driver was never initialised, or that there are no more devices.
    while (
        driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        == _SUCCESS
    ):
        if active.value:
            return True
        device += 1
    return False
