// SPDX-License-Identifier: Apache-2.0
// commit_check: commit and compact of the GPU against the CPU implementation, byte for byte; equal
// bits from run to run, and with --delays N under random delays of N seeds (make delay-checks);
// timings with --bench. No torch.
#include <numeric>

#include "commit_case.h"

namespace specfused::checks {
namespace {

// A coin near a border may fall on either side of it: the device sums in float, the CPU in double.
// Such a request must agree with the CPU for coins that differ by no more than this.
constexpr float kCoinShifts[] = {0, -3e-5f, 3e-5f};
constexpr float kFinalShift = 1.5e-5f;

struct Snapshot {  // what a commit overwrites
  std::vector<Vec<char>> kv;
  Vec<char> hidden;

  bool operator==(const Snapshot& other) const { return kv == other.kv && hidden == other.hidden; }
};

Snapshot snapshot(const CommitCase& c, bool on_device) {
  Snapshot s;
  for (const auto& x : c.kv) s.kv.push_back(on_device ? x->dev.get() : x->host);
  s.hidden = on_device ? c.hidden_states.dev.get() : c.hidden_states.host;
  return s;
}

Outputs run_on_device(CommitCase& c) {
  c.reset_device();
  CUDA_OK(smxx::run_commit(c.params(true), nullptr));
  CUDA_OK(cudaDeviceSynchronize());
  return c.outputs(true);
}

// The final coin with which the CPU draws the device's token. The token grows with it, so a
// bisection finds it: first the edge of the bound, then between coins that draw a lower and a
// higher one.
struct FinalCoin {
  float low, high, value;
  bool low_drawn = false, high_drawn = false;

