// Memory of the device (filled with NaN, counted, limited, reused by stream as the caching allocator does) and pinned memory.
#pragma once

#include "streams.h"

#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

namespace rehearsal {
constexpr size_t ROUND = 512, MOST_FREED = 1000;  // bytes of a block are a multiple of ROUND, as of the caching allocator

struct Block {
  void* data;
  size_t size;
  int64_t stream;
  DeviceIndex device;
  std::set<int64_t> recorded;  // streams after whose work it may be reused (Tensor.record_stream)
};

struct Freed { size_t size; std::vector<Use> uses; };

inline std::map<void*, Block*> blocks;
inline std::multimap<int64_t, Freed> freed;  // by the stream to whose tensors the caching allocator would give it
inline size_t allocated = 0, peak = 0, limit = SIZE_MAX;
inline std::vector<std::function<void(int64_t, size_t, size_t, size_t)>> out_of_memory_observers;

inline void report_to_profiler(void* data, int64_t change, DeviceIndex device) {
  if (c10::memoryProfilingEnabled())
    c10::reportMemoryUsageToProfiler(data, change, allocated, allocated, Device(CUDA, device));
}

// Keep the uses of a block that the stream of its tensors need not have waited for.
inline void remember_freed(const Block& block) {
  Freed rest{block.size, {}};
  for (auto& use : uses[block.data])
    if (use.stream != block.stream && !block.recorded.count(use.stream)) rest.uses.push_back(use);
  uses.erase(block.data);
  freed.emplace(block.stream, std::move(rest));
  if (freed.count(block.stream) > MOST_FREED) freed.erase(freed.lower_bound(block.stream));
}

inline void release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    Locked guard(lock);
    allocated -= block->size;
    blocks.erase(block->data);
    remember_freed(*block);
    report_to_profiler(block->data, -static_cast<int64_t>(block->size), block->device);
  }
  free(block->data);
  delete block;
}

// A block of this size that was freed is used again: in order on its own stream only.
inline void reuse(const Block& block) {
  auto [first, last] = freed.equal_range(block.stream);
  for (auto it = first; it != last; ++it) {
    if (it->second.size != block.size) continue;
    for (auto use : it->second.uses) {
      auto* begin = static_cast<const char*>(block.data);
      uses[block.data].push_back({begin, begin + block.size, use.stream, use.at, use.writes, use.op, true});
    }
    freed.erase(it);
    return;
  }
}

inline void check_limit(size_t size, DeviceIndex device) {
  size_t rest;
  {
    Locked guard(lock);
    rest = limit - std::min(limit, allocated);
  }
  if (size <= rest) return;
  for (auto& observer : out_of_memory_observers) observer(device, size, limit, rest);
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size, " bytes. GPU ",
                   static_cast<int>(device), " has a total capacity of ", limit, " bytes of which ", rest, " are free.");
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Device device(CUDA, current_device);
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    size_t size = (bytes + ROUND - 1) / ROUND * ROUND;
    check_limit(size, current_device);
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, ROUND, size) == 0, "the host has no memory for the device's");
    memset(data, 0xFF, size);  // NaN: new memory has no value
    Locked guard(lock);
    auto* block = new Block{data, size, current_stream(), current_device, {}};
    blocks[data] = block;
    used_devices.insert(current_device);
    allocated += size;
    peak = std::max(peak, allocated);
    reuse(*block);
    report_to_profiler(data, static_cast<int64_t>(size), current_device);
    return {data, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
inline DeviceAllocator allocator;

inline void record_stream(Tensor& self, c10::Stream stream) {
  Locked guard(lock);
  auto found = blocks.find(self.storage().mutable_data());
  if (found != blocks.end()) found->second->recorded.insert(stream.id());
}

// Change the size of a tensor's storage, which keeps its values as far as both sizes go.
inline void resize_storage(const Tensor& tensor, int64_t size) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  c10::DeviceGuard there(tensor.device());
  auto fresh = allocator.allocate(size);
  auto common = std::min<int64_t>(size, storage->nbytes());
  if (common) memcpy(fresh.get(), storage->data(), common);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(size);
}

inline std::map<const char*, size_t> pinned;

inline void unpin(void* data) {
  Locked guard(lock);
  pinned.erase(static_cast<char*>(data));
  free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, Device(c10::kCPU)};
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, size) == 0, "the host has no pinned memory");
    Locked guard(lock);
    pinned[static_cast<char*>(data)] = size;
    return {data, data, &unpin, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
inline PinnedAllocator pinned_allocator;

inline bool is_pinned(const void* data) {
  Locked guard(lock);
  auto it = pinned.upper_bound(static_cast<const char*>(data));
  return it != pinned.begin() && (--it, static_cast<const char*>(data) < it->first + it->second);
}
}  // namespace rehearsal
