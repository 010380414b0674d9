// SPDX-License-Identifier: Apache-2.0
// Argument checks. One form of message: `<op>: <argument> must <requirement>, got <value>`.
// Only what the host knows is checked; device memory is never read.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../common.h"

namespace specfused::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Not through iostreams: inserting a number crashed the process where torch and this library had
// been built by different compilers.
inline std::string text(const char* part) { return part; }
inline const std::string& text(const std::string& part) { return part; }
inline std::string text(double part) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%g", part);
  return buffer;
}
template <class Integer, class = std::enable_if_t<std::is_integral_v<Integer>>>
std::string text(Integer part) {
  return std::to_string(part);
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::runtime_error((std::string() + ... + text(parts)));
}

inline const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Byte:
      return "uint8";
    default:
      return "another dtype";
  }
}

// A size that several arguments share: the first one binds it, the others must agree.
struct Dim {
  const char* name;
  int64_t value = -1;
  std::string bound_by = {};
};

class Checker {
 public:
  // All arguments must be on the device of `anchor`.
  Checker(const char* op, const char* anchor_name, const Tensor& anchor)
      : op_(op), anchor_name_(anchor_name), anchor_(anchor) {}

  const char* op() const { return op_; }

  void require(bool ok, const char* arg, const std::string& requirement,
               const std::string& got) const {
    if (!ok) fail(op_, ": ", arg, " must ", requirement, ", got ", got);
  }

  void tensor(const char* arg, const Tensor& t, std::initializer_list<ScalarType> types,
              int64_t rank) const {
    const bool same_device =
        t.device().type() == anchor_.device().type() && t.get_device() == anchor_.get_device();
    require(same_device, arg, std::string("be on the device of ") + anchor_name_, "another device");
    bool ok = false;
    std::string names;
    for (ScalarType type : types) {
      ok = ok || t.scalar_type() == type;
      names += (names.empty() ? "" : " or ") + std::string(name_of(type));
    }
    require(ok, arg, "be " + names, name_of(t.scalar_type()));
    require(t.dim() == rank, arg, "have " + std::to_string(rank) + " dimensions",
            std::to_string(t.dim()));
  }

  void size(const char* arg, const Tensor& t, int64_t dim, Dim& expected) const {
    const int64_t got = t.size(dim);
    if (expected.value < 0) {
      expected.value = got;
      expected.bound_by = arg;
      return;
    }
    if (got != expected.value) {
      fail(op_, ": ", arg, ".size(", dim, ") must be ", expected.value, " (", expected.name,
           ", set by ", expected.bound_by, "), got ", got);
    }
  }

  void last_contiguous(const char* arg, const Tensor& t) const {
    const int64_t stride = t.stride(t.dim() - 1);
    require(stride == 1 || t.size(t.dim() - 1) <= 1, arg, "be contiguous in its last dimension",
            "stride " + std::to_string(stride));
  }

  // Of what is written: every element has memory of its own, as an expanded tensor's have not.
  void not_expanded(const char* arg, const Tensor& t) const {
    for (int64_t i = 0; i < t.dim(); ++i) {
      require(t.stride(i) != 0 || t.size(i) <= 1, arg, "have memory for each element",
              "stride 0 in dimension " + std::to_string(i));
    }
  }

  void contiguous(const char* arg, const Tensor& t) const {
    require(t.is_contiguous(), arg, "be contiguous", "a strided tensor");
  }

 private:
  const char* op_;
  const char* anchor_name_;
  const Tensor& anchor_;
};

inline DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      return DType::kFloat32;
  }
}

template <class T>
const T* data_or_null(const std::optional<Tensor>& t) {
  return t.has_value() ? static_cast<const T*>(t->data_ptr()) : nullptr;
}

}  // namespace specfused::ops
