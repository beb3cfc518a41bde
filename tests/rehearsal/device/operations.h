// Operations: the CPU's kernels on the device's memory, through one boxed fallback and a few functions for single operations.
#pragma once

#include "guard.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/resize_native.h>
#include <c10/core/DeviceGuard.h>

namespace rehearsal {
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;

inline std::string two_devices(const std::string& a, const std::string& b) {
  return "Expected all tensors to be on the same device, but found at least two devices, " + a + " and " + b;
}

// The tensors of one operation, as tensors of the host that share their memory.
struct Operands {
  struct View { Tensor device, host; const void* data; };
  std::vector<View> views;
  std::optional<Device> device;
  bool on_host = false;  // whether a tensor with dimensions is the host's: scalars may be

  Tensor host(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      on_host |= tensor.dim() > 0;
      return tensor;
    }
    TORCH_CHECK(!device || *device == tensor.device(), two_devices(device->str(), tensor.device().str()));
    device = tensor.device();
    for (auto& view : views)
      if (view.device.is_same(tensor)) return view.host;
    auto storage = host_storage(tensor);
    const void* data = storage.data();
    Tensor host = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
    host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.is_conj()) host._set_conj(true);
    if (tensor.is_neg()) host._set_neg(true);
    views.push_back({tensor, host, data});
    return host;
  }

  c10::Storage host_storage(const Tensor& tensor) {
    for (auto& view : views)
      if (view.device.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl())
        return view.host.storage();
    auto* owner = new c10::Storage(tensor.storage());
    auto drop = [](void* context) { delete static_cast<c10::Storage*>(context); };
    c10::DataPtr data(const_cast<void*>(owner->data()), owner, drop, Device(c10::kCPU));
    return c10::Storage(c10::Storage::use_byte_size_t(), owner->nbytes(), std::move(data),
                        c10::GetAllocator(c10::kCPU), true);
  }

  // Return a result on the device: an operand, a view of one, or new memory.
  Tensor on_device(const Tensor& host) {
    if (!host.defined() || host.is_cuda()) return host;
    for (auto& view : views) {
      if (view.host.is_same(host)) return view.device;
      if (view.host.storage().unsafeGetStorageImpl() == host.storage().unsafeGetStorageImpl())
        return view_of(view.device, host);
    }
    return copy_of(host);
  }

  Tensor view_of(const Tensor& base, const Tensor& host) {
    Tensor out = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(base.storage()), DispatchKeySet(DispatchKey::CUDA), host.dtype());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    return out;
  }

  Tensor copy_of(const Tensor& host) {
    c10::OptionalDeviceGuard there(device);
    Tensor out = at::detail::empty_strided_generic(
        host.sizes(), host.strides(), &allocator, DispatchKeySet(DispatchKey::CUDA), host.scalar_type());
    auto bytes = at::detail::computeStorageNbytes(host.sizes(), host.strides(), host.itemsize());
    if (host.numel()) memcpy(out.mutable_data_ptr(), host.const_data_ptr(), bytes);
    return out;
  }

  bool aliases(const Tensor& result) const {
    for (auto& view : views)
      if (view.device.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) return true;
    return false;
  }

  // Give operands that the kernel resized their new memory and shape.
  void write_back() {
    for (auto& view : views) {
      auto& storage = view.host.storage();
      if (storage.data() != view.data) {
        auto fresh = allocator.allocate(storage.nbytes());
        if (storage.nbytes()) memcpy(fresh.get(), storage.data(), storage.nbytes());
        view.device.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
        view.device.storage().unsafeGetStorageImpl()->set_nbytes(storage.nbytes());
      }
      if (view.host.sizes() != view.device.sizes() || view.host.strides() != view.device.strides())
        view.device.unsafeGetTensorImpl()->set_sizes_and_strides(
            view.host.sizes(), view.host.strides(), view.host.storage_offset());
    }
  }
};

// Operations whose results' sizes depend on values, so that a GPU's kernel waits.
inline const std::set<std::string> WAITS = {
    "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave.Tensor"};
// Operations that take indices of the host.
inline const std::set<std::string> MIXES = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};
// Operations that read no values.
inline const std::set<std::string> VIEWS = {
    "aten::view", "aten::as_strided", "aten::_reshape_alias", "aten::unfold", "aten::view_as_real",
    "aten::view_as_complex"};

template <class F> void for_each_tensor(const IValue& value, F f) {
  if (value.isTensor()) f(value.toTensor());
  else if (value.isTensorList()) for (const Tensor& tensor : value.toTensorVector()) f(tensor);
  else if (value.isOptionalTensorList()) for (const auto& tensor : value.toOptionalTensorVector()) if (tensor) f(*tensor);
}

inline void use_operands(const c10::OperatorHandle& op, c10::ArrayRef<IValue> given) {
  Locked guard(lock);
  const auto& schema = op.schema();
  auto stream = current_stream();
  auto at = tick(stream);
  operations[schema.name()]++;
  if (VIEWS.count(schema.name())) return;
  for (size_t i = 0; i < given.size(); ++i) {
    auto* alias = schema.arguments()[i].alias_info();
    for_each_tensor(given[i], [&](const Tensor& tensor) {
      if (tensor.defined() && tensor.is_cuda()) use(tensor, alias && alias->isWrite(), schema.name(), stream, at);
    });
  }
}

