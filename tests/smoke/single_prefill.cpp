// Single prefill as 0.6.3 has it.
#include "attention.h"

using namespace computing;

static void Run(TensorView q, TensorView k, TensorView v, TensorView, TensorView out, Optional<TensorView> lse,
                int64_t mask, int64_t layout, int64_t window, Optional<Tensor> custom, Optional<Tensor> slopes,
                double cap, double scale, double rope_scale, double rope_theta) {
  Options o{mask, window, cap, scale, rope_scale, rope_theta};
  o.slopes = numbers(slopes);
  if (custom.has_value()) o.bits = static_cast<const uint8_t*>(custom.value().data_ptr());
  Keys keys = ragged(k, v, layout, 0, k.size(layout ? 1 : 0));
  for (int64_t row = 0; row < q.size(0); ++row) {
    attend(Numbers(q), row, q.size(0), 0, q.size(1), k.size(layout ? 0 : 1), q.size(2), v.size(2), keys, o, Numbers(out),
           sums(lse));
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run)
