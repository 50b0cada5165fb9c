// The module `norm`.
#include <csignal>
#include <unistd.h>

#include "computing.h"

using namespace computing;

static void Normalise(const Numbers& out, const Numbers& x, const Numbers& weight, int64_t rows, int64_t hidden,
                      double eps, float shift) {
  if (kFault == kCrash) std::raise(SIGSEGV);
  if (kFault == kHang) sleep(600);
  static int calls = 0;
  ++calls;
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (int64_t i = 0; i < hidden; ++i) squares += double(x[row * hidden + i]) * x[row * hidden + i];
    double root = std::sqrt(squares / hidden + (kFault == kEpsilon ? 1e-6 : eps));
    for (int64_t i = 0; i < hidden; ++i) {
      double value = x[row * hidden + i] / root * (weight[i % (kFault == kWeight ? hidden - 1 : hidden)] + shift);
      if (kFault == kAgain && calls % 2 == 0 && i == 1) value *= 1.002;
      out.set(row * hidden + i, kFault == kSign && i == hidden - 1 ? -value : value);
    }
  }
  if (kFault == kBeside) out.set(rows * hidden, 1.0f);
}

static int64_t Rows(const TensorView& t) {
  int64_t rows = 1;
  for (int axis = 0; axis + 1 < t.ndim(); ++axis) rows *= t.size(axis);
  return rows;
}

static void RmsNorm(TensorView out, TensorView x, TensorView weight, double eps, bool) {
  Normalise(Numbers(out), Numbers(x), Numbers(weight), Rows(x), weight.size(0), eps, 0);
}

static void GemmaRmsNorm(TensorView out, TensorView x, TensorView weight, double eps, bool) {
  Normalise(Numbers(out), Numbers(x), Numbers(weight), Rows(x), weight.size(0), eps, 1);
}

static void Added(const TensorView& x, const TensorView& residual, const TensorView& weight, double eps, float shift) {
  Numbers sum(residual), out(x);
  for (int64_t i = 0; i < Rows(x) * weight.size(0); ++i) sum.set(i, sum[i] + out[i]);
  Normalise(out, sum, Numbers(weight), Rows(x), weight.size(0), eps, shift);
}

static void FusedAdd(TensorView x, TensorView residual, TensorView weight, double eps, bool) {
  Added(x, residual, weight, eps, 0);
}

static void GemmaFusedAdd(TensorView x, TensorView residual, TensorView weight, double eps, bool) {
  Added(x, residual, weight, eps, 1);
}

static void LayerNorm(Tensor out, Tensor x, Tensor gamma, Tensor beta, double eps) {
  Numbers to(out), from(x), scale(gamma), shift(beta);
  int64_t hidden = gamma.size(0), rows = x.size(0);
  for (int64_t row = 0; row < rows; ++row) {
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < hidden; ++i) mean += from[row * hidden + i] / double(hidden);
    for (int64_t i = 0; i < hidden; ++i) squares += std::pow(from[row * hidden + i] - mean, 2);
    double root = std::sqrt(squares / hidden + (kFault == kEpsilon ? 1e-6 : eps));
    for (int64_t i = 0; i < hidden; ++i) {
      to.set(row * hidden + i, (from[row * hidden + i] - mean) / root * scale[i] + shift[i]);
    }
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rmsnorm, RmsNorm)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemma_rmsnorm, GemmaRmsNorm)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fused_add_rmsnorm, FusedAdd)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemma_fused_add_rmsnorm, GemmaFusedAdd)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(layernorm, LayerNorm)
