// Latent attention as 0.6.3 has it. The plan carries its index arrays, which `run` is not given again.
#include "attention.h"

using namespace computing;

static Array<int64_t> Plan(TensorView, TensorView, TensorView, TensorView qo_indptr, TensorView kv_indptr, TensorView lengths,
                           int64_t, int64_t, bool) {
  std::vector<int64_t> plan{lengths.size(0)};
  for (int64_t i = 0; i <= lengths.size(0); ++i) plan.push_back(ints(qo_indptr)[i]);
  for (int64_t i = 0; i <= lengths.size(0); ++i) plan.push_back(ints(kv_indptr)[i]);
  for (int64_t i = 0; i < lengths.size(0); ++i) plan.push_back(ints(lengths)[i]);
  return Array<int64_t>(plan.begin(), plan.end());
}

static void Run(TensorView, TensorView, Array<int64_t> plan, TensorView q_nope, TensorView q_pe, TensorView ckv, TensorView kpe,
                TensorView indices, TensorView out, Optional<TensorView> lse, int64_t mask, int64_t heads, int64_t page_size,
                double scale, bool) {
  int64_t batch = plan[0], wide = ckv.size(2), narrow = kpe.size(2), dim = wide + narrow;
  Numbers nope(q_nope), pe(q_pe), keys(ckv), turns(kpe);
  for (int64_t request = 0; request < batch; ++request) {
    int64_t first = plan[1 + request], rows = plan[2 + request] - first, pages = plan[2 + batch + request];
    int64_t length = plan[3 + 2 * batch + request] - (kFault == kLast ? 1 : 0);
    std::vector<float> q(rows * heads * dim), k(length * dim);
    for (int64_t i = 0; i < rows * heads; ++i) {
      for (int64_t d = 0; d < dim; ++d) {
        q[i * dim + d] = d < wide ? nope[(first * heads + i) * wide + d] : pe[(first * heads + i) * narrow + d - wide];
      }
    }
    Keys all{Numbers(k.data(), {kDLFloat, 32, 1}), Numbers(k.data(), {kDLFloat, 32, 1}), {}, {}, 0, 0};
    for (int64_t i = 0; i < length; ++i) {
      int64_t slot = ints(indices)[pages + i / page_size] * page_size + i % page_size;
      for (int64_t d = 0; d < dim; ++d) k[i * dim + d] = d < wide ? keys[slot * wide + d] : turns[slot * narrow + d - wide];
      all.at_k.push_back(i * dim);
      all.at_v.push_back(i * dim);
    }
    Options o{mask, -1, 0, scale};
    Numbers to(out);
    to.data += first * heads * wide * 2;
    for (int64_t row = 0; row < rows; ++row) {
      attend(Numbers(q.data(), {kDLFloat, 32, 1}), row, rows, 0, heads, 1, dim, wide, all, o, to,
             sums(lse) ? sums(lse) + first * heads : nullptr);
    }
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, Plan)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run)
