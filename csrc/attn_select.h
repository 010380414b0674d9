// SPDX-License-Identifier: Apache-2.0
// Which attention kernel serves a step: a pure function of rows per KV head, head_dim and the
// device.
//
// Within one class a row's bits do not depend on how many rows the step has:
//   few         up to 32 rows per KV head. Four warps share the tokens of each KV tile, so the
//               kernel reads KV at full speed however few rows there are.
//   many        more rows. Each warp owns rows and reads all tokens of each tile.
//   wgmma       33 to 64 rows, on devices and in builds that have wgmma. A warpgroup owns 64 rows
//               and computes while another one loads (csrc/sm90/attn).
//   wgmma_wide  more rows there. Two warpgroups of math, and an SM for each CTA, which takes all
//               the plan entries of its SM as one: so other splits than class wgmma.
#pragma once

#include <cstdint>

namespace specfused {

enum class KernelClass : int32_t { kFew = 0, kMany = 1, kWgmma = 2, kWgmmaWide = 3 };

constexpr int kFewRowsLimit = 32;        // most rows per KV head of class few
constexpr int kMaxRowsPerKvHead = 1024;  // 64 window rows x 16 heads of a group
constexpr int kAttnMaxStages = 3;        // KV tiles in the shared-memory ring of a CTA
constexpr int kAttnTileTokens = 64;      // equals kTileTokens of plan.h
constexpr int kAttnMaxCtas = 1024;       // CTAs of a plan, see workspace.h

// What the choice needs to know of a device.
struct AttnDevice {
  int32_t sm_count;
  int32_t smem_per_sm;     // bytes, e.g. 233472 on sm_90, 102400 on sm_89
  int32_t smem_per_block;  // bytes a CTA may opt in to, e.g. 232448 and 101376
  bool wgmma;              // capability 9.0, and this build has the kernels of csrc/sm90
};

struct AttnConfig {
  KernelClass kernel_class;
  int32_t row_tile;       // rows of one CTA: 16 or 32 (few), 64 or 128 (many), 64, 128 or 256
                          // (wgmma); 0: not supported
  int32_t num_row_tiles;  // CTAs per plan entry
  int32_t stages;         // KV tiles in flight + 1
  int32_t ctas_per_sm;    // residency that shared memory allows, up to the wanted one
  int32_t smem_bytes;     // of one CTA
  int32_t fold;           // plan entries that one CTA takes as one
};

// A CTA whose warps hold 16 rows keeps Q in registers where O leaves room; others read it from
// shared memory for each tile.
constexpr bool attn_q_in_registers(int row_tile, int head_dim) {
  return (row_tile == 16 || row_tile == 64) && head_dim <= 128;
}

// Segment table, slot index ring and flags; class few adds one (max, sum) per row and token group.
constexpr int attn_fixed_bytes(int row_tile) {
  return row_tile <= 16 ? 3584 : row_tile <= kFewRowsLimit ? 4096 : 3072;
}

constexpr int attn_smem_bytes(int row_tile, int head_dim, int stages) {
  const int q = attn_q_in_registers(row_tile, head_dim) ? 0 : row_tile * head_dim * 2;
  return attn_fixed_bytes(row_tile) + q + stages * 2 * kAttnTileTokens * head_dim * 2;
}

// CTAs per SM that the kernels aim at: tiles of small heads need more CTAs to fill the memory pipe,
// those of 256 fill half of the shared memory.
constexpr int attn_wanted_ctas_per_sm(int head_dim) {
  return head_dim <= 64 ? 3 : head_dim <= 128 ? 2 : 1;
}

constexpr int attn_residency(const AttnDevice& device, int smem_bytes) {
  return smem_bytes > device.smem_per_block ? 0 : device.smem_per_sm / (smem_bytes + 1024);
}

// CTAs of a plan. Depends on the device and head_dim only, so one plan serves every step.
constexpr int attn_plan_ctas(const AttnDevice& device, int head_dim) {
  int per_sm = attn_wanted_ctas_per_sm(head_dim);
  while (per_sm > 1 && attn_residency(device, attn_smem_bytes(16, head_dim, 2)) < per_sm) --per_sm;
  const int ctas = device.sm_count * per_sm;
  return ctas < kAttnMaxCtas ? ctas : kAttnMaxCtas;
}

// Deepest ring that keeps the wanted residency; a single tile (no overlap) is the last resort.
constexpr AttnConfig attn_with_row_tile(int rows, int row_tile, int head_dim,
                                        const AttnDevice& device) {
  AttnConfig config{row_tile <= kFewRowsLimit ? KernelClass::kFew : KernelClass::kMany,
                    0,
                    (rows + row_tile - 1) / row_tile,
                    0,
                    0,
                    0,
                    1};
  for (int per_sm = attn_wanted_ctas_per_sm(head_dim); per_sm >= 1; --per_sm) {
    for (int stages = kAttnMaxStages; stages >= (per_sm > 1 ? 2 : 1); --stages) {
      const int bytes = attn_smem_bytes(row_tile, head_dim, stages);
      if (attn_residency(device, bytes) < per_sm) continue;
      config.row_tile = row_tile;
      config.stages = stages;
      config.ctas_per_sm = per_sm;
      config.smem_bytes = bytes;
      return config;
    }
  }
  return config;
}

// Classes wgmma. The ring may be deeper, since a CTA with more than 64 rows has an SM for itself.
constexpr int kWgmmaMaxStages = 6;
constexpr int kWgmmaFixedBytes = 10240;  // segment table, slot index ring, barriers and flags

// O of 256 rows of head_dim 256 does not fit into the registers of two warpgroups.
constexpr int wgmma_row_tile(int rows_per_kv_head, int head_dim) {
  return rows_per_kv_head <= 64 ? 64 : rows_per_kv_head <= 128 || head_dim == 256 ? 128 : 256;
}

constexpr bool wgmma_q_in_registers(int row_tile, int head_dim) {
  return row_tile <= 128 && head_dim <= 128;
}

// Two CTAs of 256 threads leave 128 registers to a thread on average, three not enough.
constexpr int wgmma_ctas_per_sm(int row_tile, int head_dim) {
  return row_tile == 64 && head_dim <= 128 ? 2 : 1;
}

constexpr int wgmma_smem_bytes(int row_tile, int head_dim, int stages) {
  const int q = wgmma_q_in_registers(row_tile, head_dim) ? 0 : row_tile * head_dim * 2;
  return q + stages * 2 * kAttnTileTokens * head_dim * 2 + kWgmmaFixedBytes;
}

// row_tile 0 if not even two tiles fit: then class many serves.
constexpr AttnConfig wgmma_config(int rows, int head_dim, const AttnDevice& device) {
  const int row_tile = wgmma_row_tile(rows, head_dim);
  const int per_sm = wgmma_ctas_per_sm(row_tile, head_dim);
  for (int stages = kWgmmaMaxStages; stages >= 2; --stages) {
    const int bytes = wgmma_smem_bytes(row_tile, head_dim, stages);
    if (attn_residency(device, bytes) < per_sm) continue;
    const int num_row_tiles = (rows + row_tile - 1) / row_tile;
    const bool wide = row_tile > 64;
    const int fold = wide ? attn_plan_ctas(device, head_dim) / device.sm_count : 1;
    return AttnConfig{wide ? KernelClass::kWgmmaWide : KernelClass::kWgmma,
                      row_tile,
                      num_row_tiles,
                      stages,
                      per_sm,
                      bytes,
                      fold < 1 ? 1 : fold};
  }
  return AttnConfig{KernelClass::kWgmma, 0, 0, 0, 0, 0, 1};
}

constexpr AttnConfig select_attn(int rows_per_kv_head, int head_dim, const AttnDevice& device) {
  const bool supported = (head_dim == 64 || head_dim == 128 || head_dim == 256) &&
                         rows_per_kv_head >= 1 && rows_per_kv_head <= kMaxRowsPerKvHead;
  if (!supported) return AttnConfig{KernelClass::kFew, 0, 0, 0, 0, 0, 1};
  if (rows_per_kv_head <= 16) return attn_with_row_tile(rows_per_kv_head, 16, head_dim, device);
  if (rows_per_kv_head <= kFewRowsLimit) {
    return attn_with_row_tile(rows_per_kv_head, 32, head_dim, device);
  }
  if (device.wgmma) {
    const AttnConfig config = wgmma_config(rows_per_kv_head, head_dim, device);
    if (config.row_tile != 0) return config;
  }
  // 128 rows share each KV byte, but their Q and two stages need 99 KiB at head_dim 128.
  if (rows_per_kv_head > 64 && head_dim <= 128) {
    const AttnConfig wide = attn_with_row_tile(rows_per_kv_head, 128, head_dim, device);
    if (wide.row_tile != 0 && wide.stages >= 2) return wide;
  }
  return attn_with_row_tile(rows_per_kv_head, 64, head_dim, device);
}

}  // namespace specfused