inline bool is_mask(const std::optional<Tensor>& index) {
  return index && index->defined() && index->is_cuda() &&
         (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
}

// Return an argument for the CPU's kernel.
inline IValue host_argument(Operands& operands, const IValue& value) {
  if (value.isTensor()) return operands.host(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(operands.host(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<Tensor>(operands.host(*tensor)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == CUDA) {
    operands.device = Device(CUDA, index_of(value.toDevice()));
    return Device(c10::kCPU);
  }
  return value;
}

// Return the CPU's generator within the given one, or within the device's own.
inline IValue host_generator(const IValue& value, const std::optional<Device>& device) {
  bool given = value.isGenerator() && value.toGenerator().defined();
  auto generator = given ? value.toGenerator() : at::globalContext().defaultGenerator(Device(CUDA, index_of(device)));
  TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

inline IValue device_result(Operands& operands, const std::string& op, const IValue& value) {
  auto moved = [&](const Tensor& host) {
    Tensor out = operands.on_device(host);
    if (out.defined() && out.is_cuda() && !operands.aliases(out)) {
      Locked guard(lock);
      use(out, true, op, current_stream(), clocks[current_stream()][current_stream()]);
    }
    return out;
  };
  if (value.isTensor()) return moved(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<Tensor> list;
  for (const Tensor& tensor : value.toTensorVector()) list.push_back(moved(tensor));
  return list;
}

// Any operation without a function here: the CPU's kernel on the same memory.
inline void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto begin = stack->size() - schema.arguments().size();
  use_operands(op, c10::ArrayRef<IValue>(*stack).slice(begin));
  Operands operands;
  bool masked = false;
  for (size_t i = begin; i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    if (value.isOptionalTensorList())
      for (const auto& index : value.toOptionalTensorVector()) masked |= is_mask(index);
    bool generator = schema.arguments()[i - begin].name() == "generator";
    value = generator ? host_generator(value, operands.device) : host_argument(operands, value);
  }
  TORCH_CHECK(!operands.on_host || operands.views.empty() || MIXES.count(schema.name()),
              two_devices(operands.device ? operands.device->str() : "cuda", "cpu! (" + schema.name() + ")"));
  bool waits = WAITS.count(schema.name()) || WAITS.count(schema.name() + "." + schema.overload_name());
  if (waits || masked) wait_for_device(schema.name());
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  operands.write_back();
  if (!operands.device) return;
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    (*stack)[i] = device_result(operands, schema.name(), (*stack)[i]);
}

inline Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin || !*pin, "Only dense CPU tensors can be pinned");
  c10::DeviceGuard there(Device(CUDA, index_of(device)));
  return at::detail::empty_generic(
      size, &allocator, DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard there(Device(CUDA, index_of(device)));
  return at::detail::empty_strided_generic(
      size, stride, &allocator, DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

inline const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}

inline Tensor& set_storage_offset(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                                  c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

inline Tensor& set_storage(Tensor& self, at::Storage storage) {
  int64_t elements = storage.nbytes() / self.itemsize();
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_contiguous({elements});
  return self;
}

inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// What this stream copied to the same host memory before is there, in the stream's order.
inline void finish_downloads_into(const Tensor& host) {
  std::vector<Download> finished;
  Locked guard(lock);
  auto& seen = clocks[current_stream()];
  finished = take(downloads, [&](const Download& copy) {
    return copy.host.storage().data() == host.storage().data() && includes(seen, copy.stream, copy.at);
  });
  for (auto& copy : finished) copy.host.copy_(copy.values);
}

inline uint64_t use_copied(const Tensor& to, const Tensor& from) {
  Locked guard(lock);
  operations[!from.is_cuda() ? "copy to the device" : !to.is_cuda() ? "copy to the host" : "aten::copy_"]++;
  auto at = tick(current_stream());
  if (from.is_cuda()) use(from, false, "copy_", current_stream(), at);
  if (to.is_cuda()) use(to, true, "copy_", current_stream(), at);
  return at;
}

// Start a copy to pinned memory, whose values are NaN (or minus one) until the host waits for it.
inline void download(const Tensor& host, const Tensor& values, uint64_t at) {
  Download copy{host, values.to(host.scalar_type(), false, true).expand(host.sizes()), current_stream(), at};
  if (at::isFloatingType(host.scalar_type())) host.fill_(NAN);
  else host.zero_().bitwise_not_();
  Locked guard(lock);
  downloads.push_back(copy);
}

inline void upload(const Tensor& host, uint64_t at) {
  if (!host.is_contiguous()) return;
  Locked guard(lock);
  uploads.push_back({host, host.clone(), current_stream(), at});
}

inline Tensor& copy(Tensor& self, const Tensor& from, bool non_blocking) {
  if (self.is_same(from)) return self;
  Operands to_operands, from_operands;
  Tensor to = to_operands.host(self), values = from_operands.host(from);
  bool down = from.is_cuda() && !self.is_cuda(), up = self.is_cuda() && !from.is_cuda();
  auto at = use_copied(self, from);
  if (up) finish_downloads_into(values);
  const Tensor& host = down ? self : from;
  bool late = (down || up) && non_blocking && is_pinned(host.const_data_ptr());
  if (late && down) download(to, values, at);
  else to.copy_(values);
  if (late && up) upload(values, at);
  std::string name = down ? "copy_ to the host" : "copy_ from the host";
  if ((down || up) && !non_blocking) wait_for_device(name);
  else if ((down || up) && !late && host.numel() > 0) wait_in_driver(name + ", in pageable memory");
  return self;
}

inline at::Scalar item(const Tensor& self) {
  Operands operands;
  Tensor host = operands.host(self);
  {
    Locked guard(lock);
    use(self, false, "item", current_stream(), tick(current_stream()));
  }
  wait_for_device("aten::_local_scalar_dense");
  return at::_local_scalar_dense(host);
}
}  // namespace rehearsal
