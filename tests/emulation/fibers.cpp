// SPDX-License-Identifier: Apache-2.0
// Fibres on ucontext, see fibers.h.
#include "fibers.h"

#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

namespace emulation {
namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr int kNamedBarriers = 16;
constexpr int kMaxIdleRounds = 1000;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done;
  bool (*ready)(void*);  // what it waits for; null: it can run
  void* what;
};

struct Barrier {
  int arrived;
  long round;
};

ucontext_t scheduler;
Fiber fibers[kMaxThreads];
int current, count;
long events;
const std::function<void()>* cta_body;
Barrier barriers[kNamedBarriers];
Meeting meetings[kMaxWarps];
std::mt19937_64 generator;

void enter() {
  (*cta_body)();
  fibers[current].done = true;
  swapcontext(&fibers[current].context, &scheduler);  // never comes back
}

void start(Fiber& fiber) {
  if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
  fiber.done = false;
  fiber.ready = nullptr;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, enter, 0);
}

// The lanes come in order, from one that the seed chooses.
void run_warp(int warp) {
  const int first = random_below(kWarpSize);
  for (int i = 0; i < kWarpSize; ++i) {
    current = warp * kWarpSize + (first + i) % kWarpSize;
    Fiber& fiber = fibers[current];
    if (fiber.done || (fiber.ready != nullptr && !fiber.ready(fiber.what))) continue;
    fiber.ready = nullptr;
    swapcontext(&scheduler, &fiber.context);
  }
}

}  // namespace

void fail(const char* reason, long detail) {
  std::printf("thread %d: %s (%ld)\n", current, reason, detail);
  std::fflush(stdout);
  std::_Exit(kBrokenRule);
}

int thread() { return current; }
int num_threads() { return count; }
void progress() { ++events; }
void set_seed(uint64_t seed) { generator.seed(seed); }
uint32_t random_below(uint32_t n) { return static_cast<uint32_t>(generator() % n); }

void wait(bool (*ready)(void*), void* what) {
  fibers[current].ready = ready;
  fibers[current].what = what;
  swapcontext(&fibers[current].context, &scheduler);
}

void run_cta(int threads, const std::function<void()>& body,
             std::initializer_list<Engine> engines) {
  if (threads > kMaxThreads || threads % kWarpSize != 0) fail("threads of a CTA", threads);
  count = threads;
  cta_body = &body;
  std::fill_n(barriers, kNamedBarriers, Barrier{});
  std::fill_n(meetings, kMaxWarps, Meeting{});
  for (int i = 0; i < threads; ++i) start(fibers[i]);

  // Some CTAs have slow engines, and each has a warp that is slower than the others.
  const uint32_t engine_rounds = 1u << 3 * random_below(4);
  const int slow_warp = static_cast<int>(random_below(threads / kWarpSize));
  std::vector<int> warps(threads / kWarpSize);
  for (size_t i = 0; i < warps.size(); ++i) warps[i] = static_cast<int>(i);
  int idle_rounds = 0;
  const auto is_done = [](const Fiber& fiber) { return fiber.done; };
  while (!std::all_of(fibers, fibers + threads, is_done)) {
    const long before = events;
    std::shuffle(warps.begin(), warps.end(), generator);
    for (int warp : warps) {
      if (warp == slow_warp ? random_below(16) != 0 : random_below(4) == 0) continue;
      run_warp(warp);
      if (random_below(engine_rounds) != 0) continue;
      for (Engine engine : engines) engine(false);
    }
    if (events != before) {
      idle_rounds = 0;
      continue;
    }
    for (Engine engine : engines) engine(true);
    if (++idle_rounds > kMaxIdleRounds) fail("deadlock: all threads wait for something");
  }
}

void sync_threads(int id, int threads) {
  if (id < 0 || id >= kNamedBarriers) fail("no such barrier", id);
  Barrier& barrier = barriers[id];
  const long round = barrier.round;
  if (++barrier.arrived < threads) {
    wait_until([&] { return barrier.round != round; });
    return;
  }
  barrier.arrived = 0;
  ++barrier.round;
  progress();
}

Meeting& join(void* mine, const void* instruction) {
  Meeting& meeting = meetings[warp()];
  if (meeting.arrived == 0) meeting.instruction = instruction;
  if (meeting.instruction != instruction) fail("lanes of a warp meet in different instructions");
  meeting.given[lane()] = mine;
  ++meeting.arrived;
  return meeting;
}

}  // namespace emulation
