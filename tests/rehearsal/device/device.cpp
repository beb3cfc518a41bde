// A CUDA device that is the host, for a CPU build of torch: kernels of the CPU on memory that only `cuda` tensors own.
//
// Registers for CUDA what libtorch_cuda would: guard, hooks, allocators, operations and NCCL. It is strict where a GPU
// is: operands on two devices are an error, copies to pinned memory arrive when the host waits for them, and streams
// that use the same memory without waiting for each other are reported.
#include "attention.h"
#include "collectives.h"
#include "profiler.h"

#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>

using namespace rehearsal;
namespace py = pybind11;

namespace {
using RehearsalGuard = rehearsal::Guard;
C10_REGISTER_GUARD_IMPL(CUDA, RehearsalGuard);

bool registered = [] {
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks", [](at::CUDAHooksArgs given) -> std::unique_ptr<at::CUDAHooksInterface> {
        return std::make_unique<Hooks>(given);
      });
  c10::SetAllocator(CUDA, &allocator);
  torch::profiler::impl::registerCUDAMethods(&profiler_events);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_kernel);
  return true;
}();
}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &rehearsal::empty);
  m.impl("empty_strided", &rehearsal::empty_strided);
  m.impl("resize_", &rehearsal::resize);
  m.impl("copy_", &rehearsal::copy);
  m.impl("_local_scalar_dense", &rehearsal::item);
  m.impl("record_stream", &rehearsal::record_stream);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());  // else one that reads the offsets
  m.impl("mm.dtype", [](const at::Tensor& a, const at::Tensor& b, at::ScalarType type) {  // which a CPU lacks
    return at::mm(a.to(type), b.to(type));
  });
  m.impl("_fused_sdp_choice", &choose_kernel);
  m.impl("_scaled_dot_product_flash_attention", &flash);
  m.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
}

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, RehearsalTimer);
}

// Calls a Python function from any thread. Never destroyed: the interpreter may be gone by then.
template <class... Arguments> std::function<void(Arguments...)> with_gil(py::function given) {
  auto* function = new py::function(std::move(given));
  return [function](Arguments... arguments) {
    py::gil_scoped_acquire gil;
    (*function)(arguments...);
  };
}

static py::list live_blocks() {
  Locked guard(lock);
  py::list found;
  for (auto& [data, block] : blocks)
    found.append(py::make_tuple(reinterpret_cast<uintptr_t>(data), block->size, block->stream, block->device));
  return found;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("set_device_count", [](int count) { devices = count; });
  m.def("device_count", [] { return devices; });
  m.def("device", [] { return static_cast<int>(current_device); });
  m.def("exchange_device", [](int index) {
    int before = current_device;
    if (index >= 0) current_device = index;
    return before;
  });
  m.def("stream", [](int index) { return current_streams[index < 0 ? current_device : index]; });
  m.def("set_stream", [](int64_t id, int index) { current_streams[index < 0 ? current_device : index] = id; });
  m.def("synchronize", [] { arrive_all(); });
  m.def("set_background", [](bool value) { return std::exchange(background, value); });
  m.def("publish", &publish);
  m.def("observe", &observe);
  m.def("set_sync_debug_mode", [](int mode) { sync_mode = mode; });
  m.def("sync_debug_mode", [] { return sync_mode; });
  m.def("set_memory", [](size_t bytes) { limit = bytes; });
  m.def("memory", [] { return std::make_tuple(allocated, peak, limit); });
  m.def("reset_peak", [] { peak = allocated; });
  m.def("blocks", &live_blocks);
  m.def("resize_storage", &resize_storage);
  m.def("default_generator", [](int index) { return at::globalContext().defaultGenerator(Device(CUDA, index)); });
  m.def("on_wait", [](py::function f) { on_wait = with_gil<const std::string&>(std::move(f)); });
  m.def("on_out_of_memory", [](py::function f) {
    out_of_memory_observers.push_back(with_gil<int64_t, size_t, size_t, size_t>(std::move(f)));
  });
  m.def("report", [] {
    Locked guard(lock);
    return std::make_tuple(operations, waits, races, used_devices);
  });
  m.def("group", [](const c10::intrusive_ptr<c10d::Backend>& gloo, int rank, int size)
                     -> c10::intrusive_ptr<c10d::Backend> { return c10::make_intrusive<Group>(gloo, rank, size); });
}
