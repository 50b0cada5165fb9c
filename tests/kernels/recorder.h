// What every stand-in does: it writes down what it was given, in JSON, and answers as the real function would.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>

namespace stand_in {

using tvm::ffi::Array;
using tvm::ffi::Optional;
using tvm::ffi::String;
using tvm::ffi::Tensor;
using tvm::ffi::TensorView;
using tvm::ffi::Tuple;

constexpr size_t kKept = 16;
constexpr int64_t kStaged = 16;

inline std::deque<std::string>& calls() {
  static std::deque<std::string> kept;
  return kept;
}

inline std::string& failure() {
  static std::string text;
  return text;
}

inline int64_t& planned() {
  static int64_t count = 0;
  return count;
}

inline std::string number(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}

template <class Numbers>
std::string row(const Numbers& values) {
  std::string text = "[";
  for (int64_t value : values) text += (text.size() > 1 ? "," : "") + std::to_string(value);
  return text + "]";
}

template <class T>
std::string describe(const T& t) {
  int64_t size = (t.dtype().bits + 7) / 8;
  for (int64_t length : t.shape()) size *= length;
  const auto* bytes = static_cast<const uint8_t*>(t.data_ptr());
  std::string head;
  for (int64_t i = 0; t.device().device_type == kDLCPU && i < std::min<int64_t>(size, 64); ++i) {
    head += (i ? "," : "") + std::to_string(bytes[i]);
  }
  return "{\"code\":" + std::to_string(t.dtype().code) + ",\"bits\":" + std::to_string(t.dtype().bits) +
         ",\"device\":[" + std::to_string(t.device().device_type) + "," +
         std::to_string(t.device().device_id) + "],\"shape\":" + row(t.shape()) +
         ",\"strides\":" + row(t.strides()) +
         ",\"address\":" + std::to_string(reinterpret_cast<uintptr_t>(bytes)) + ",\"head\":[" + head + "]}";
}

inline std::string told(const TensorView& value) { return describe(value); }
inline std::string told(const Tensor& value) { return describe(value); }
inline std::string told(bool value) { return value ? "true" : "false"; }
inline std::string told(int64_t value) { return std::to_string(value); }
inline std::string told(double value) { return number(value); }
inline std::string told(const Array<int64_t>& values) { return row(values); }
inline std::string told(DLDataType type) {
  return "[" + std::to_string(type.code) + "," + std::to_string(type.bits) + "," + std::to_string(type.lanes) + "]";
}
inline std::string told(const String& text) { return "\"" + std::string(text) + "\""; }
template <class T>
std::string told_all(const Array<T>& values) {
  std::string text = "[";
  for (const auto& value : values) text += (text.size() > 1 ? "," : "") + told(value);
  return text + "]";
}
inline std::string told(const Array<String>& values) { return told_all(values); }
inline std::string told(const Array<Tensor>& values) { return told_all(values); }
template <class T>
std::string told(const Optional<T>& value) {
  return value.has_value() ? told(value.value()) : "null";
}

inline void mark(const TensorView& buffer) {
  std::memset(buffer.data_ptr(), static_cast<int>(planned() % 251), kStaged);
}

template <class Result>
struct Answer;

template <>
struct Answer<void> {
  template <class... A>
  static void of(const A&...) {}
};

// A planner that copies its plan to the device itself, as all did before 0.7.
template <>
struct Answer<Array<int64_t>> {
  template <class A, class B, class C, class... Rest>
  static Array<int64_t> of(const A&, const B& device, const C& pinned, const Rest&...) {
    ++planned();
    if constexpr (std::is_same_v<C, TensorView>) {
      mark(pinned);
      mark(device);
    }
    return {planned(), 7, 11};
  }
};

// A planner that leaves the copy to its caller, and tells how many bytes.
template <>
struct Answer<Tuple<Array<int64_t>, int64_t>> {
  template <class A, class B, class C, class... Rest>
  static Tuple<Array<int64_t>, int64_t> of(const A&, const B&, const C& pinned, const Rest&...) {
    ++planned();
    mark(pinned);
    return Tuple<Array<int64_t>, int64_t>(Array<int64_t>{planned(), 7, 11}, kStaged);
  }
};

template <class Result, class... A>
struct Recorder {
  const char* name;
  Result operator()(A... values) const {
    std::string text;
    ((text += (text.empty() ? "" : ",") + told(values)), ...);
    auto stream = reinterpret_cast<uintptr_t>(TVMFFIEnvGetStream(kDLCPU, 0));
    calls().push_back("{\"function\":\"" + std::string(name) + "\",\"stream\":" + std::to_string(stream) +
                      ",\"arguments\":[" + text + "]}");
    if (calls().size() > kKept) calls().pop_front();
    if (!failure().empty()) {
      std::string why;
      std::swap(why, failure());
      TVM_FFI_THROW(RuntimeError) << why;
    }
    return Answer<Result>::of(values...);
  }
};

template <class F>
int call(const char* text, F function, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  TVM_FFI_SAFE_CALL_BEGIN();
  using Info = tvm::ffi::detail::FunctionInfo<F>;
  std::string name = text;
  tvm::ffi::detail::unpack_call<typename Info::RetType>(
      std::make_index_sequence<Info::num_args>{}, &name, function, reinterpret_cast<const tvm::ffi::AnyView*>(args),
      count, reinterpret_cast<tvm::ffi::Any*>(result));
  TVM_FFI_SAFE_CALL_END();
}

}  // namespace stand_in

#define STAND_IN(symbol, name, ...)                                                                    \
  extern "C" TVM_FFI_DLL_EXPORT int symbol(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) { \
    return stand_in::call(name, stand_in::Recorder<__VA_ARGS__>{name}, args, count, result);                 \
  }

inline stand_in::String Recorded(int64_t) {
  std::string text = "[";
  for (const auto& call : stand_in::calls()) text += (text.size() > 1 ? "," : "") + call;
  stand_in::calls().clear();
  return stand_in::String(text + "]");
}

inline void FailNext(stand_in::String why) { stand_in::failure() = why; }

TVM_FFI_DLL_EXPORT_TYPED_FUNC(recorded, Recorded)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fail_next, FailNext)
