// Gated delta rule prefill as 0.6.3 has it.
#include "computing.h"

using namespace computing;

static void Prefill(TensorView out, TensorView out_state, TensorView q, TensorView k, TensorView v, TensorView bounds,
                    Optional<TensorView> state, Optional<TensorView> alpha, Optional<TensorView> beta, double scale,
                    TensorView) {
  int64_t heads = out.size(1), dim = q.size(2);
  const auto* at = static_cast<const int64_t*>(bounds.data_ptr());
  Numbers to(out), queries(q), keys(k), values(v);
  if (scale == 0) scale = 1 / std::sqrt(double(dim));
  for (int64_t n = 0; n + 1 < bounds.size(0); ++n) {
    for (int64_t h = 0; h < heads; ++h) {
      auto* s = static_cast<float*>(out_state.data_ptr()) + (n * heads + h) * dim * dim;
      for (int64_t i = 0; i < dim * dim; ++i) {
        s[i] = state.has_value() ? static_cast<float*>(state.value().data_ptr())[(n * heads + h) * dim * dim + i] : 0;
      }
      for (int64_t t = at[n]; t < at[n + 1]; ++t) {
        int64_t fq = (t * q.size(1) + h * q.size(1) / heads) * dim, fk = (t * k.size(1) + h * k.size(1) / heads) * dim;
        int64_t fv = (t * v.size(1) + h * v.size(1) / heads) * dim;
        float a = alpha.has_value() ? Numbers(alpha.value())[t * heads + h] : 1;
        float b = beta.has_value() ? Numbers(beta.value())[t * heads + h] : 1;
        if (kFault == kScale) b *= 0.9f;
        std::vector<float> key(dim), query(dim);
        for (int64_t i = 0; i < dim; ++i) key[i] = keys[fk + i], query[i] = queries[fq + i];
        for (int64_t row = 0; row < dim; ++row) {
          double held = 0, sum = 0;
          for (int64_t i = 0; i < dim; ++i) s[row * dim + i] *= a;
          for (int64_t i = 0; i < dim; ++i) held += s[row * dim + i] * key[i];
          for (int64_t i = 0; i < dim; ++i) s[row * dim + i] += b * (values[fv + row] - held) * key[i];
          for (int64_t i = 0; i < dim; ++i) sum += s[row * dim + i] * query[i];
          to.set((t * heads + h) * dim + row, sum * scale);
        }
      }
    }
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gdn_prefill, Prefill)