  explicit FinalCoin(float coin) : low(coin - kFinalShift), high(coin + kFinalShift), value(coin) {}
  // Whether no float is left between the two: the token is lighter than their distance.
  bool narrow(bool drawn_too_low) {
    (drawn_too_low ? low : high) = value;
    (drawn_too_low ? low_drawn : high_drawn) = true;
    const bool bracketed = low_drawn && high_drawn;
    value = bracketed ? low + (high - low) / 2 : drawn_too_low ? high : low;
    return bracketed && (value <= low || value >= high);
  }
};

// Whether both took the same path in request r.
bool same_walk(const Outputs& a, const Outputs& b, int r, const CommitShape& s) {
  const auto begin = a.out32[kAcceptIndex].begin() + int64_t{r} * s.max_path;
  return std::equal(begin, begin + s.max_path,
                    b.out32[kAcceptIndex].begin() + int64_t{r} * s.max_path);
}

// Runs the CPU until every request agrees with the device, with coins moved within the bounds above
// where they must be. Leaves KV and hidden states of the host as the agreeing runs leave them.
void agree_with_cpu(CommitCase& c, const Outputs& device, const std::string& what) {
  const CommitShape& s = c.shape;
  const Snapshot before = snapshot(c, false);
  const Vec<float> coins = c.coins.host;
  const Vec<float> finals = c.coins_final.host;
  std::vector<int> open(s.bs);  // the requests that do not agree yet
  std::iota(open.begin(), open.end(), 0);
  Outputs want;
  const auto run_cpu = [&] {
    for (size_t i = 0; i < c.kv.size(); ++i) c.kv[i]->host = before.kv[i];
    c.hidden_states.host = before.hidden;
    c.reset_host_outputs();
    cpu::commit(c.params(false));
    want = c.outputs(false);
    open.erase(std::remove_if(open.begin(), open.end(),
                              [&](int r) { return !device.difference(want, r, s.bs); }),
               open.end());
    return open.empty();
  };
  bool agreed = run_cpu();
  for (const float shift : kCoinShifts) {
    if (agreed || !s.sampled()) break;
    std::vector<FinalCoin> final_coins(finals.begin(), finals.end());
    for (const int r : open) {
      for (int64_t i = int64_t{r} * s.width; i < int64_t{r + 1} * s.width; ++i) {
        c.coins.host[i] = coins[i] + shift;
      }
      c.coins_final.host[r] = finals[r];
    }
    agreed = run_cpu();
    bool moved = true;
    for (int step = 0; step < 24 && moved && !agreed; ++step) {
      moved = false;
      std::vector<int> still_open;
      for (const int r : open) {
        const int drawn = want.out32[kBonus][r];
        const int token = device.out32[kBonus][r];
        const bool search = drawn != token && same_walk(device, want, r, s);
        const bool between = search && final_coins[r].narrow(drawn < token);
        c.coins_final.host[r] = final_coins[r].value;
        moved = moved || search;
        if (!between) still_open.push_back(r);
      }
      open = still_open;
      agreed = run_cpu();
    }
  }
  for (const int r : open) {
    const char* where = device.difference(want, r, s.bs);
    expect(false, "%s: %s of request %d; accept_lens %d, CPU %d; bonus %d, CPU %d", what.c_str(),
           where, r, device.out32[kAcceptLens][r], want.out32[kAcceptLens][r],
           device.out32[kBonus][r], want.out32[kBonus][r]);
  }
}

int check(const CommitShape& shape, Random& random, int delay_seeds = 0) {
  const std::string what = shape.name();
  CommitCase c(shape, random);
  const Outputs first = run_on_device(c);
  const Snapshot moved = snapshot(c, true);
  for (int seed = 0; seed <= delay_seeds; ++seed) {  // 0: as the first run
    CUDA_OK(smxx::set_delay_seed(static_cast<uint32_t>(seed)));
    const Outputs again = run_on_device(c);
    expect(first.out32 == again.out32 && first.out64 == again.out64 && snapshot(c, true) == moved,
           "%s: another run differs, delay seed %d", what.c_str(), seed);
  }
  CUDA_OK(smxx::set_delay_seed(0));
  agree_with_cpu(c, first, what);
  const Snapshot want = snapshot(c, false);
  expect(moved.kv == want.kv, "%s: KV differs", what.c_str());
  expect(moved.hidden == want.hidden, "%s: hidden states differ", what.c_str());
  for (int r = 0; r < shape.bs && shape.source != Source::kTargets; ++r) {
    const int32_t token = first.out32[kBonus][r];
    expect(token >= 0 && token < shape.vocab, "%s: token %d is not of the vocabulary", what.c_str(),
           token);
  }
  return 1;
}

// Compaction of an earlier decision; one in five has lengths that cannot be.
int check_compact(Random& random, int most_requests) {
  CommitShape s;
  s.bs = static_cast<int>(random.between(1, most_requests));
  s.width = s.max_path = static_cast<int>(random.between(1, kMaxWindow));
  s.kv = true;
  s.bad_slots = random.one_in(3);
  CommitCase c(s, random);
  c.reset_device();
  Vec<int32_t> index(s.rows(), -1), lens(s.bs);
  const bool wrong = random.one_in(5);
  for (int r = 0; r < s.bs; ++r) {
    int count = 0;
    for (int node = 0; node < s.width; ++node) {
      if (node == 0 || !random.one_in(3)) index[r * s.width + count++] = r * s.width + node;
    }
    lens[r] = wrong ? static_cast<int>(random.between(-3, 90)) : count;
  }
  const Dev<int32_t> index_dev(index), lens_dev(lens);
  CUDA_OK(smxx::run_compact({c.out_cache_loc.dev.data(), index_dev.data(), lens_dev.data(),
                             c.kv_table(true), s.bs, s.width, s.max_path},
                            nullptr));
  CUDA_OK(cudaDeviceSynchronize());
  const Snapshot moved = snapshot(c, true);
  cpu::compact({c.out_cache_loc.host.data(), index.data(), lens.data(), c.kv_table(false), s.bs,
                s.width, s.max_path});
  expect(moved.kv == snapshot(c, false).kv, "compact of bs %d W %d differs", s.bs, s.width);
  return 1;
}

CommitShape random_shape(Source source, int64_t most_logits, Random& random) {
  constexpr int kWidths[] = {1, 2, 3, 4, 8, 16, 31, 32, 33, 64};
  constexpr int64_t kVocabs[] = {1,    2,    7,     50,    97,     1000,  4095,
                                 4096, 8191, 32003, 40000, 128256, 151936};
  CommitShape s;
  s.source = source;
  s.tree = static_cast<Tree>(random.below(4));
  s.width = kWidths[random.below(10)];
  s.vocab = kVocabs[random.below(13)];
  if (s.vocab * s.width > most_logits && s.vocab > 8191) s.vocab = 8191 + random.below(9000);
  const int64_t most = most_logits / (source == Source::kTargets ? s.width : s.width * s.vocab);
  s.bs = static_cast<int>(random.between(1, std::clamp<int64_t>(most, 1, 130)));
  s.max_path = static_cast<int>(random.between(1, s.width + 2));
  s.dtype = static_cast<DType>(random.below(3));
  s.hidden_bytes = random.one_in(2) ? 2 * random.between(1, 3000) : 0;
  s.kv = random.one_in(2);
  s.bad_slots = random.one_in(3);
  s.bad_rows = random.one_in(3);
  s.ids32 = random.one_in(2);
  if (random.one_in(3)) {
    s.threshold_single = static_cast<float>(random.uniform());
    s.threshold_acc = static_cast<float>(0.3 + random.uniform());
  }
  s.skew = random.one_in(2) ? static_cast<int>(random.below(9)) : 0;
  return s;
}

// More requests than a grid has rows.
int check_many_requests(Source source, Random& random) {
  CommitShape s;
  s.source = source;
  s.tree = Tree::kRandom;
  s.bs = static_cast<int>(random.between(66000, 90000));
  s.width = s.max_path = static_cast<int>(random.between(1, 4));
  s.vocab = random.between(1, 8);
  s.hidden_bytes = 4;
  return check(s, random);
}

// One, two and three slices of a row; each tree and type; every mover. For compute-sanitizer, and
// for delays.
int check_small_shapes(Source source, Random& random, int delay_seeds) {
  constexpr int64_t kVocabs[] = {7, 2 * kRowBlock - 5, 2 * kRowBlock + 700};
  constexpr Tree kTrees[] = {Tree::kChain, Tree::kRandom, Tree::kWild};
  int cases = 0;
  for (int i = 0; i < 3; ++i) {
    for (const int width : {1, 5, 33}) {
      CommitShape s = random_shape(source, 1, random);
      s.tree = width == 1 ? Tree::kNoLinks : width == 5 ? kTrees[i] : Tree::kRandom;
      s.dtype = static_cast<DType>(cases % 3);
      s.bs = 4;
      s.width = s.max_path = width;
      s.vocab = kVocabs[i];
      s.kv = true;
      s.hidden_bytes = cases % 2 == 0 ? 258 : 512;
      cases += check(s, random, delay_seeds);
    }
  }
  return cases;
}

int run(const Options& options) {
  require_delays(options);
  const double seconds = options.limit(options.quick ? 8 : 30);
  Groups groups(options, options.bench ? seconds : 2 * seconds);
  if (options.bench) {
    time_commits(options, groups);
    return groups.finish();
  }
  const int64_t most_logits = options.quick ? 300'000 : 1'500'000;
  const auto repeat = [&](auto&& one) {  // a share of the time for each group
    const Clock clock;
    int cases = 0;
    do {
      cases += one();
    } while (cases < 100'000 && clock.seconds() < seconds / (kNumSources + 2));
    return cases;
  };
  for (int i = 0; i < kNumSources; ++i) {
    const Source source = static_cast<Source>(i);
    if (options.sanitize || options.delays > 0) {
      groups.run(
          (options.sanitize ? "sanitize/" : "delays/") + std::string(kSourceNames[i]),
          [&](Random& random) { return check_small_shapes(source, random, options.delays); });
      continue;
    }
    groups.run(std::string("commit/") + kSourceNames[i], [&](Random& random) {
      return repeat([&] { return check(random_shape(source, most_logits, random), random); });
    });
  }
  if (options.delays > 0) return groups.finish();
  groups.run(options.sanitize ? "sanitize/compact" : "compact", [&](Random& random) {
    if (options.sanitize) return check_compact(random, 3) + check_compact(random, 3);
    return repeat([&] { return check_compact(random, 40); });
  });
  if (options.sanitize || options.quick) return groups.finish();
  groups.run("many_requests", [&](Random& random) {
    int cases = 0;
    for (int i = 0; i < kNumSources; ++i) {
      cases += check_many_requests(static_cast<Source>(i), random);
    }
    return cases;
  });
  return groups.finish();
}

}  // namespace
}  // namespace specfused::checks

int main(int argc, char** argv) {
  return specfused::checks::run(specfused::checks::parse_options(argc, argv, "commit_check"));
}
