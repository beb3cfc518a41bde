// What torch asks of a device: its guard (devices, streams, events), generators, and CUDA's hooks.
#pragma once

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace rehearsal {
struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Stream = c10::Stream;
  c10::DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(CUDA, current_device); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  c10::DeviceCapability getDeviceCapability(Device) const override { return c10::DeviceCapability(); }

  Stream stream_of(Device device, int64_t id) const {
    return Stream(Stream::UNSAFE, Device(CUDA, index_of(device)), id);
  }
  Stream getStream(Device device) const override { return stream_of(device, current_streams[index_of(device)]); }
  Stream getDefaultStream(Device device) const override { return stream_of(device, 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int = 0) const override {
    Locked guard(lock);
    used_devices.insert(index_of(device));
    return stream_of(device, ++streams_created);
  }
  Stream exchangeStream(Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[index_of(stream.device())] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override { arrive(seen_by(stream.id())); }
  void synchronizeDevice(const DeviceIndex) const override { arrive_all(); }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Locked guard(lock);
    if (*event == nullptr) *event = new Event;
    tick(stream.id());
    used_devices.insert(stream.device().index());
    *static_cast<Event*>(*event) = {clocks[stream.id()], std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& stream) const override {
    if (event == nullptr) return;
    Locked guard(lock);
    advance(clocks[stream.id()], static_cast<Event*>(event)->seen);
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) arrive(static_cast<Event*>(event)->seen);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    auto passed = static_cast<Event*>(end)->when - static_cast<Event*>(start)->when;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};

// A generator of the device: its numbers are those of a CPU's.
struct Generator final : c10::GeneratorImpl {
  at::Generator inner;
  Generator(DeviceIndex index, at::Generator cpu)
      : GeneratorImpl(Device(CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)), inner(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    auto* impl = const_cast<c10::TensorImpl*>(&state);
    inner.set_state(Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(impl)));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.get_state().getIntrusivePtr(); }
  Generator* clone_impl() const override { return new Generator(device_.index(), inner.clone()); }
};

inline at::Generator new_generator(DeviceIndex index) {
  return at::make_generator<Generator>(index < 0 ? current_device : index, at::detail::createCPUGenerator());
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return devices; }
  int getNumGPUs() const override { return devices; }
  DeviceIndex current_device() const override { return rehearsal::current_device; }
  DeviceIndex getCurrentDevice() const override { return rehearsal::current_device; }
  void setCurrentDevice(DeviceIndex index) const override { rehearsal::current_device = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return std::exchange(rehearsal::current_device, index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  Device getDeviceFromPtr(void*) const override { return Device(CUDA, rehearsal::current_device); }
  const at::Generator& getDefaultGenerator(DeviceIndex given) const override {
    static std::map<DeviceIndex, at::Generator> defaults;
    auto index = given < 0 ? rehearsal::current_device : given;
    if (!defaults.count(index)) defaults[index] = new_generator(index);
    return defaults[index];
  }
  at::Generator getNewGenerator(DeviceIndex index) const override { return new_generator(index); }
  void deviceSynchronize(DeviceIndex) const override { arrive_all(); }
};
}  // namespace rehearsal
