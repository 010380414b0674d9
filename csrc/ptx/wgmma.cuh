// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix multiplication (sm_90a): D [64, N] += A [64, 16] B [16, N], fp32 sums.
//
// Warp i of a warpgroup has rows 16 i to 16 i + 15 of A and D. In a warp, A in registers and each
// eight columns of D are laid out as the A and C fragments of m16n8k16, see mma.cuh.
//
// Operands in shared memory are read through the async proxy. The PTX ISA (memory consistency
// model, proxies) orders an access through one proxy behind one through another if a proxy fence is
// on the path of causality between them, whichever thread executes it; cp.async that is not bulk
// writes through the generic proxy. So: copies land -> barrier -> wait -> async_proxy_fence by the
// reading threads -> wgmma. The other way round, wgmma_wait is the end of the reads, and the
// barrier behind it orders the next copies.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace specfused::ptx {

__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Before the first wgmma that uses registers which anything else has written since.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most kPending of the newest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler may move no use of these registers across this point.
template <int kN>
__device__ __forceinline__ void pin(float (&d)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
  }
}

template <int kN>
__device__ __forceinline__ void pin(uint32_t (&a)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    asm volatile("" : "+r"(a[n][0]), "+r"(a[n][1]), "+r"(a[n][2]), "+r"(a[n][3])::"memory");
  }
}

// clang-format off
#define SPECFUSED_D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define SPECFUSED_D16(i) \
  SPECFUSED_D4(i), SPECFUSED_D4(i + 1), SPECFUSED_D4(i + 2), SPECFUSED_D4(i + 3)
#define SPECFUSED_D32(i) SPECFUSED_D16(i), SPECFUSED_D16(i + 4)
#define SPECFUSED_D64(i) SPECFUSED_D32(i), SPECFUSED_D32(i + 8)
#define SPECFUSED_D128(i) SPECFUSED_D64(i), SPECFUSED_D64(i + 16)

#define SPECFUSED_R32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SPECFUSED_R64 SPECFUSED_R32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SPECFUSED_R128 SPECFUSED_R64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// A from registers. kTransposed: B in shared memory has its N elements side by side, else its K.
// add == false: D = A B.
#define SPECFUSED_WGMMA_RS(TYPE, NAME, N, D, REGISTERS, A0, A1, A2, A3, B, ADD, TRANSPOSED)      \
  template <bool kTransposed>                                                                    \
  static __device__ __forceinline__ void multiply(float (&d)[N / 8][4], const uint32_t (&a)[4],  \
                                                  uint64_t b, bool add) {                        \
    asm volatile(                                                                                \
        "{\n"                                                                                    \
        ".reg .pred add;\n"                                                                      \
        "setp.ne.b32 add, %" ADD ", 0;\n"                                                        \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" REGISTERS           \
        "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", add, 1, 1, %" TRANSPOSED ";\n"         \
        "}"                                                                                      \
        : D(0)                                                                                   \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),        \
          "n"(kTransposed));                                                                     \
  }

// A and B from shared memory, both with their K elements side by side.
#define SPECFUSED_WGMMA_SS(TYPE, NAME)                                                           \
  static __device__ __forceinline__ void multiply(float (&d)[8][4], uint64_t a, uint64_t b,      \
                                                  bool add) {                                    \
    asm volatile(                                                                                \
        "{\n"                                                                                    \
        ".reg .pred add;\n"                                                                      \
        "setp.ne.b32 add, %34, 0;\n"                                                             \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" SPECFUSED_R32           \
        "}, %32, %33, add, 1, 1, 0, 0;\n"                                                        \
        "}"                                                                                      \
        : SPECFUSED_D32(0)                                                                       \
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                           \
  }

template <class T>
struct Wgmma;

#define SPECFUSED_WGMMA(TYPE, NAME)                                                              \
  template <>                                                                                    \
  struct Wgmma<TYPE> {                                                                           \
    SPECFUSED_WGMMA_SS(TYPE, NAME)                                                               \
    SPECFUSED_WGMMA_RS(TYPE, NAME, 64, SPECFUSED_D32, SPECFUSED_R32, "32", "33", "34", "35",     \
                       "36", "37", "38")                                                         \
    SPECFUSED_WGMMA_RS(TYPE, NAME, 128, SPECFUSED_D64, SPECFUSED_R64, "64", "65", "66", "67",    \
                       "68", "69", "70")                                                         \
    SPECFUSED_WGMMA_RS(TYPE, NAME, 256, SPECFUSED_D128, SPECFUSED_R128, "128", "129", "130",     \
                       "131", "132", "133", "134")                                               \
  };

SPECFUSED_WGMMA(__nv_bfloat16, "bf16")
SPECFUSED_WGMMA(__half, "f16")
// clang-format on

#undef SPECFUSED_WGMMA
#undef SPECFUSED_WGMMA_SS
#undef SPECFUSED_WGMMA_RS
#undef SPECFUSED_R128
#undef SPECFUSED_R64
#undef SPECFUSED_R32
#undef SPECFUSED_D128
#undef SPECFUSED_D64
#undef SPECFUSED_D32
#undef SPECFUSED_D16
#undef SPECFUSED_D4

}  // namespace specfused::ptx
