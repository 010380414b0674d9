// SPDX-License-Identifier: Apache-2.0
// Shared memory of the running CTA, asynchronous copies into it (cp.async) and barriers in it
// (mbarrier). Addresses are offsets from its start, as 32-bit shared addresses of the hardware are.
//
// A copy lands at any time up to the wait or the barrier's phase that covers it, in any order with
// the others of its group, and reads its source only then.
#pragma once

#include <cstdint>

namespace emulation {

// For the next CTA: `bytes` from `base` on, filled with NaNs; no barriers, nothing in flight.
void reset_shared_memory(char* base, int bytes);
uint32_t shared_address(const void* pointer);
void* shared_pointer(uint32_t address, int bytes);

// cp.async. valid == false: zeros.
void copy(uint32_t to, const void* from, int bytes, bool valid);
void commit_copies();
void wait_for_copies(int pending_groups);
void arrive_after_copies(uint32_t barrier);
void expect_no_copies();

void init_barrier(uint32_t barrier, int arrivals);
void arrive(uint32_t barrier);
void wait_for_phase(uint32_t barrier, uint32_t parity);

// Each phase of `barrier` that ends says that nobody reads these bytes any more: they become NaNs.
// Of all launches to come.
void poison_behind(uint32_t barrier, uint32_t begin, int bytes);

// The async proxy, by which tensor cores read shared memory, sees what landed before the last fence
// of the reading thread. All reads are of 16 bytes.
long proxy_fence_time(int thread);
void proxy_fence();
const uint16_t* read_by_async_proxy(uint32_t address, long fence_time);

void copy_engine(bool all);

}  // namespace emulation
