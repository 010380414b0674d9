// SPDX-License-Identifier: Apache-2.0
// What both check programs share: options, failures, capped host memory, device memory, timing.
//
// Exit status: 0 all checks hold, 1 a check or a CUDA call failed, 2 wrong usage, 3 no GPU.
#pragma once

#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../csrc/launch.h"
#include "../../csrc/workspace.h"

namespace specfused::checks {

enum Exit { kHolds = 0, kFailed = 1, kUsage = 2, kNoGpu = 3 };

inline const char* program = "check";
inline std::string doing;  // the case at hand, for the message of a failed CUDA call
inline int failures = 0;

__attribute__((format(printf, 2, 3))) [[noreturn]] inline void end(Exit status, const char* format,
                                                                   ...) {
  std::fprintf(stderr, "%s: ", program);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "\n");
  std::exit(status);
}

// One line for each of the first failures; a broken kernel has thousands.
__attribute__((format(printf, 2, 3))) inline void expect(bool holds, const char* format, ...) {
  constexpr int kShown = 30;
  if (holds || ++failures > kShown) return;
  std::printf("  FAIL ");
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::printf("\n");
}

inline void cuda_ok(int error, const char* call, const char* file, int line) {
  if (error == 0) return;
  end(kFailed, "%s at %s:%d: %s%s%s.", call, file, line, smxx::error_string(error),
      doing.empty() ? "" : ", in ", doing.c_str());
}
#define CUDA_OK(call) ::specfused::checks::cuda_ok((call), #call, __FILE__, __LINE__)

// Host memory of the data has a hard cap: a shape drawn or written too large ends the program with
// a sentence instead of the machine's other work.
constexpr size_t kHostCap = size_t{6} << 30;
inline size_t host_bytes = 0;

template <class T>
struct Capped {
  using value_type = T;
  Capped() = default;
  template <class U>
  Capped(const Capped<U>&) {}
  T* allocate(size_t n) {
    if (n > (kHostCap - host_bytes) / sizeof(T)) {
      end(kFailed, "host memory must stay below %zu MiB, got a request for %zu x %zu bytes.",
          kHostCap >> 20, n, sizeof(T));
    }
    host_bytes += n * sizeof(T);
    return static_cast<T*>(::operator new(n * sizeof(T)));
  }
  void deallocate(T* p, size_t n) {
    host_bytes -= n * sizeof(T);
    ::operator delete(p);
  }
  friend bool operator==(const Capped&, const Capped&) { return true; }
  friend bool operator!=(const Capped&, const Capped&) { return false; }
};

template <class T>
using Vec = std::vector<T, Capped<T>>;

