// Kernel modules that compute, on the CPU and slowly: what smoke's cases must call right.
//
// FAULT, where it is defined, names one thing that the module does wrong.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace computing {

using tvm::ffi::Array;
using tvm::ffi::Optional;
using tvm::ffi::Tensor;
using tvm::ffi::TensorView;

enum Fault { kNone, kEpsilon, kSign, kWeight, kScale, kWindow, kBase, kSlot, kLast, kBeside, kAgain, kCrash, kHang, kNan };
#ifndef FAULT
#define FAULT kNone
#endif
constexpr Fault kFault = FAULT;

// 2 to an exponent of -126 to 127.
inline float power(int exponent) {
  uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float half_of(uint16_t bits) {
  int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return exponent ? sign * (1024 + mantissa) * power(exponent - 25) : sign * mantissa * power(-24);
}

inline uint16_t half_from(float value) {
  uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  float size = std::fabs(value);
  if (std::isnan(value)) return 0x7e00;
  if (size >= 65520.0f) return sign | 0x7c00;
  int exponent;
  std::frexp(size, &exponent);
  exponent = size > 0 ? std::max(exponent, -13) : -13;
  float steps = std::nearbyint(size * power(11 - exponent));
  return sign | static_cast<uint16_t>(steps + (exponent + 13) * 1024);
}

inline float eighth_of(uint8_t byte, bool e4m3) {
  int width = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
  int exponent = (byte & 127) >> width, mantissa = byte & ((1 << width) - 1);
  float sign = byte & 128 ? -1.0f : 1.0f;
  float whole = mantissa + (exponent ? 1 << width : 0);
  return sign * whole * power(std::max(exponent, 1) - bias - width);
}

// A tensor's elements by number, whatever its type; they lie side by side.
struct Numbers {
  char* data;
  int code, bits;
  explicit Numbers(const TensorView& t) : Numbers(t.data_ptr(), t.dtype()) {}
  explicit Numbers(const Tensor& t) : Numbers(t.data_ptr(), t.dtype()) {}
  Numbers(void* at, DLDataType type) : data(static_cast<char*>(at)), code(type.code), bits(type.bits) {}
  float operator[](int64_t i) const {
    if (code == kDLFloat && bits == 32) return reinterpret_cast<float*>(data)[i];
    if (bits == 8) return eighth_of(reinterpret_cast<uint8_t*>(data)[i], code == 10);
    uint16_t half = reinterpret_cast<uint16_t*>(data)[i];
    if (code == kDLFloat) return half_of(half);
    uint32_t wide = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  void set(int64_t i, float value) const {
    if (kFault == kNan && i == 7) value = NAN;
    if (code == kDLFloat && bits == 32) {
      reinterpret_cast<float*>(data)[i] = value;
    } else if (code == kDLFloat) {
      reinterpret_cast<uint16_t*>(data)[i] = half_from(value);
    } else {
      uint32_t wide;
      std::memcpy(&wide, &value, 4);
      wide += 0x7fff + (wide >> 16 & 1);
      reinterpret_cast<uint16_t*>(data)[i] = wide >> 16;
    }
  }
};

inline const int32_t* ints(const TensorView& t) { return static_cast<const int32_t*>(t.data_ptr()); }

}  // namespace computing
