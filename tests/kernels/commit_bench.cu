// SPDX-License-Identifier: Apache-2.0
// Times of commit: graphs of launches over rotated inputs, so that no cache is warm, beside the
// rate at which this GPU reads and the cost of an empty launch.
#include <cmath>
#include <numeric>

#include "commit_case.h"

namespace specfused::checks {
namespace {

constexpr int kLayers = 32;
constexpr int64_t kRowBytes = 8 * 128 * 2;  // 8 KV heads of 128 in bf16
constexpr int64_t kPoolSlots = 16385;
constexpr int64_t kVocab = 128256;
constexpr int64_t kLastToken = 7;  // what the target chooses at the end of each drawn path

struct TimedShape {
  Source source;
  int bs, width;
  int64_t hidden_bytes = 0;

  int max_path() const { return std::min(width, width <= 16 ? 4 : 8); }
  int64_t rows() const { return int64_t{bs} * width; }
  std::string name() const {
    return std::string("bench/") + kSourceNames[static_cast<int>(source)] + "/bs" +
           std::to_string(bs) + "/w" + std::to_string(width) + (hidden_bytes > 0 ? "/hidden" : "");
  }
};

struct Inputs {  // of one launch
  Dev<int64_t> draft_tokens, targets, next_token, next_sibling, seq_lens, out_cache_loc;
  Dev<int64_t> new_seq_lens, next_token_ids, select_index, positions, window_ends;
  Dev<int32_t> accept_index, accept_tokens, per_request;  // per_request: [4, bs]
  Dev<float> rows, coins, coins_final;
  Dev<char> hidden_states;
};

__global__ void fill_rows(float* rows, const int64_t* targets, int64_t num_rows, bool probs) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < num_rows * kVocab;
       i += step) {
    const bool chosen = i % kVocab == targets[i / kVocab];
    const uint64_t noise = ((i + 1) * 0x9e3779b97f4a7c15ull) >> 40;  // 24 bits
    rows[i] = probs ? (chosen ? 0.99f : 0.01f / kVocab)
                    : (chosen ? 30.0f : static_cast<float>(noise) * 0x1p-22f - 2.0f);
  }
}

// A random tree with one path of random length that the target takes. Returns the rows that move.
int64_t draw_request(const TimedShape& s, int64_t* draft, int64_t* target, int64_t* child,
                     int64_t* sibling, Random& random) {
  std::vector<int> nodes(s.width - 1);
  std::iota(nodes.begin(), nodes.end(), 1);
  std::shuffle(nodes.begin(), nodes.end(), random.engine);
  nodes.resize(random.below(s.max_path()));
  nodes.push_back(0);
  std::sort(nodes.begin(), nodes.end());
  std::vector<int> parent(s.width), last(s.width, -1);
  for (int n = 1; n < s.width; ++n) parent[n] = static_cast<int>(random.below(n));
  int64_t moved = 0;
  for (size_t j = 1; j < nodes.size(); ++j) {
    parent[nodes[j]] = nodes[j - 1];
    target[nodes[j - 1]] = kLastToken + 1 + nodes[j];
    moved += nodes[j] != static_cast<int>(j);
  }
  for (int n = 0; n < s.width; ++n) {
    draft[n] = kLastToken + 1 + n;
    if (n == 0) continue;
    (last[parent[n]] < 0 ? child[parent[n]] : sibling[last[parent[n]]]) = n;
    last[parent[n]] = n;
  }
  return moved;
}

