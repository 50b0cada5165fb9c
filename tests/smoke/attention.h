// Attention of one request, and where its keys lie.
#pragma once

#include "computing.h"

namespace computing {

struct Options {
  int64_t mask, window;
  double cap, scale, rope_scale = 1, rope_theta = 1;
  int posenc = 0;
  const uint8_t* bits = nullptr;  // of this request's custom mask
  const float* slopes = nullptr;
};

#ifndef POSENC
#define POSENC 0
#endif

// Elements of q, keys and values start at these numbers; `key(i)` is where the i-th key's heads start.
struct Keys {
  Numbers k, v;
  std::vector<int64_t> at_k, at_v;  // of each key, its first head
  int64_t head_k, head_v;           // from head to head
};

inline double turned(const Numbers& x, int64_t at, int64_t dim, int64_t i, double position, const Options& o) {
  if (POSENC != 1) return x[at + i];
  int64_t half = dim / 2, pair = i % half;
  double angle = position * o.rope_scale * std::pow(o.rope_theta, double(pair) / half);
  double first = x[at + pair], second = x[at + pair + half];
  return i < half ? first * std::cos(angle) - second * std::sin(angle) : second * std::cos(angle) + first * std::sin(angle);
}

// lse_base: 2, or the natural one.
inline void attend(const Numbers& q, int64_t row, int64_t rows, int64_t first_row, int64_t heads, int64_t kv_heads,
                   int64_t dim, int64_t dim_v, const Keys& keys, const Options& o, const Numbers& out, float* lse) {
  int64_t count = keys.at_k.size(), at = row + count - rows;
  for (int64_t h = 0; h < heads; ++h) {
    int64_t kv = h / (heads / kv_heads), from = ((first_row + row) * heads + h) * dim;
    std::vector<double> query(dim), logits(count, -INFINITY);
    for (int64_t i = 0; i < dim; ++i) query[i] = turned(q, from, dim, i, at, o);
    double top = -INFINITY, total = 0;
    for (int64_t key = 0; key < count; ++key) {
      bool seen = o.mask != 1 || key <= at;
      if (o.mask == 2) seen = o.bits[(row * count + key) / 8] >> ((row * count + key) % 8) & 1;
      int64_t window = o.window + (kFault == kWindow ? 1 : 0);
      if (o.window >= 0 && key < at - window) seen = false;
      if (!seen) continue;
      double dot = 0;
      for (int64_t i = 0; i < dim; ++i) dot += query[i] * turned(keys.k, keys.at_k[key] + kv * keys.head_k, dim, i, key, o);
      dot *= o.scale * (kFault == kScale ? 1.02 : 1);
      if (o.slopes) dot += o.slopes[h] * (key - row);
      if (o.cap > 0) dot = o.cap * std::tanh(dot / o.cap);
      logits[key] = dot;
      top = std::max(top, dot);
    }
    std::vector<double> sum(dim_v, 0);
    for (int64_t key = 0; key < count; ++key) {
      if (std::isinf(logits[key])) continue;
      double weight = std::exp(logits[key] - top);
      total += weight;
      int64_t from_v = keys.at_v[key] + kv * keys.head_v;
      for (int64_t i = 0; i < dim_v; ++i) sum[i] += weight * keys.v[from_v + i];
    }
    for (int64_t i = 0; i < dim_v; ++i) out.set(((first_row + row) * heads + h) * dim_v + i, sum[i] / total);
    if (lse) lse[(first_row + row) * heads + h] = (top + std::log(total)) / (kFault == kBase ? 1 : std::log(2.0));
  }
}

// The keys of a ragged tensor's tokens start..end.
inline Keys ragged(const TensorView& k, const TensorView& v, int64_t layout, int64_t start, int64_t end) {
  Keys keys{Numbers(k), Numbers(v), {}, {}, 0, 0};
  int64_t tokens = k.size(layout ? 1 : 0), heads = k.size(layout ? 0 : 1), dk = k.size(2), dv = v.size(2);
  keys.head_k = layout ? tokens * dk : dk;
  keys.head_v = layout ? tokens * dv : dv;
  for (int64_t i = start; i < end; ++i) {
    keys.at_k.push_back(i * (layout ? dk : heads * dk));
    keys.at_v.push_back(i * (layout ? dv : heads * dv));
  }
  return keys;
}

// The keys of one request in a paged cache.
inline Keys paged(const TensorView& k, const TensorView& v, int64_t layout, const int32_t* indptr,
                  const int32_t* indices, int64_t last, int64_t request) {
  Keys keys{Numbers(k), Numbers(v), {}, {}, 0, 0};
  int64_t size = k.size(layout ? 2 : 1), heads = k.size(layout ? 1 : 2), dk = k.size(3), dv = v.size(3);
  int64_t pages = indptr[request + 1] - indptr[request], count = pages ? (pages - 1) * size + last : 0;
  keys.head_k = layout ? size * dk : dk;
  keys.head_v = layout ? size * dv : dv;
  for (int64_t i = 0; i < count - (kFault == kLast && count > 20 ? 1 : 0); ++i) {
    int64_t page = indices[indptr[request] + i / size], slot = i % size;
    keys.at_k.push_back(page * size * heads * dk + slot * (layout ? dk : heads * dk));
    keys.at_v.push_back(page * size * heads * dv + slot * (layout ? dv : heads * dv));
  }
  return keys;
}

inline float* sums(const Optional<TensorView>& lse) {
  return lse.has_value() ? static_cast<float*>(lse.value().data_ptr()) : nullptr;
}

inline const float* numbers(const Optional<Tensor>& t) {
  return t.has_value() ? static_cast<const float*>(t.value().data_ptr()) : nullptr;
}

}  // namespace computing
