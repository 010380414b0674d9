// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <numeric>

#include "../../csrc/cpu/element.h"
#include "commit_case.h"

namespace specfused::checks {
namespace {

constexpr int kUntouched = -99;  // what no output may keep

template <class T, class F>
void generate(Vec<T>& values, int64_t n, F&& value) {
  values.resize(n);
  for (T& x : values) x = static_cast<T>(value());
}

// Often one of few tokens, so that drafts agree with targets.
int64_t likely_token(const CommitShape& s, Random& random) {
  return random.below(std::min<int64_t>(s.vocab, 6)) * std::max<int64_t>(s.vocab / 7, 1);
}

void spoil(float* row, int64_t vocab, Random& random) {
  const float inf = INFINITY;
  switch (random.below(5)) {
    case 0:
      row[random.below(vocab)] = NAN;
      break;
    case 1:
      row[random.below(vocab)] = inf;
      break;
    case 2:
      std::fill(row, row + vocab, -inf);
      break;
    case 3:
      std::fill(row, row + vocab, static_cast<float>(NAN));
      break;
    default:  // masked, but usable
      for (int64_t i = 0; i < vocab; ++i) row[i] = i % 3 ? -inf : row[i];
  }
}

}  // namespace

std::string CommitShape::name() const {
  char text[240];
  std::snprintf(text, sizeof text,
                "%s bs%d W%d max_path%d V%lld dtype%d tree%d hidden%lld%s%s%s skew%d thresholds "
                "%g %g",
                kSourceNames[static_cast<int>(source)], bs, width, max_path,
                static_cast<long long>(vocab), static_cast<int>(dtype), static_cast<int>(tree),
                static_cast<long long>(hidden_bytes), kv ? " kv" : "",
                bad_slots ? " bad_slots" : "", bad_rows ? " bad_rows" : "", skew, threshold_single,
                threshold_acc);
  return text;
}

const char* Outputs::difference(const Outputs& other, int r, int bs) const {
  const auto differs = [&](const auto& mine, const auto& theirs) {
    const size_t per_request = mine.size() / bs;
    const auto begin = mine.begin() + r * per_request;
    return !std::equal(begin, begin + per_request, theirs.begin() + r * per_request);
  };
  for (size_t i = 0; i < out32.size(); ++i) {
    if (differs(out32[i], other.out32[i])) return kOut32Names[i];
  }
  for (size_t i = 0; i < out64.size(); ++i) {
    if (differs(out64[i], other.out64[i])) return kOut64Names[i];
  }
  return nullptr;
}

CommitCase::CommitCase(const CommitShape& wanted, Random& random) : shape(wanted) {
  const int64_t rows = shape.rows();
  generate(draft_tokens.host, rows, [&] {
    return random.one_in(50) ? random.between(-3, shape.vocab + 8) : likely_token(shape, random);
  });
  generate(seq_lens.host, shape.bs, [&] { return random.below(100000); });
  if (shape.source == Source::kTargets) {
    generate(targets.host, rows, [&] { return likely_token(shape, random); });
  } else {
    draw_rows(random);
  }
  if (shape.tree != Tree::kNoLinks) draw_tree(random);
  if (shape.sampled()) {
    const auto coin = [&] {  // 0 and 1 themselves are frequent
      const double u = random.uniform();
      return u < 0.03 ? 0.0 : u > 0.97 ? 1.0 : random.uniform();
    };
    generate(coins.host, rows, coin);
    generate(coins_final.host, shape.bs, coin);
  }
  if (shape.draft_probs()) draw_draft_probs(random);
  num_slots_ = rows + 7;
  if (shape.kv) draw_kv(random);
  if (shape.hidden_bytes > 0) {
    stride_hidden_ = shape.hidden_bytes + (random.one_in(2) ? 2 * random.between(1, 8) : 0);
    generate(hidden_states.host, rows * stride_hidden_ + 2 * shape.skew,
             [&] { return random.below(256); });
  }
  workspace_.resize(commit_workspace_bytes(shape.bs, shape.width, shape.vocab));
  for (Both<int64_t>* x :
       {&draft_tokens, &targets, &next_token, &next_sibling, &seq_lens, &out_cache_loc}) {
    x->upload();
  }
  for (Both<float>* x : {&probs, &draft_probs, &temperatures, &coins, &coins_final}) x->upload();
  logits.upload();
}

void CommitCase::draw_tree(Random& random) {
  const int width = shape.width;
  next_token.host.assign(shape.rows(), -1);
  next_sibling.host.assign(shape.rows(), -1);
  if (shape.tree == Tree::kWild) {
    generate(next_token.host, shape.rows(), [&] { return random.between(-2, width + 1); });
    generate(next_sibling.host, shape.rows(), [&] { return random.between(-2, width + 1); });
    return;
  }
  for (int r = 0; r < shape.bs; ++r) {
    int64_t* child = &next_token.host[int64_t{r} * width];
    int64_t* sibling = &next_sibling.host[int64_t{r} * width];
    std::vector<int> last(width, -1);  // child of each node so far
    for (int node = 1; node < width; ++node) {
      const int parent =
          shape.tree == Tree::kChain ? node - 1 : static_cast<int>(random.below(node));
      (last[parent] < 0 ? child[parent] : sibling[last[parent]]) = node;
      last[parent] = node;
    }
  }
}

// Normal logits with a few likely tokens, as logits or as the probabilities that they give.
void CommitCase::draw_rows(Random& random) {
  constexpr int64_t kPool = 1 << 16;  // drawing each value would take most of the run's time
  Vec<float> pool(kPool);
  for (float& x : pool) x = random.normal();
  Vec<float> rows(shape.rows() * shape.vocab);
  for (int64_t r = 0; r < shape.rows(); ++r) {
    float* row = &rows[r * shape.vocab];
    const int64_t start = random.below(kPool);
    for (int64_t i = 0; i < shape.vocab; ++i) row[i] = pool[(start + i * 7) % kPool];
    for (int i = 0; i < 3; ++i) {
      row[likely_token(shape, random)] =
          static_cast<float>(random.uniform() * 3 + std::log(static_cast<double>(shape.vocab)));
    }
    if (shape.bad_rows && random.one_in(6)) spoil(row, shape.vocab, random);
  }
  if (shape.logits()) {
    if (shape.sampled()) {
      generate(temperatures.host, shape.bs, [&] { return random.uniform() + 0.5; });
    }
    stride_logits_ = shape.vocab + (random.one_in(2) ? random.below(9) : 0);
    put_logits(rows);
  } else {
    put_probs(rows);
  }
}

void CommitCase::put_logits(const Vec<float>& rows) {
  logits.host.assign((shape.rows() * stride_logits_ + shape.skew) * dtype_bytes(shape.dtype), 0);
  cpu::with_element(shape.dtype, [&](auto element) {
    for (int64_t r = 0; r < shape.rows(); ++r) {
      for (int64_t i = 0; i < shape.vocab; ++i) {
        element = decltype(element)::round(rows[r * shape.vocab + i]);
        const int64_t at = r * stride_logits_ + i + shape.skew;
        std::memcpy(&logits.host[at * int64_t{sizeof element}], &element, sizeof element);
      }
    }
  });
}

void CommitCase::put_probs(const Vec<float>& rows) {
  probs.host.assign(rows.size() + shape.skew, 0);
  for (int64_t r = 0; r < shape.rows(); ++r) {
    const float* row = &rows[r * shape.vocab];
    double top = -1e30, sum = 0;
    for (int64_t i = 0; i < shape.vocab; ++i) {
      if (std::isfinite(row[i])) top = std::max(top, double{row[i]});
    }
    for (int64_t i = 0; i < shape.vocab; ++i) {
      if (std::isfinite(row[i])) sum += std::exp(row[i] - top);
    }
    float* to = &probs.host[shape.skew + r * shape.vocab];
    for (int64_t i = 0; i < shape.vocab; ++i) {
      const float x = row[i];  // NaN and +inf stay what they are
      to[i] = std::isfinite(x) ? static_cast<float>(std::exp(x - top) / sum) : x < 0 ? 0.0f : x;
    }
  }
}

void CommitCase::draw_draft_probs(Random& random) {
  const int64_t vocab = shape.vocab;
  draft_probs.host.resize(int64_t{shape.bs} * std::max(shape.width - 1, 1) * vocab);
  for (size_t first = 0; first < draft_probs.host.size(); first += vocab) {
    float* row = &draft_probs.host[first];
    for (int64_t i = 0; i < vocab; ++i) row[i] = float(random.uniform() * random.uniform());
    for (int i = 0; i < 6; ++i) row[likely_token(shape, random)] += float(vocab) / 8;
    const double sum = std::accumulate(row, row + vocab, 0.0);
    for (int64_t i = 0; i < vocab; ++i) row[i] = static_cast<float>(row[i] / sum);
    if (shape.bad_rows && random.one_in(8)) row[random.below(vocab)] = NAN;
  }
}

// Rows of every alignment that a mover distinguishes.
void CommitCase::draw_kv(Random& random) {
  Vec<int64_t> order(num_slots_);
  std::iota(order.begin(), order.end(), int64_t{0});
  std::shuffle(order.begin(), order.end(), random.engine);
  out_cache_loc.host.assign(order.begin(), order.begin() + shape.rows());
  for (int64_t& slot : out_cache_loc.host) {
    if (!shape.bad_slots || !random.one_in(9)) continue;
    const int64_t far = random.below(int64_t{1} << 40);
    slot = random.one_in(2) ? -1 - far : num_slots_ + far;
  }
  for (const int64_t bytes : {2048, 2048, 256, 4100, 6, 1, 64}) {
    kv.push_back(std::make_unique<Both<char>>());
    generate(kv.back()->host, num_slots_ * bytes, [&] { return random.below(256); });
    kv_row_bytes_.host.push_back(bytes);
  }
}

void CommitCase::reset_host_outputs() {
  const int64_t per_path = int64_t{shape.bs} * shape.max_path;
  const auto fill = [](auto& x, int64_t n) { x.host.assign(n, kUntouched); };
  for (const int i : {kAcceptIndex, kAcceptTokens}) fill(out32_[i], per_path);
  for (const int i : {kNumCorrect, kAcceptLens, kBonus, kInvalid}) fill(out32_[i], shape.bs);
  fill(out32_[kIds32], shape.rows());
  for (const int i : {kNewSeqLens, kSelectIndex, kWindowEnds}) fill(out64_[i], shape.bs);
  for (const int i : {kIds64, kPositions}) fill(out64_[i], shape.rows());
}

void CommitCase::reset_device() {
  reset_host_outputs();
  for (auto& x : out32_) x.upload();
  for (auto& x : out64_) x.upload();
  for (auto& x : kv) x->upload();
  hidden_states.upload();
}

KvTable CommitCase::kv_table(bool on_device) {
  if (kv.empty()) return {};
  Both<int64_t>& ptrs = on_device ? kv_ptrs_ : kv_host_ptrs_;
  ptrs.host.clear();
  for (auto& x : kv) ptrs.host.push_back(reinterpret_cast<int64_t>(x->at(on_device)));
  if (on_device) {
    ptrs.upload();
    kv_row_bytes_.upload();
  }
  return {ptrs.at(on_device), kv_row_bytes_.at(on_device), static_cast<int32_t>(kv.size()),
          num_slots_};
}

CommitParams CommitCase::params(bool dev) {
  const auto skewed = [&](auto* start, int64_t by) { return start ? start + by : nullptr; };
  CommitParams p{};
  p.logits = skewed(logits.at(dev), shape.skew * dtype_bytes(shape.dtype));
  p.targets = targets.at(dev);
  p.target_probs = skewed(probs.at(dev), shape.skew);
  p.draft_probs = draft_probs.at(dev);
  p.temperatures = temperatures.at(dev);
  p.coins = coins.at(dev);
  p.coins_final = coins_final.at(dev);
  p.draft_tokens = draft_tokens.at(dev);
  p.next_token = next_token.at(dev);
  p.next_sibling = next_sibling.at(dev);
  p.seq_lens = seq_lens.at(dev);
  p.out_cache_loc = out_cache_loc.at(dev);
  p.accept_index = out32_[kAcceptIndex].at(dev);
  p.num_correct_drafts = out32_[kNumCorrect].at(dev);
  p.accept_lens = out32_[kAcceptLens].at(dev);
  p.accept_tokens = out32_[kAcceptTokens].at(dev);
  p.bonus_tokens = out32_[kBonus].at(dev);
  p.invalid_logits = out32_[kInvalid].at(dev);
  p.new_seq_lens = out64_[kNewSeqLens].at(dev);
  p.next_token_ids = shape.ids32 ? static_cast<void*>(out32_[kIds32].at(dev))
                                 : static_cast<void*>(out64_[kIds64].at(dev));
  p.token_ids_are_int32 = shape.ids32;
  p.select_index = out64_[kSelectIndex].at(dev);
  p.positions = out64_[kPositions].at(dev);
  p.window_ends = out64_[kWindowEnds].at(dev);
  p.hidden_states = skewed(hidden_states.at(dev), 2 * shape.skew);
  p.workspace = dev ? workspace_.data() : nullptr;
  p.kv = kv_table(dev);
  p.stride_logits_row = stride_logits_;
  p.stride_target_probs_row = p.stride_draft_probs_row = shape.vocab;
  p.stride_draft_probs_request = int64_t{std::max(shape.width - 1, 1)} * shape.vocab;
  p.stride_hidden_bytes = stride_hidden_;
  p.hidden_row_bytes = shape.hidden_bytes;
  p.vocab = shape.vocab;
  p.bs = shape.bs;
  p.width = shape.width;
  p.max_path = shape.max_path;
  p.threshold_single = shape.threshold_single;
  p.threshold_acc = shape.threshold_acc;
  p.logits_dtype = shape.dtype;
  return p;
}

Outputs CommitCase::outputs(bool on_device) const {
  const auto get = [&](const auto& x) { return on_device ? x.dev.get() : x.host; };
  Outputs all;
  for (size_t i = 0; i < out32_.size(); ++i) all.out32[i] = get(out32_[i]);
  for (size_t i = 0; i < out64_.size(); ++i) all.out64[i] = get(out64_[i]);
  return all;
}

}  // namespace specfused::checks
