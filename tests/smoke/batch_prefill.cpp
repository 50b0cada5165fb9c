// Batch prefill as 0.6.3 has it, ragged and paged. The plan says only that there is one.
#include "attention.h"

using namespace computing;

static Array<int64_t> Plan(TensorView, TensorView, TensorView, TensorView, TensorView, TensorView, int64_t, int64_t,
                           int64_t, int64_t, int64_t, bool, int64_t, int64_t, bool, int64_t, int64_t, bool, int64_t) {
  return {1};
}

static void Requests(const TensorView& q, const TensorView& qo_indptr, int64_t kv_heads, int64_t dim_v, Options o,
                     const Optional<Tensor>& custom, const Optional<Tensor>& starts, const TensorView& out,
                     const Optional<TensorView>& lse, const std::vector<Keys>& keys) {
  for (size_t request = 0; request < keys.size(); ++request) {
    int64_t first = ints(qo_indptr)[request], rows = ints(qo_indptr)[request + 1] - first;
    if (custom.has_value()) {
      o.bits = static_cast<const uint8_t*>(custom.value().data_ptr()) +
               static_cast<const int32_t*>(starts.value().data_ptr())[request];
    }
    for (int64_t row = 0; row < rows; ++row) {
      attend(Numbers(q), row, rows, first, q.size(1), kv_heads, q.size(2), dim_v, keys[request], o, Numbers(out),
             sums(lse));
    }
  }
}

static void Ragged(TensorView, TensorView, Array<int64_t>, TensorView q, TensorView k, TensorView v, TensorView qo_indptr,
                   TensorView kv_indptr, TensorView out, Optional<TensorView> lse, int64_t mask, int64_t layout,
                   int64_t window, bool, Optional<Tensor> custom, Optional<Tensor> starts, Optional<Tensor> slopes,
                   Optional<Tensor>, Optional<Tensor>, Optional<Tensor>, double cap, double scale, double rope_scale,
                   double rope_theta, int64_t) {
  Options o{mask, window, cap, scale, rope_scale, rope_theta};
  o.slopes = numbers(slopes);
  std::vector<Keys> keys;
  for (int64_t i = 0; i + 1 < kv_indptr.size(0); ++i) {
    keys.push_back(ragged(k, v, layout, ints(kv_indptr)[i], ints(kv_indptr)[i + 1]));
  }
  Requests(q, qo_indptr, k.size(layout ? 0 : 1), v.size(2), o, custom, starts, out, lse, keys);
}

static void Paged(TensorView, TensorView, Array<int64_t>, TensorView q, TensorView k, TensorView v, TensorView qo_indptr,
                  TensorView kv_indptr, TensorView indices, TensorView last, TensorView out, Optional<TensorView> lse,
                  int64_t mask, int64_t layout, int64_t window, bool, Optional<Tensor> custom, Optional<Tensor> starts,
                  Optional<Tensor> slopes, Optional<Tensor>, Optional<Tensor>, Optional<Tensor>, double cap, double scale,
                  double rope_scale, double rope_theta, int64_t) {
  Options o{mask, window, cap, scale, rope_scale, rope_theta};
  o.slopes = numbers(slopes);
  std::vector<Keys> keys;
  for (int64_t i = 0; i < last.size(0); ++i) {
    keys.push_back(paged(k, v, layout, ints(kv_indptr), ints(indices), ints(last)[i], i));
  }
  Requests(q, qo_indptr, k.size(layout ? 1 : 2), v.size(3), o, custom, starts, out, lse, keys);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, Plan)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(ragged_run, Ragged)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_run, Paged)
