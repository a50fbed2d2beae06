/* libcuda.so.1 of a machine without a GPU: each function of the driver's interface answers that there is no device.
 *
 * Libraries of the GPU lock are linked with libcuda.so.1, so their import needs one. cuda_functions.h has a line
 * FUNCTION(name) for each function; gpu_lock.sh derives it from the cuda.h of the lock's wheels.
 */

enum { CUDA_SUCCESS = 0, CUDA_ERROR_NO_DEVICE = 100 };

#define FUNCTION(name) \
    int name(void) { return CUDA_ERROR_NO_DEVICE; }
#include "cuda_functions.h"

int cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

int cuDeviceGetCount(int *count) {
    *count = 0;
    return CUDA_SUCCESS;
}

int cuGetErrorString(int error, const char **text) {
    (void)error;
    *text = "stub of libcuda: no device";
    return CUDA_SUCCESS;
}

int cuGetErrorName(int error, const char **text) {
    (void)error;
    *text = "CUDA_ERROR_NO_DEVICE";
    return CUDA_SUCCESS;
}
