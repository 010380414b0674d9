// SPDX-License-Identifier: Apache-2.0
// The threads of one CTA as fibres of one host thread, run in an order that a seed chooses.
//
// A fibre runs until it must wait for others. In each round the warps come in a new order and some
// are left out; between warps the hardware's engines (copies, tensor cores) do some of their work.
#pragma once

#include <cstdint>
#include <functional>

namespace emulation {

constexpr int kWarpSize = 32;
constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / kWarpSize;

// Prints the reason and ends the process: a kernel that breaks a rule of the hardware.
[[noreturn]] void fail(const char* reason, long detail = 0);
constexpr int kBrokenRule = 2;  // exit status

int thread();       // that runs now
int num_threads();  // of the CTA
inline int warp() { return thread() / kWarpSize; }
inline int lane() { return thread() % kWarpSize; }

// Below n, from the seed of the launch.
uint32_t random_below(uint32_t n);

// Something happened that others may wait for. Many rounds without it are a deadlock.
void progress();

// Lets the others run, until `ready(what)`, which the scheduler asks.
void wait(bool (*ready)(void*), void* what);

template <class Ready>
void wait_until(Ready ready) {
  if (!ready()) wait([](void* what) { return (*static_cast<Ready*>(what))(); }, &ready);
  progress();
}

// Does some of its outstanding work; with `all`, everything that can be done now.
using Engine = void (*)(bool all);

// Runs `body` on all threads of one CTA until each has returned.
void run_cta(int threads, const std::function<void()>& body, std::initializer_list<Engine> engines);
void set_seed(uint64_t seed);

// Barrier `id` of the CTA (bar.sync), for `threads` threads.
void sync_threads(int id, int threads);

// A warp's meeting: what its lanes gave for one instruction.
struct Meeting {
  void* given[kWarpSize];
  const void* instruction;
  int arrived;
  long round;
};
// Of the running warp. `mine` may be of any type, `instruction` says which.
Meeting& join(void* mine, const void* instruction);

// Calls act(T* const given[32]) once, when all lanes of the warp are here; then all go on.
template <class T, class Act>
void together(T& mine, Act act) {
  static const char instruction = 0;  // its address is another one for each Act
  Meeting& meeting = join(&mine, &instruction);
  const long round = meeting.round;
  if (meeting.arrived < kWarpSize) {
    wait_until([&] { return meeting.round != round; });
    return;
  }
  T* given[kWarpSize];
  for (int i = 0; i < kWarpSize; ++i) given[i] = static_cast<T*>(meeting.given[i]);
  act(given);
  meeting.arrived = 0;
  ++meeting.round;
  progress();
}

}  // namespace emulation
