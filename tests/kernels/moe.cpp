#include "moe.h"

using namespace stand_in;
using T = TensorView;
using M = Optional<TensorView>;
using S = Optional<Array<Tensor>>;
using P = Optional<Array<int64_t>>;
using I = int64_t;
using B = bool;

using Runner063 = Runner<T, T, T, M, T, M, T, M, S, M, M, M, M, I, I, I, I, I, I, B, B, P, B, I>;
using Runner0618 = Runner<T, T, T, M, T, M, T, M, S, M, M, M, M, B, I, I, I, I, I, I, B, B, P, B, I, M>;
using Runner074 = Runner<T, T, T, M, T, M, T, M, S, M, M, M, M, M, M, M, B, I, I, I, I, I, I, B, B, P, B, I, M, I>;

template <class R, class... A>
Module made(A... values) {
  write_down("init", values...);
  return Module(tvm::ffi::make_object<R>());
}

template <class R>
struct Init7 {
  Module operator()(DLDataType a, DLDataType w, DLDataType o, B d, B g, B m, B p) const {
    return made<R>(a, w, o, d, g, m, p);
  }
};

template <class R>
struct Init9 {
  Module operator()(DLDataType a, DLDataType w, DLDataType o, B d, B g, B m, B p, B f, B h) const {
    return made<R>(a, w, o, d, g, m, p, f, h);
  }
};

struct Headers {
  void operator()(Array<String> dirs) const { write_down("set_deepgemm_jit_include_dirs", dirs); }
};

struct Count {
  int64_t operator()(I) const { return runners(); }
};

#define FUNCTION(symbol, name, type)                                                                      \
  extern "C" TVM_FFI_DLL_EXPORT int symbol(void*, const TVMFFIAny* args, int32_t n, TVMFFIAny* result) {  \
    return stand_in::call(name, type{}, args, n, result);                                                 \
  }

FUNCTION(moe_init_0_6_3, "init", Init7<Runner063>)
FUNCTION(moe_init_0_6_18, "init", Init9<Runner0618>)
FUNCTION(moe_init_0_7_4, "init", Init9<Runner074>)
FUNCTION(moe_headers, "set_deepgemm_jit_include_dirs", Headers)
FUNCTION(moe_runners, "runners", Count)
