// Flash attention: the CPU's kernel with the name, the limits and the results of the GPU's.
#pragma once

#include "operations.h"

#include <ATen/Context.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>

namespace rehearsal {
constexpr int64_t MATH = 0, FLASH = 1, LARGEST_HEAD = 256, HEAD_MULTIPLE = 8;

inline bool is_half(const Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf;
}

inline int64_t choose_kernel(const Tensor& q, const Tensor&, const Tensor&, const std::optional<Tensor>& mask, double,
                             bool, std::optional<double>, bool) {
  bool masked = mask && mask->defined();
  bool fits = is_half(q) && !masked && q.size(-1) <= LARGEST_HEAD && at::globalContext().userEnabledFlashSDP();
  return fits ? FLASH : MATH;
}

inline void use_all(const std::string& op, const std::vector<Tensor>& tensors) {
  Locked guard(lock);
  operations[op]++;
  auto at = tick(current_stream());
  for (auto& tensor : tensors) use(tensor, false, op, current_stream(), at);
}

using Flash = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

inline Flash flash(const Tensor& q, const Tensor& k, const Tensor& v, double dropout, bool causal, bool,
                   std::optional<double> scale) {
  TORCH_CHECK(is_half(q), "FlashAttention only support fp16 and bf16 data type");
  TORCH_CHECK(q.size(-1) % HEAD_MULTIPLE == 0, "FlashAttention requires a head size that is a multiple of 8");
  use_all("flash attention", {q, k, v});
  Operands operands;
  Tensor host_q = operands.host(q), host_k = operands.host(k), host_v = operands.host(v);
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      host_q, host_k, host_v, dropout, causal, std::nullopt, scale);
  auto numbers = q.options().dtype(at::kUInt64);
  return {operands.on_device(out), operands.on_device(lse), Tensor(), Tensor(), q.size(2), k.size(2),
          at::empty({2}, numbers), at::empty({0}, numbers), at::empty({0}, q.options())};
}

inline std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal, const Tensor&, const Tensor&,
    std::optional<double> scale) {
  use_all("flash attention backward", {grad, q, k, v, out, lse});
  Operands operands;
  std::vector<Tensor> host;
  for (auto& tensor : {grad, q, k, v, out, lse}) host.push_back(operands.host(tensor));
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      host[0], host[1], host[2], host[3], host[4], host[5], dropout, causal, std::nullopt, scale);
  return {operands.on_device(dq), operands.on_device(dk), operands.on_device(dv)};
}
}  // namespace rehearsal