int64_t make_inputs(const TimedShape& s, const Vec<int32_t>& slots, int index, Inputs& in,
                    Random& random) {
  const int64_t rows = s.rows();
  Vec<int64_t> draft(rows), target(rows, kLastToken), child(rows, -1), sibling(rows, -1);
  int64_t moved = 0;
  for (int r = 0; r < s.bs; ++r) {
    const int64_t first = int64_t{r} * s.width;
    moved += draw_request(s, &draft[first], &target[first], &child[first], &sibling[first], random);
  }
  in.draft_tokens.put(draft);
  in.targets.put(target);
  in.next_token.put(child);
  in.next_sibling.put(sibling);
  in.seq_lens.put(Vec<int64_t>(s.bs, 100));
  in.out_cache_loc.put(
      Vec<int64_t>(slots.begin() + index * rows, slots.begin() + (index + 1) * rows));
  in.new_seq_lens.resize(s.bs);
  in.select_index.resize(s.bs);
  in.window_ends.resize(s.bs);
  in.next_token_ids.resize(rows);
  in.positions.resize(rows);
  in.accept_index.resize(int64_t{s.bs} * s.max_path());
  in.accept_tokens.resize(int64_t{s.bs} * s.max_path());
  in.per_request.resize(int64_t{4} * s.bs);
  in.hidden_states.resize(rows * s.hidden_bytes);
  Vec<float> coins(rows), finals(s.bs);
  for (Vec<float>* x : {&coins, &finals}) {
    for (float& coin : *x) coin = static_cast<float>(0.1 + 0.8 * random.uniform());
  }
  in.coins.put(coins);
  in.coins_final.put(finals);
  if (s.source != Source::kTargets) {
    in.rows.resize(rows * kVocab);
    fill_rows<<<2048, 256>>>(in.rows.data(), in.targets.data(), rows, s.source == Source::kProbs);
    CUDA_OK(cudaGetLastError());
  }
  return moved;
}

CommitParams params(const TimedShape& s, const Inputs& in) {
  CommitParams p{};
  if (s.source == Source::kTargets) p.targets = in.targets.data();
  if (s.source == Source::kProbs) p.target_probs = in.rows.data();
  if (s.source == Source::kArgmax || s.source == Source::kSampled) p.logits = in.rows.data();
  if (s.source >= Source::kSampled) {
    p.coins = in.coins.data();
    p.coins_final = in.coins_final.data();
  }
  p.draft_tokens = in.draft_tokens.data();
  p.next_token = in.next_token.data();
  p.next_sibling = in.next_sibling.data();
  p.seq_lens = in.seq_lens.data();
  p.out_cache_loc = in.out_cache_loc.data();
  p.accept_index = in.accept_index.data();
  p.accept_tokens = in.accept_tokens.data();
  p.num_correct_drafts = in.per_request.data();
  p.accept_lens = in.per_request.data() + s.bs;
  p.bonus_tokens = in.per_request.data() + 2 * s.bs;
  p.invalid_logits = in.per_request.data() + 3 * s.bs;
  p.new_seq_lens = in.new_seq_lens.data();
  p.next_token_ids = in.next_token_ids.data();
  p.select_index = in.select_index.data();
  p.positions = in.positions.data();
  p.window_ends = in.window_ends.data();
  p.hidden_states = in.hidden_states.data();
  p.stride_logits_row = p.stride_target_probs_row = p.vocab = kVocab;
  p.stride_hidden_bytes = p.hidden_row_bytes = s.hidden_bytes;
  p.bs = s.bs;
  p.width = s.width;
  p.max_path = s.max_path();
  p.threshold_single = p.threshold_acc = 1;
  p.logits_dtype = DType::kFloat32;
  return p;
}

struct Machine {  // the KV pool, and what this GPU can do
  Dev<char> pool;
  Dev<int64_t> ptrs, row_bytes;
  double read_gbps = 0, empty_us = 0;

  Machine() {
    constexpr int64_t kBufferBytes = kPoolSlots * kRowBytes;
    pool.resize(2 * kLayers * kBufferBytes);
    pool.set_bytes(1);
    Vec<int64_t> at;
    for (int b = 0; b < 2 * kLayers; ++b) {
      at.push_back(reinterpret_cast<int64_t>(pool.data()) + b * kBufferBytes);
    }
    ptrs.put(at);
    row_bytes.put(Vec<int64_t>(2 * kLayers, kRowBytes));
    Dev<int64_t> sink;
    sink.resize(1);
    const int64_t half = static_cast<int64_t>(pool.size()) / 2;  // multiple of 16
    const Times read = graph_times(4, [&](int i, cudaStream_t stream) {
      CUDA_OK(smxx::run_bench_read(pool.data() + i % 2 * half, half, sink.data(), stream));
    });
    read_gbps = static_cast<double>(half) / read.median / 1e3;
    empty_us =
        graph_times(100, [](int, cudaStream_t s) { CUDA_OK(smxx::run_bench_empty(s)); }).median;
    std::printf("read %.0f GB/s, empty launch %.2f us\n", read_gbps, empty_us);
  }
};

