// Streams as vector clocks: what each has waited for, which accesses to memory are unordered, which copies have arrived.
//
// Every operation is computed at once, on the host. What a GPU would do later is followed by clocks: an operation on a
// stream advances that stream's clock, an event is a copy of a clock, and a wait merges it into another one. Two
// accesses to the same bytes, at least one of which writes, must be ordered by these clocks.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace rehearsal {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using Clock = std::map<int64_t, uint64_t>;
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr size_t MOST_RACES = 200;  // kept for the report

// A use of the bytes [begin, end) by an operation on a stream.
struct Use {
  const char *begin, *end;
  int64_t stream;
  uint64_t at;
  bool writes;
  std::string op;
  bool of_freed = false;  // of the tensor that had this memory before
};

// A copy that the device has not finished: `host` is valid, or may be written again, once the stream is at `at`.
struct Download { Tensor host, values; int64_t stream; uint64_t at; };
struct Upload { Tensor host, before; int64_t stream; uint64_t at; };

struct Event { Clock seen; std::chrono::steady_clock::time_point when; };

inline std::recursive_mutex lock;
using Locked = std::lock_guard<std::recursive_mutex>;
inline std::map<int64_t, Clock> clocks;
inline Clock host_seen;  // what the training thread has waited for: all that it issues later comes after that
inline std::map<const void*, std::vector<Use>> uses;  // by storage
inline std::vector<Download> downloads;
inline std::vector<Upload> uploads;
inline std::vector<std::string> races;
inline std::map<std::string, int64_t> operations, waits;
inline std::set<int> used_devices;
inline int devices = 1, sync_mode = 0;
inline int64_t streams_created = 0;
inline std::function<void(const std::string&)> on_wait;  // called without the lock
inline thread_local bool background = false;  // a thread whose waits order what the training thread issues only once
inline thread_local Clock background_seen;    // that thread is known to have waited: by `publish` and `observe`
inline std::vector<Clock> published;
inline thread_local DeviceIndex current_device = 0;
inline thread_local std::map<DeviceIndex, int64_t> current_streams;

inline int64_t current_stream() { return current_streams[current_device]; }

inline DeviceIndex index_of(std::optional<Device> device) {
  return device && device->has_index() ? device->index() : current_device;
}

inline void advance(Clock& into, const Clock& other) {
  for (auto& [stream, at] : other) into[stream] = std::max(into[stream], at);
}

inline bool includes(const Clock& seen, int64_t stream, uint64_t at) {
  auto found = seen.find(stream);
  return found != seen.end() && found->second >= at;
}

// Advance a stream's clock by one operation, which comes after all that the host has waited for.
inline uint64_t tick(int64_t stream) {
  if (!background) advance(clocks[stream], host_seen);
  return ++clocks[stream][stream];
}

inline void add_race(const std::string& text) {
  if (races.size() < MOST_RACES) races.push_back(text);
}

inline void check_order(const Use& earlier, const Use& later) {
  if (earlier.stream == later.stream || !(earlier.writes || later.writes)) return;
  if (earlier.end <= later.begin || later.end <= earlier.begin) return;
  if (includes(clocks[later.stream], earlier.stream, earlier.at)) return;
  auto name = [](const Use& use) { return use.writes ? "write" : "read"; };
  add_race(std::string(name(later)) + " after " + name(earlier) + ": " + later.op + " on stream " +
           std::to_string(later.stream) + " does not wait for " + earlier.op + " on stream " +
           std::to_string(earlier.stream) + (earlier.of_freed ? ", of the tensor that had this memory before" : ""));
}

// Record a use of a tensor's bytes, and report the earlier ones that it does not wait for.
inline void use(const Tensor& tensor, bool writes, const std::string& op, int64_t stream, uint64_t at) {
  const void* storage = tensor.storage().data();
  if (storage == nullptr || tensor.numel() == 0) return;
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  Use now{begin, begin + (last + 1) * tensor.itemsize(), stream, at, writes, op};
  auto& known = uses[storage];
  for (auto& other : known) check_order(other, now);
  auto replaced = [&](const Use& other) {
    bool covered = other.begin >= now.begin && other.end <= now.end;
    bool reported = other.of_freed && other.begin < now.end && now.begin < other.end;
    return reported || (covered && (writes || (other.stream == stream && !other.writes)));
  };
  known.erase(std::remove_if(known.begin(), known.end(), replaced), known.end());
  known.push_back(now);
}

// Take the copies for which `done` holds out of a list. They are destroyed without the lock: that may need Python's.
template <class Copy, class Condition> std::vector<Copy> take(std::vector<Copy>& copies, Condition done) {
  auto rest = std::stable_partition(copies.begin(), copies.end(), [&](const Copy& copy) { return !done(copy); });
  std::vector<Copy> taken(std::make_move_iterator(rest), std::make_move_iterator(copies.end()));
  copies.erase(rest, copies.end());
  return taken;
}

// Report host memory that was written while the device might still have read it.
inline void check_unchanged(const Upload& copy) {
  if (memcmp(copy.host.const_data_ptr(), copy.before.const_data_ptr(), copy.before.nbytes()) != 0)
    add_race("write after read: the host wrote to pinned memory that stream " + std::to_string(copy.stream) +
             " copies to the device");
}

// The host has waited until `seen`: finish the copies before it.
inline void arrive(const Clock& seen) {
  std::vector<Download> finished;
  std::vector<Upload> read;
  Locked guard(lock);
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard without_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  auto done = [&](const auto& copy) { return includes(seen, copy.stream, copy.at); };
  advance(background ? background_seen : host_seen, seen);
  finished = take(downloads, done);
  read = take(uploads, done);
  for (auto& copy : read) check_unchanged(copy);
  for (auto& copy : finished) copy.host.copy_(copy.values);
}

// A background thread says what it has waited for; the training thread may find out later, by the returned number.
inline size_t publish() {
  Locked guard(lock);
  published.push_back(background_seen);
  return published.size() - 1;
}

inline void observe(size_t number) {
  Locked guard(lock);
  advance(host_seen, published.at(number));
}

inline Clock seen_by(int64_t stream) {
  Locked guard(lock);
  return clocks[stream];
}

inline void arrive_all() {
  Clock all;
  {
    Locked guard(lock);
    for (auto& [_, clock] : clocks) advance(all, clock);
  }
  arrive(all);
}

// The host waits for the current stream in the midst of an operation, which torch.cuda.set_sync_debug_mode may forbid.
inline void wait_for_device(const std::string& what) {
  {
    Locked guard(lock);
    waits[what]++;
  }
  if (on_wait) on_wait(what);
  TORCH_CHECK(sync_mode < 2, "called a synchronizing CUDA operation: ", what);
  if (sync_mode == 1) TORCH_WARN("called a synchronizing CUDA operation: ", what);
  arrive(seen_by(current_stream()));
}

// The host waits inside of the driver, where torch's debug mode does not see it: a copy of pageable memory.
inline void wait_in_driver(const std::string& what) {
  {
    Locked guard(lock);
    waits[what]++;
  }
  if (on_wait) on_wait(what);
  arrive(seen_by(current_stream()));
}
}  // namespace rehearsal
