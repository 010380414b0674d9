// SPDX-License-Identifier: Apache-2.0
// cp.async, mbarrier and the async proxy, see copies.h.
#include "copies.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <vector>

#include "fibers.h"

namespace emulation {
namespace {

constexpr int kPart = 16;  // bytes; what fences are tracked by
constexpr long kNever = std::numeric_limits<long>::max();

struct Step {
  enum Kind { kCopy, kEndOfGroup, kArrive } kind;
  uint32_t to;  // kArrive: the barrier
  const void* from;
  int bytes;
  bool valid;
};

struct Barrier {
  int arrivals;
  int pending;
  uint32_t phase;
};

struct Region {
  uint32_t begin;
  int bytes;
};

char* memory;
int memory_bytes;
long now;
std::vector<long> written;  // per part: when its last copy landed
long fenced[kMaxThreads];   // per thread: its last proxy fence
std::deque<Step> steps[kMaxThreads];
int groups[kMaxThreads];
std::map<uint32_t, Barrier> barriers;
std::map<uint32_t, Region> poisoned;

Barrier& find(uint32_t address) {
  const auto found = barriers.find(address);
  if (found == barriers.end()) fail("no barrier was made here", address);
  return found->second;
}

void poison(const Region& region) {
  std::memset(shared_pointer(region.begin, region.bytes), 0xff, region.bytes);
  std::fill_n(written.begin() + region.begin / kPart, region.bytes / kPart, kNever);
}

void land(const Step& copy) {
  void* to = shared_pointer(copy.to, copy.bytes);
  if (copy.valid) {
    std::memcpy(to, copy.from, copy.bytes);
  } else {
    std::memset(to, 0, copy.bytes);
  }
  written[copy.to / kPart] = ++now;
}

// One step of a thread: any of the copies in front, or the arrival or end of a group behind them.
void do_one(int thread) {
  auto& queue = steps[thread];
  const auto is_copy = [](const Step& step) { return step.kind == Step::kCopy; };
  const auto copies = std::find_if_not(queue.begin(), queue.end(), is_copy) - queue.begin();
  const auto chosen = queue.begin() + (copies > 0 ? random_below(copies) : 0);
  const Step step = *chosen;
  queue.erase(chosen);
  switch (step.kind) {
    case Step::kCopy:
      land(step);
      break;
    case Step::kEndOfGroup:
      --groups[thread];
      break;
    case Step::kArrive:
      arrive(step.to);
  }
  progress();
}

}  // namespace

void reset_shared_memory(char* base, int bytes) {
  memory = base;
  memory_bytes = bytes;
  now = 0;
  written.assign(bytes / kPart, kNever);
  barriers.clear();
  std::memset(base, 0xff, bytes);
  std::fill_n(fenced, kMaxThreads, 0);
}

uint32_t shared_address(const void* pointer) {
  const auto offset = static_cast<const char*>(pointer) - memory;
  if (offset < 0 || offset >= memory_bytes) fail("not in shared memory", offset);
  return static_cast<uint32_t>(offset);
}

void* shared_pointer(uint32_t address, int bytes) {
  if (int64_t{address} + bytes > memory_bytes) fail("behind shared memory", address);
  return memory + address;
}

void copy(uint32_t to, const void* from, int bytes, bool valid) {
  if (to % bytes != 0) fail("copy is not aligned", to);
  steps[thread()].push_back({Step::kCopy, to, from, bytes, valid});
}

void commit_copies() {
  steps[thread()].push_back({Step::kEndOfGroup, 0, nullptr, 0, false});
  ++groups[thread()];
}

void wait_for_copies(int pending_groups) {
  while (groups[thread()] > pending_groups) do_one(thread());
}

void arrive_after_copies(uint32_t barrier) {
  steps[thread()].push_back({Step::kArrive, barrier, nullptr, 0, false});
}

void expect_no_copies() {
  for (int i = 0; i < kMaxThreads; ++i) {
    if (!steps[i].empty()) fail("a CTA ended with copies in flight, thread", i);
  }
}

void init_barrier(uint32_t barrier, int arrivals) {
  if (barrier % 8 != 0) fail("barrier is not aligned", barrier);
  barriers[barrier] = {arrivals, arrivals, 0};
}

void arrive(uint32_t address) {
  Barrier& barrier = find(address);
  progress();
  if (--barrier.pending > 0) return;
  barrier.pending = barrier.arrivals;
  barrier.phase ^= 1;
  const auto region = poisoned.find(address);
  if (region != poisoned.end()) poison(region->second);
}

void wait_for_phase(uint32_t address, uint32_t parity) {
  const Barrier& barrier = find(address);
  wait_until([&] { return barrier.phase != parity; });
}

void poison_behind(uint32_t barrier, uint32_t begin, int bytes) {
  poisoned[barrier] = {begin, bytes};
}

long proxy_fence_time(int thread) { return fenced[thread]; }
void proxy_fence() { fenced[thread()] = now; }

const uint16_t* read_by_async_proxy(uint32_t address, long fence_time) {
  const auto* data = static_cast<const uint16_t*>(shared_pointer(address, kPart));
  const long time = written[address / kPart];
  if (time == kNever)
    fail("the async proxy reads a stage that was released or not written", address);
  if (time > fence_time) fail("the async proxy reads behind no fence", address);
  return data;
}

void copy_engine(bool all) {
  for (int i = 0; i < num_threads(); ++i) {
    if (steps[i].empty()) continue;
    uint32_t budget = all ? ~0u : random_below(4) == 0 ? random_below(8) : 0;
    for (; budget > 0 && !steps[i].empty(); --budget) do_one(i);
  }
}

}  // namespace emulation