void time_shape(const TimedShape& s, const Machine& machine, Random& random) {
  const int64_t row_bytes = s.source == Source::kTargets ? 0 : s.rows() * kVocab * 4;
  int64_t sets = std::min<int64_t>((kPoolSlots - 1) / s.rows(), 64);
  if (row_bytes > 0) sets = std::min(sets, std::max<int64_t>(2, 400'000'000 / row_bytes + 1));
  Vec<int32_t> slots(kPoolSlots - 1);
  std::iota(slots.begin(), slots.end(), 1);
  std::shuffle(slots.begin(), slots.end(), random.engine);
  std::vector<Inputs> inputs(sets);
  int64_t moved = 0;
  for (int i = 0; i < sets; ++i) moved += make_inputs(s, slots, i, inputs[i], random);
  const Dev<float> temperatures(Vec<float>(s.bs, 0.9f));
  Dev<char> workspace;
  workspace.resize(commit_workspace_bytes(s.bs, s.width, kVocab));
  CUDA_OK(cudaDeviceSynchronize());

  const int launches = static_cast<int>(std::max<int64_t>(20, sets));
  const Times us = graph_times(launches, [&](int i, cudaStream_t stream) {
    CommitParams p = params(s, inputs[i % sets]);
    if (s.source == Source::kSampled) p.temperatures = temperatures.data();
    p.workspace = workspace.data();
    p.kv = {machine.ptrs.data(), machine.row_bytes.data(), 2 * kLayers, kPoolSlots};
    CUDA_OK(smxx::run_commit(p, stream));
  });
  const Vec<int32_t> decided = inputs[0].per_request.get();
  for (int r = 0; r < s.bs; ++r) {  // the drawn path was taken
    expect(decided[2 * s.bs + r] == kLastToken && decided[3 * s.bs + r] == 0,
           "%s: bonus token %d of request %d", s.name().c_str(), decided[2 * s.bs + r], r);
  }
  // A probability is read at the drafts only, and in the last row for the bonus token.
  const double moved_bytes =
      2.0 * double(moved) / double(sets) * double(2 * kLayers * kRowBytes + s.hidden_bytes);
  const double bytes =
      moved_bytes + double(s.source == Source::kProbs ? s.bs * kVocab * 4 : row_bytes);
  const double read_us = bytes / machine.read_gbps / 1e3;
  std::printf("%-28s %8.2f us (p10 %.2f p90 %.2f) %8.2f MB, %.2f us at the read rate (%.0f%%)\n",
              s.name().c_str(), us.median, us.p10, us.p90, bytes / 1e6, read_us,
              100 * read_us / us.median);
}

}  // namespace

void time_commits(const Options& options, Groups& groups) {
  std::vector<TimedShape> shapes;
  for (const int bs : {1, 16, 64}) {
    for (const int64_t hidden : {0, 3 * 4096 * 2}) {
      shapes.push_back({Source::kTargets, bs, 16, hidden});
    }
    for (const Source source : {Source::kArgmax, Source::kSampled, Source::kProbs}) {
      shapes.push_back({source, bs, 16});
    }
  }
  shapes.push_back({Source::kArgmax, 64, 1});
  shapes.push_back({Source::kSampled, 64, 1});
  shapes.push_back({Source::kTargets, 64, 64});
  std::unique_ptr<Machine> machine;
  for (const TimedShape& shape : shapes) {
    if (!groups.begin(shape.name())) continue;
    if (machine == nullptr) machine = std::make_unique<Machine>();
    Random random(seed_of(options.seed, shape.name()));
    time_shape(shape, *machine, random);
  }
}

}  // namespace specfused::checks
