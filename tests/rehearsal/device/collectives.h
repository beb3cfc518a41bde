// A backend in NCCL's place: gloo on the device's memory, with a stream for each group, and NCCL's operations and refusals.
#pragma once

#include "operations.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace rehearsal {
using Tensors = std::vector<Tensor>;
using c10d::ReduceOp;

struct Work final : c10d::Work {
  std::vector<c10::intrusive_ptr<c10d::Work>> inner;
  std::vector<std::function<void()>> after;
  Tensors results;
  Clock done;
  bool waited = false;

  bool wait(std::chrono::milliseconds timeout) override {  // the current stream waits; gloo needs the host to
    if (!std::exchange(waited, true)) {
      for (auto& work : inner) work->wait(timeout);
      for (auto& finish : after) finish();
    }
    Locked guard(lock);
    advance(clocks[current_stream()], done);
    return true;
  }
  bool isCompleted() override { return waited; }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    auto type = c10::ListType::create(c10::TensorType::get());
    std::vector<Device> on{Device(CUDA, current_device)};
    auto future = c10::make_intrusive<c10::ivalue::Future>(type, on);
    future->markCompleted(IValue(results));
    return future;
  }
};

struct Group final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  int64_t stream;
  c10::intrusive_ptr<Work> coalesced;

  Group(c10::intrusive_ptr<c10d::Backend> backend, int rank, int size)
      : Backend(rank, size), gloo(std::move(backend)), stream(++streams_created) {}

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalesced = c10::make_intrusive<Work>(); }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override { return std::exchange(coalesced, nullptr); }
  void eagerConnectSingleDevice(Device) override {}
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void shutdown() override { gloo->shutdown(); }
  void abort() override { gloo->abort(); }

  static Tensors host(const Tensors& tensors) {
    Operands operands;
    Tensors found;
    for (auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_cuda(), "Tensors must be CUDA and dense");
      TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
      found.push_back(operands.host(tensor));
    }
    return found;
  }

  // Run gloo's operation on this group's stream, which waits for the current one.
  template <class F>
  c10::intrusive_ptr<c10d::Work> run(const char* name, const Tensors& reads, const Tensors& writes, F start) {
    auto work = c10::make_intrusive<Work>();
    {
      Locked guard(lock);
      operations[std::string("nccl ") + name]++;
      tick(current_stream());
      advance(clocks[stream], clocks[current_stream()]);
      auto at = tick(stream);
      for (auto& tensor : reads) use(tensor, false, name, stream, at);
      for (auto& tensor : writes) use(tensor, true, name, stream, at);
      work->done = clocks[stream];
    }
    work->inner.push_back(start(*work));
    work->results = writes;
    if (coalesced) add_to_coalesced(*work);
    return work;
  }

  void add_to_coalesced(const Work& work) {
    coalesced->inner.insert(coalesced->inner.end(), work.inner.begin(), work.inner.end());
    coalesced->after.insert(coalesced->after.end(), work.after.begin(), work.after.end());
    advance(coalesced->done, work.done);
  }

  // Replace the mean, which gloo lacks, by a sum and a factor after it.
  ReduceOp as_gloo(const ReduceOp& op, const Tensors& outputs, Work& work) {
    if (op != ReduceOp::AVG) return op;
    double factor = 1.0 / size_;
    work.after.push_back([outputs, factor] { for (auto tensor : outputs) tensor.mul_(factor); });
    return ReduceOp::SUM;
  }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& given) override {
    return run("all_reduce", tensors, tensors, [&](Work& work) {
      auto both = host(tensors);
      auto options = given;
      options.reduceOp = as_gloo(given.reduceOp, both, work);
      return gloo->allreduce(both, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return run("all_reduce_coalesced", tensors, tensors, [&](Work&) {
      auto both = host(tensors);
      return gloo->allreduce_coalesced(both, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run("broadcast", tensors, tensors, [&](Work&) {
      auto both = host(tensors);
      return gloo->broadcast(both, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return run("reduce", tensors, tensors, [&](Work&) {
      auto both = host(tensors);
      return gloo->reduce(both, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run("all_gather", inputs, outputs[0], [&](Work&) {
      auto from = host(inputs);
      std::vector<Tensors> to{host(outputs[0])};
      return gloo->allgather(to, from, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return run("all_gather_base", {input}, {output}, [&](Work&) {
      auto to = host({output})[0], from = host({input})[0].clone();  // may be a part of the output
      return gloo->_allgather_base(to, from, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run("all_gather_into_tensor_coalesced", inputs, outputs, [&](Work&) {
      auto to = host(outputs), from = host(inputs);
      return gloo->allgather_into_tensor_coalesced(to, from, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& given) override {
    return run("reduce_scatter", inputs[0], outputs, [&](Work& work) {
      auto to = host(outputs);
      std::vector<Tensors> from{host(inputs[0])};
      auto options = given;
      options.reduceOp = as_gloo(given.reduceOp, to, work);
      return gloo->reduce_scatter(to, from, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& given) override {
    return run("reduce_scatter_base", {input}, {output}, [&](Work& work) {
      auto to = host({output}), from = host({input});
      auto options = given;
      options.reduceOp = as_gloo(given.reduceOp, to, work);
      auto copied = from[0].clone();  // gloo sums in its input
      return gloo->_reduce_scatter_base(to[0], copied, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& given) override {
    return run("reduce_scatter_tensor_coalesced", inputs, outputs, [&](Work& work) {
      auto to = host(outputs), from = host(inputs);
      auto options = given;
      options.reduceOp = as_gloo(given.reduceOp, to, work);
      return gloo->reduce_scatter_tensor_coalesced(to, from, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return run("all_to_all_base", {input}, {output}, [&](Work&) {
      auto to = host({output})[0], from = host({input})[0];
      return gloo->alltoall_base(to, from, output_sizes, input_sizes, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Tensors written = outputs.empty() ? Tensors{} : outputs[0];
    return run("gather", inputs, written, [&](Work&) {
      auto from = host(inputs);
      std::vector<Tensors> to;
      if (!outputs.empty()) to.push_back(host(written));
      return gloo->gather(to, from, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    Tensors read = inputs.empty() ? Tensors{} : inputs[0];
    return run("scatter", read, outputs, [&](Work&) {
      auto to = host(outputs);
      std::vector<Tensors> from;
      if (!inputs.empty()) from.push_back(host(read));
      return gloo->scatter(to, from, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> alltoall(
      Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return run("all_to_all", inputs, outputs, [&](Work&) {
      auto to = host(outputs), from = host(inputs);
      return gloo->alltoall(to, from, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int to, int tag) override {
    return run("send", tensors, {}, [&](Work&) {
      auto from = host(tensors);
      return gloo->send(from, to, tag);
    });
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int from, int tag) override {
    return run("recv", {}, tensors, [&](Work&) {
      auto to = host(tensors);
      return gloo->recv(to, from, tag);
    });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& given) override {
    return run("barrier", {}, {}, [&](Work&) {
      c10d::BarrierOptions options;
      options.timeout = given.timeout;
      return gloo->barrier(options);
    });
  }
};
}  // namespace rehearsal

namespace c10d {
struct RehearsalTimer final : Timer {  // DDP measures its backward pass
  explicit RehearsalTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto first = getTimestamp(start), last = getTimestamp(end);
    return first && last ? std::optional<int64_t>(*last - *first) : std::nullopt;
  }
};
}  // namespace c10d
