// torch's profiler on the device: where it has no CUPTI, it takes the device's times from events.
#pragma once

#include "guard.h"

#include <torch/csrc/profiler/stubs/base.h>

namespace rehearsal {
struct ProfilerEvents final : torch::profiler::impl::ProfilerStubs {
  using Time = std::chrono::steady_clock::time_point;

  void record(DeviceIndex* device, torch::profiler::impl::ProfilerVoidEventStub* event,
              int64_t* cpu_ns) const override {
    auto now = std::chrono::steady_clock::now();
    if (device) *device = current_device;
    if (cpu_ns) *cpu_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now.time_since_epoch()).count();
    *event = std::make_shared<Time>(now);
  }
  float elapsed(const torch::profiler::impl::ProfilerVoidEventStub* start,
                const torch::profiler::impl::ProfilerVoidEventStub* end) const override {
    auto passed = *static_cast<Time*>(end->get()) - *static_cast<Time*>(start->get());
    return std::chrono::duration<float, std::micro>(passed).count();
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> call) const override {
    for (int index = 0; index < devices; ++index) call(index);
  }
  void synchronize() const override { arrive_all(); }
};
inline ProfilerEvents profiler_events;
}  // namespace rehearsal
