// Batch decode. The plan says only that there is one.
#include "attention.h"

using namespace computing;

static Array<int64_t> Plan(TensorView, TensorView, TensorView, TensorView, int64_t, int64_t, int64_t, int64_t, bool, int64_t,
                           double, int64_t, int64_t, TensorView, TensorView) {
  return {1};
}

static void Run(TensorView, TensorView, Array<int64_t>, TensorView q, TensorView k, TensorView v, TensorView indptr,
                TensorView indices, TensorView last, TensorView out, Optional<TensorView> lse, int64_t layout,
                int64_t window, bool, Optional<Tensor> slopes, double cap, double scale, double rope_scale,
                double rope_theta) {
  Options o{0, window, cap, scale, rope_scale, rope_theta};
  o.slopes = numbers(slopes);
  for (int64_t i = 0; i < last.size(0); ++i) {
    Keys keys = paged(k, v, layout, ints(indptr), ints(indices), ints(last)[i], i);
    attend(Numbers(q), 0, 1, i, q.size(1), k.size(layout ? 1 : 2), q.size(2), q.size(2), keys, o, Numbers(out), sums(lse));
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, Plan)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run)
