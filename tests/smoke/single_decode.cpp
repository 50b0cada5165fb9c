// Single decode.
#include "attention.h"

using namespace computing;

static void Run(TensorView q, TensorView k, TensorView v, TensorView, TensorView out, Optional<TensorView> lse,
                int64_t layout, int64_t window, Optional<Tensor> slopes, double cap, double scale, double rope_scale,
                double rope_theta) {
  Options o{0, window, cap, scale, rope_scale, rope_theta};
  o.slopes = numbers(slopes);
  Keys keys = ragged(k, v, layout, 0, k.size(layout ? 1 : 0));
  attend(Numbers(q), 0, 1, 0, q.size(0), k.size(layout ? 0 : 1), q.size(1), q.size(1), keys, o, Numbers(out), sums(lse));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run)
