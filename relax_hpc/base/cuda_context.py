"""Check for a CUDA context of this process. A context takes about 0.5 GiB of the GPU's memory."""

from __future__ import annotations

import ctypes
import os

_DRIVER = "libcuda.so.1"
_SUCCESS = 0


def has_cuda_context() -> bool:
    """Whether this process has a CUDA context, whichever library created it.

    The answer comes from CUDA's driver, if a library has loaded it. Nothing is loaded or created.
    torch knows only the contexts that it has created, but MPI, UCX, NIXL and Triton create them
    too.
    """
    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    device, flags, active = 0, ctypes.c_uint(), ctypes.c_int()
    # The driver returns an error if it was never initialised, or if there are no more devices.
    while (
        driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        == _SUCCESS
    ):
        if active.value:
            return True
        device += 1
    return False