template <class T>
class Dev {  // device array
 public:
  Dev() = default;
  explicit Dev(const Vec<T>& values) { put(values); }
  Dev(Dev&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Dev(const Dev&) = delete;
  Dev& operator=(const Dev&) = delete;
  ~Dev() { cudaFree(data_); }

  T* data() const { return data_; }
  size_t size() const { return size_; }
  void resize(size_t n) {
    if (n == size_) return;
    CUDA_OK(cudaFree(data_));
    data_ = nullptr;
    size_ = n;
    if (n > 0) CUDA_OK(cudaMalloc(&data_, n * sizeof(T)));
  }
  void set_bytes(int value) {
    if (size_ > 0) CUDA_OK(cudaMemset(data_, value, size_ * sizeof(T)));
  }
  void put(const Vec<T>& values) {
    resize(values.size());
    if (size_ == 0) return;
    CUDA_OK(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  Vec<T> get() const {
    Vec<T> values(size_);
    if (size_ == 0) return values;
    CUDA_OK(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

class Clock {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

struct Random {
  std::mt19937_64 engine;
  explicit Random(uint64_t seed) : engine(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(engine() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool one_in(int64_t n) { return below(n) == 0; }
  double uniform() { return static_cast<double>(engine() >> 11) * 0x1p-53; }
  float normal() { return std::normal_distribution<float>(0, 1)(engine); }
};

// The same data whatever else runs: a group's seed is the run's and its name.
inline uint64_t seed_of(uint64_t seed, const std::string& name) {
  for (const char c : name) {
    seed = (seed ^ static_cast<unsigned char>(c)) * 0x9e3779b97f4a7c15ull;
    seed ^= seed >> 29;
  }
  return seed;
}

struct Options {
  bool quick = false;     // fewer cases
  bool sanitize = false;  // a few small cases that reach every kernel: for compute-sanitizer
  bool bench = false;     // timings instead of checks
  bool list = false;      // names only; needs no GPU
  int delays = 0;         // seeds of random delays to run under, instead of the checks; 0: none
  double seconds = 0;     // begin nothing new after this long; 0: the program's default
  uint64_t seed = 0;
  std::string filter;  // part of a name

  // A sanitizer is slow, and its few cases must all have their turn.
  double limit(double usual) const { return seconds > 0 ? seconds : sanitize ? 1800 : usual; }
  bool wants(const std::string& name) const { return name.find(filter) != std::string::npos; }
};

inline double number(const char* option, const char* text) {
  char* rest = nullptr;
  const double value = text == nullptr ? -1 : std::strtod(text, &rest);
  if (text == nullptr || rest == text || *rest != '\0' || !(value >= 0)) {
    end(kUsage, "%s must have a number >= 0, got %s.", option, text ? text : "nothing");
  }
  return value;
}

inline Options parse_options(int argc, char** argv, const char* name) {
  program = name;
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 12);  // what was said is out before a crash
  Options options;
  options.seed = std::random_device{}();
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const auto value = [&]() -> const char* { return i + 1 < argc ? argv[++i] : nullptr; };
    if (option == "--quick") {
      options.quick = true;
    } else if (option == "--sanitize") {
      options.sanitize = true;
    } else if (option == "--bench") {
      options.bench = true;
    } else if (option == "--list") {
      options.list = true;
    } else if (option == "--seconds") {
      options.seconds = number("--seconds", value());
    } else if (option == "--seed") {
      options.seed = static_cast<uint64_t>(number("--seed", value()));
    } else if (option == "--delays") {
      options.delays = static_cast<int>(number("--delays", value()));
    } else if (option == "--filter") {
      const char* text = value();
      if (text == nullptr) end(kUsage, "--filter must have a part of a name, got nothing.");
      options.filter = text;
    } else {
      end(kUsage,
          "options are --quick --sanitize --bench --list --delays SEEDS --seconds S --seed N "
          "--filter NAME, got %s.",
          option.c_str());
    }
  }
  return options;
}

inline void require_gpu() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return;
  end(kNoGpu, "no GPU to check (%s); --list works without one.",
      error == cudaSuccess ? "no device" : smxx::error_string(error));
}

// Ends the program if it is to run under delays that its kernels do not have.
inline void require_delays(const Options& options) {
  if (options.delays == 0 || options.list) return;
  if (smxx::set_delay_seed(1) != cudaErrorNotSupported) return;
  end(kUsage, "--delays must have a build with SPECFUSED_RANDOM_DELAY: make delay-checks.");
}

// Runs groups of checks, a line each; leaves out what --seconds has no time for.
class Groups {
 public:
  // Begins nothing after `seconds`.
  Groups(const Options& options, double seconds) : options_(options), seconds_(seconds) {
    if (options_.list) return;
    require_gpu();
    alarm(static_cast<unsigned>(2 * seconds) + 60);  // a launch that never ends
    std::printf("%s: --seed %llu\n", program, static_cast<unsigned long long>(options_.seed));
  }

  // Whether the group of this name is wanted and there is time for it; lists it if that is asked.
  bool begin(const std::string& name) {
    if (!options_.wants(name)) return false;
    ++named_;
    if (options_.list) std::printf("%s\n", name.c_str());
    if (options_.list) return false;
    const bool time_left = clock_.seconds() < seconds_;
    ++(time_left ? begun_ : left_out_);
    return time_left;
  }

  // body(Random&) -> number of cases.
  template <class Body>
  void run(const std::string& name, Body&& body) {
    if (!begin(name)) return;
    Random random(seed_of(options_.seed, name));
    const int before = failures;
    const Clock clock;
    const long long cases = body(random);
    std::printf("%-36s %7lld cases %4d failures %6.1f s\n", name.c_str(), cases, failures - before,
                clock.seconds());
  }

  int finish() const {
    if (named_ == 0) end(kUsage, "--filter must be in some name, got %s.", options_.filter.c_str());
    if (options_.list) return kHolds;
    std::printf("%s: %d groups, %d failures, %d groups left out for time, %.1f s\n", program,
                begun_, failures, left_out_, clock_.seconds());
    return failures == 0 ? kHolds : kFailed;
  }

 private:
  const Options& options_;
  const double seconds_;
  const Clock clock_;
  int named_ = 0;
  int begun_ = 0;
  int left_out_ = 0;
};

// Median microseconds of one of `launches` launches that one graph holds. launch(i, stream) must
// vary its data with i so that caches are cold. First and last tenth in p10 and p90.
struct Times {
  double median, p10, p90;
};

template <class Launch>
Times graph_times(int launches, Launch&& launch) {
  cudaStream_t stream;
  CUDA_OK(cudaStreamCreate(&stream));
  launch(0, stream);
  CUDA_OK(cudaStreamSynchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < launches; ++i) launch(i, stream);
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t start, stop;
  CUDA_OK(cudaEventCreate(&start));
  CUDA_OK(cudaEventCreate(&stop));
  std::vector<double> us;
  const Clock clock;
  for (int i = 0; i < 40 && (i < 5 || clock.seconds() < 0.15); ++i) {
    CUDA_OK(cudaEventRecord(start, stream));
    CUDA_OK(cudaGraphLaunch(exec, stream));
    CUDA_OK(cudaEventRecord(stop, stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    float ms;
    CUDA_OK(cudaEventElapsedTime(&ms, start, stop));
    if (i >= 2) us.push_back(ms * 1e3 / launches);
  }
  CUDA_OK(cudaEventDestroy(start));
  CUDA_OK(cudaEventDestroy(stop));
  CUDA_OK(cudaGraphExecDestroy(exec));
  CUDA_OK(cudaGraphDestroy(graph));
  CUDA_OK(cudaStreamDestroy(stream));
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us[us.size() / 10], us[us.size() * 9 / 10]};
}

}  // namespace specfused::checks
