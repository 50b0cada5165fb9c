// The module `page`.
#include "computing.h"

using namespace computing;

// Copy each token's heads into its slot; `head` and `slot` are the strides of a cache, in elements.
static void Append(const TensorView& from, const TensorView& to, const TensorView& requests, const TensorView& positions,
                   const TensorView& indices, const TensorView& indptr, int64_t page_size, int64_t heads, int64_t dim,
                   int64_t head, int64_t slot) {
  int64_t size = (from.dtype().bits + 7) / 8;
  for (int64_t token = 0; token < from.size(0); ++token) {
    int64_t position = ints(positions)[token] + (kFault == kSlot && token == 1 ? 1 : 0);
    int64_t page = ints(indices)[ints(indptr)[ints(requests)[token]] + position / page_size];
    for (int64_t h = 0; h < heads; ++h) {
      int64_t target = page * page_size * heads * dim + position % page_size * slot + h * head;
      std::memcpy(static_cast<char*>(to.data_ptr()) + target * size,
                  static_cast<char*>(from.data_ptr()) + (token * heads + h) * dim * size,
                  (kFault == kLast ? dim - 1 : dim) * size);
    }
  }
}

static void AppendKv(TensorView key, TensorView value, TensorView requests, TensorView positions, TensorView k_cache,
                     TensorView v_cache, TensorView indices, TensorView indptr, TensorView, int64_t layout) {
  int64_t heads = key.size(1), dim = key.size(2), page_size = k_cache.size(layout ? 2 : 1);
  int64_t head = layout ? page_size * dim : dim, slot = layout ? dim : heads * dim;
  Append(key, k_cache, requests, positions, indices, indptr, page_size, heads, dim, head, slot);
  Append(value, v_cache, requests, positions, indices, indptr, page_size, heads, dim, head, slot);
}

static void AppendMla(TensorView ckv, TensorView kpe, TensorView requests, TensorView positions, TensorView ckv_cache,
                      TensorView kpe_cache, TensorView indices, TensorView indptr, TensorView) {
  int64_t size = ckv_cache.size(1);
  Append(ckv, ckv_cache, requests, positions, indices, indptr, size, 1, ckv.size(1), 0, ckv.size(1));
  Append(kpe, kpe_cache, requests, positions, indices, indptr, size, 1, kpe.size(1), 0, kpe.size(1));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(append_paged_kv_cache, AppendKv)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(append_paged_mla_kv_cache, AppendMla)
