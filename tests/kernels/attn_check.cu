// SPDX-License-Identifier: Apache-2.0
// attn_check: attention, plan and tree words of the GPU against the CPU implementation, whose sums
// are in double; equal bits where they are promised, and with --delays N under random delays of N
// seeds (make delay-checks); timings with --bench. No torch.
// SPECFUSED_WGMMA=0 in the environment: the portable kernels where there are others.
#include <cmath>

#include "attn_compare.h"

namespace specfused::checks {
namespace {

const char* const kTypeNames[] = {"bf16", "fp16", "fp32"};

// The plan is that of the host; a launch leaves its counters at zero.
void check_plan_and_counters(const AttnCase& c, const std::string& what) {
  if (c.num_ctas == 0) return;
  Vec<int32_t> plan(c.plan.size());
  make_plan(c.shape.seq_lens.data(), 0, c.shape.bs(), c.shape.num_kv_heads, c.num_ctas,
            plan.data());
  expect(c.plan.get() == plan, "%s: plan differs from the host's", what.c_str());
  Vec<char> counters(kCounterBytes);
  CUDA_OK(cudaMemcpy(counters.data(), c.workspace.data(), kCounterBytes, cudaMemcpyDeviceToHost));
  const auto bad = std::count_if(counters.begin(), counters.end(), [](char x) { return x != 0; });
  expect(bad == 0, "%s: %td bytes of counters are not zero", what.c_str(), bad);
}

// Rows of a narrower step have the bits that they have in the wide one, in the same kernel class.
void check_narrower(AttnCase& c, int width, const Vec<char>& wide, const std::string& what) {
  const int bs = c.shape.bs();
  const size_t row_bytes = c.sets[0].q.size() / (size_t(bs) * c.shape.num_rows);
  const Vec<char> q = c.sets[0].q.get();
  Vec<char> narrow_q;
  Vec<int64_t> narrow_words;
  for (int r = 0; r < bs; ++r) {
    const int64_t first = int64_t{r} * c.shape.num_rows;
    const char* rows = q.data() + first * row_bytes;
    narrow_q.insert(narrow_q.end(), rows, rows + width * row_bytes);
    const int64_t* words = c.tree_words_host.data() + first;
    narrow_words.insert(narrow_words.end(), words, words + width);
  }
  const Dev<char> q_dev(narrow_q);
  const Dev<int64_t> words_dev(narrow_words);
  Dev<char> out;
  Dev<float> lse;
  out.resize(narrow_q.size());
  lse.resize(int64_t{bs} * width * c.shape.num_q_heads);
  for (const bool decode : {false, true}) {
    if (decode && width > 1) continue;
    AttnParams p = c.params(0);
    p.q = q_dev.data();
    p.out = out.data();
    p.lse = lse.data();
    p.tree_words = decode ? nullptr : words_dev.data();
    p.num_rows = p.table.width = width;
    p.stride_words = width;
    out.set_bytes(0xff);
    CUDA_OK(decode ? smxx::run_decode_attn(p, nullptr) : smxx::run_verify_attn(p, nullptr));
    const Vec<char> narrow = out.get();
    int different = 0;
    for (int r = 0; r < bs; ++r) {
      different +=
          std::memcmp(narrow.data() + r * width * row_bytes,
                      wide.data() + r * c.shape.num_rows * row_bytes, width * row_bytes) != 0;
    }
    expect(different == 0, "%s: %d requests differ at W %d%s", what.c_str(), different, width,
           decode ? " of decode_attn" : "");
  }
}

int check(const AttnShape& shape, Random& random, bool sanitize = false) {
  const std::string what = doing = shape.name();
  AttnCase c(shape, random, 1, !sanitize);
  AttnCase::HostCopy want = c.host_copy(0);
  cpu::store_rows(want.params);
  attend_on_cpu(want.params);
  c.clear_out(0);
  c.launch_plan(nullptr);
  c.launch(0, nullptr);
  CUDA_OK(cudaDeviceSynchronize());
  check_values(c, want, what);
  check_plan_and_counters(c, what);
  if (shape.store) {
    expect(c.sets[0].k.get() == want.k && c.sets[0].v.get() == want.v,
           "%s: caches differ from the stored rows", what.c_str());
  }
  const Vec<char> out = c.sets[0].out.get();
  const Vec<float> lse = c.lse.get();
  for (int run = sanitize ? 4 : 0; run < 5; ++run) {  // the last one: four launches in a row
    c.clear_out(0);
    for (int i = 0; i < (run == 4 ? 4 : 1); ++i) c.launch(0, nullptr);
    const Vec<float> again = c.lse.get();
    expect(c.sets[0].out.get() == out &&
               std::memcmp(again.data(), lse.data(), lse.size() * sizeof(float)) == 0,
           "%s: run %d has other bits", what.c_str(), run);
  }
  for (const int width : {1, 2, 4, 16, 33}) {
    if (width >= shape.num_rows || shape.store || shape.window_slots || sanitize) continue;
    if (shape.dtype != DType::kFloat32 &&
        class_of(shape, width) != class_of(shape, shape.num_rows)) {
      continue;
    }
    check_narrower(c, width, out, what);
  }
  check_plan_and_counters(c, what);
  return 1;
}

// One captured graph serves other lengths.
int check_graph(int head_dim, int num_rows, Random& random) {
  constexpr int64_t kCapacity = 3000;
  AttnCase c({32, 8, head_dim, num_rows, {kCapacity, kCapacity, kCapacity}}, random, 1, true,
             kCapacity);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA_OK(cudaStreamCreate(&stream));
  c.launch_plan(stream);
  c.launch(0, stream);
  CUDA_OK(cudaStreamSynchronize(stream));
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  c.launch_plan(stream);
  for (int i = 0; i < 3; ++i) c.launch(0, stream);
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
  constexpr int kReplays = 4;
  for (int i = 0; i < kReplays; ++i) {
    Vec<int64_t> lengths(3);
    for (int64_t& length : lengths) length = random.below(random.one_in(4) ? 70 : kCapacity);
    c.set_seq_lens(lengths);
    c.clear_out(0);
    CUDA_OK(cudaGraphLaunch(exec, stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    const AttnCase::HostCopy want = c.host_copy(0);
    attend_on_cpu(want.params);
    check_values(c, want, "replay of " + c.shape.name());
    check_plan_and_counters(c, "replay of " + c.shape.name());
  }
  CUDA_OK(cudaGraphExecDestroy(exec));
  CUDA_OK(cudaGraphDestroy(graph));
  CUDA_OK(cudaStreamDestroy(stream));
  return kReplays;
}

int check_plans(Random& random, bool sanitize) {
  int cases = 0;
  for (const int bs : {1, 2, 33, 1023, 1024, 1025, sanitize ? 1 : 5000}) {
    for (const int num_ctas : {1, 7, 132, kAttnMaxCtas}) {
      Vec<int64_t> lengths(bs);  // some that no request can have
      for (int64_t& length : lengths) length = random.between(-2, random.one_in(9) ? 20000 : 200);
      Vec<int32_t> want(plan_numel(bs, num_ctas));
      const int64_t offset = -random.below(2);
      make_plan(lengths.data(), offset, bs, 1 + cases % 8, num_ctas, want.data());
      const Dev<int64_t> seq_lens(lengths);
      Dev<int32_t> plan;
      plan.resize(want.size());
      CUDA_OK(smxx::run_plan(seq_lens.data(), offset, bs, 1 + cases % 8, num_ctas, plan.data(),
                             nullptr));
      expect(plan.get() == want, "plan of bs %d for %d CTAs differs", bs, num_ctas);
      ++cases;
    }
  }
  return cases;
}

int check_tree_words(Random& random) {
  int cases = 0;
  for (const int width : {1, 2, 16, 31, 32, 33, 64}) {
    const int bs = static_cast<int>(random.between(1, 40));
    Vec<int64_t> child(bs * width), sibling(bs * width), committed(bs), want(bs * width);
    for (Vec<int64_t>* links : {&child, &sibling}) {
      for (int64_t& link : *links) link = random.between(-2, width + 2);
    }
    for (int r = 0; r < bs; ++r) {
      words_from_links(&child[r * width], &sibling[r * width], width,
                       reinterpret_cast<TreeWord*>(&want[r * width]));
    }
    const Dev<int64_t> child_dev(child), sibling_dev(sibling);
    Dev<int64_t> words;
    words.resize(want.size());
    CUDA_OK(smxx::run_tree_words_from_links(child_dev.data(), sibling_dev.data(), bs, width,
                                            words.data(), nullptr));
    expect(words.get() == want, "tree words from links of W %d differ", width);

    int64_t cells = int64_t{bs} * width * width;  // the two layouts differ by the committed cells
    for (int64_t& length : committed) cells += width * (length = random.below(100));
    Vec<uint8_t> mask(cells);
    for (uint8_t& cell : mask) cell = static_cast<uint8_t>(random.below(2));
    const Dev<uint8_t> mask_dev(mask);
    const Dev<int64_t> committed_dev(committed);
    for (const bool full : {false, true}) {
      const int64_t numel = random.one_in(2) ? cells : cells - random.below(width * 2);
      cpu::tree_words_from_mask(mask.data(), numel, full ? committed.data() : nullptr, bs, width,
                                want.data());
      CUDA_OK(smxx::run_tree_words_from_mask(mask_dev.data(), numel,
                                             full ? committed_dev.data() : nullptr, bs, width,
                                             words.data(), nullptr));
      expect(words.get() == want, "tree words from a mask of W %d differ", width);
    }
    cases += 3;
  }
  return cases;
}

int check_shapes(DType dtype, int head_dim, int num_rows, bool quick, Random& random) {
  int cases = 0;
  const auto one = [&](int q_heads, int kv_heads, Vec<int64_t> seq_lens, int num_ctas = 0,
                       bool store = false, bool window_slots = false) {
    const AttnShape shape{q_heads, kv_heads, head_dim, num_rows,    std::move(seq_lens),
                          dtype,   num_ctas, store,    window_slots};
    cases += check(shape, random);
  };
  one(32, 8, {1024});
  one(8, 2, {0, 1, 63, 64, 65, 127, 128, 500});
  one(8, 4, {300, 64, 1900}, 0, true);
  one(8, 4, {300, 64, 1900}, 0, false, true);
  if (dtype == DType::kFloat32 || quick) return cases;
  one(8, 2, {5000, 0, 1000, 64, 1});
  one(4, 1, {9000});
  one(7, 1, {777, 3});
  one(32, 8, {2500}, 37);
  for (const int num_ctas : {1, 3}) one(8, 2, {2500, 100}, num_ctas);
  one(16, 4, {6000, 100}, 1000);  // more CTAs than fit: owners of shares of the combine give up
  one(16, 1, {4000}, 0, true);
  Vec<int64_t> many(num_rows == 64 ? 40 : 130);
  for (int64_t& length : many) length = random.below(random.one_in(3) ? 66 : 600);
  one(8, 2, many);
  if (head_dim == 128) one(32, 8, {8192});
  return cases;
}

// Every kernel class and row tile, head_dim and type; splits, shares of the combine and more CTAs
// than fit; store and window slots. Small enough for compute-sanitizer.
int sanitize_shapes(int head_dim, Random& random) {
  int cases = 0;
  const auto one = [&](int num_rows, Vec<int64_t> seq_lens, DType dtype, int num_ctas,
                       bool store = false, bool window_slots = false) {
    const AttnShape shape{4,     1,        head_dim, num_rows,    std::move(seq_lens),
                          dtype, num_ctas, store,    window_slots};
    cases += check(shape, random, true);
  };
  for (const int num_rows : {1, 4, 8, 16, 32, 64}) one(num_rows, {130, 0, 70}, DType::kBFloat16, 4);
  one(4, {130, 70}, DType::kFloat16, 3);
  one(16, {130, 70}, DType::kFloat16, 3);
  one(1, {650}, DType::kBFloat16, 11, true);
  one(16, {650}, DType::kBFloat16, 11, true);
  one(8, {100, 3}, DType::kBFloat16, 4, false, true);
  one(4, {40, 33}, DType::kFloat32, 0, true);
  one(1, {40, 33}, DType::kFloat32, 0, true);
  if (head_dim == 128) one(16, {900 * 64}, DType::kBFloat16, 900);
  return cases;
}

void time_shape(int bs, int64_t context, int num_rows, const std::string& name, Random& random) {
  AttnShape shape{32, 8, 128, num_rows, Vec<int64_t>(bs, context)};
  const double bytes = double(bs) * double(context + num_rows) * double(shape.row_elements()) * 4;
  const double flops = 4.0 * bs * double(context + num_rows) * num_rows * 32 * 128;
  constexpr double kCold = 3 * 63e6;  // three times the L2 of the largest GPU
  const int sets = std::max(2, static_cast<int>(std::ceil(kCold / bytes)));
  AttnCase c(shape, random, sets, false);
  c.launch_plan(nullptr);
  CUDA_OK(cudaDeviceSynchronize());
  const Times us =
      graph_times(std::max(20, sets), [&](int i, cudaStream_t s) { c.launch(i % sets, s); });
  std::printf("%-28s %8.2f us (p10 %.2f p90 %.2f) %6.0f GB/s %6.1f TFLOP/s  %s\n", name.c_str(),
              us.median, us.p10, us.p90, bytes / us.median / 1e3, flops / us.median / 1e6,
              class_name(class_of(shape, num_rows)));
}

int run(const Options& options) {
  require_delays(options);
  Groups groups(options, options.limit(options.bench ? 60 : 240));
  if (!options.list) {
    const AttnShape wide{4, 1, 128, kMaxWindow, {1}};
    std::printf("%s: class of wide steps: %s\n", program, class_name(class_of(wide, kMaxWindow)));
  }
  if (options.bench) {
    const std::pair<int, int64_t> shapes[] = {{1, 1024},  {1, 8192},  {1, 65536},
                                              {16, 8192}, {64, 4096}, {128, 1024}};
    for (const auto& [bs, context] : shapes) {
      for (const int w : {1, 4, 16, 64}) {
        const std::string name = "bench/" + std::to_string(bs) + "x" + std::to_string(context) +
                                 "/w" + std::to_string(w);
        Random random(seed_of(options.seed, name));
        if (groups.begin(name)) time_shape(bs, context, w, name, random);
      }
    }
    return groups.finish();
  }
  if (options.delays > 0) {
    check_delays(options, groups);
    return groups.finish();
  }
  groups.run("plan", [&](Random& random) { return check_plans(random, options.sanitize); });
  groups.run("tree_words", check_tree_words);
  for (const int d : {128, 64, 256}) {
    if (options.sanitize) break;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      for (const int w : {16, 32, 64}) {
        groups.run("probe/" + std::string(kTypeNames[static_cast<int>(dtype)]) + "/d" +
                       std::to_string(d) + "/w" + std::to_string(w),
                   [&](Random& random) { return probe_steps(dtype, d, w, random); });
      }
    }
  }
  for (const int d : {64, 128, 256}) {
    const std::string dim = "/d" + std::to_string(d);
    if (options.sanitize) {
      groups.run("sanitize" + dim, [&](Random& random) { return sanitize_shapes(d, random); });
      continue;
    }
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      if (options.quick && dtype != DType::kBFloat16) continue;
      for (const int w : {1, 4, 16, 64}) {
        groups.run(
            std::string("attn/") + kTypeNames[static_cast<int>(dtype)] + dim + "/w" +
                std::to_string(w),
            [&](Random& random) { return check_shapes(dtype, d, w, options.quick, random); });
      }
    }
    for (const int w : {1, 4, 16}) {
      groups.run("graph" + dim + "/w" + std::to_string(w),
                 [&](Random& random) { return check_graph(d, w, random); });
    }
  }
  return groups.finish();
}

}  // namespace
}  // namespace specfused::checks

int main(int argc, char** argv) {
  return specfused::checks::run(specfused::checks::parse_options(argc, argv, "attn_check"));
}
