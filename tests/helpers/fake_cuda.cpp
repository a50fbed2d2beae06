// A CUDA device that does nothing: one stream, and events that have always passed. It is loaded before torch, whose
// FakeTensors then need neither a GPU nor a driver. torch 2.13 has such a guard (NoOpDeviceGuardImpl), but no hooks, without
// which its autograd finds no device.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
constexpr auto kType = c10::DeviceType::CUDA;

struct Guard : c10::impl::NoOpDeviceGuardImpl<kType> {
  Device exchangeDevice(Device) const override { return Device(kType, 0); }
  Device getDevice() const override { return Device(kType, 0); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, Device(kType, 0)); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, Device(kType, 0)); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

// torch looks for hooks of this name.
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
};

// A build of torch for CUDA registers its own hooks with a lower priority.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks);
}  // namespace at

// Call it after torch is loaded: a build for CUDA has registered its own guard.
extern "C" void use_fake_device() { c10::impl::DeviceGuardImplRegistrar(at::kType, new at::Guard()); }
