// Stand-ins of the fused MoE modules: `init` makes a runner, whose `run_moe` writes down its call.
#pragma once

#include <tvm/ffi/extra/module.h>

#include "recorder.h"

namespace stand_in {

using tvm::ffi::Function;
using tvm::ffi::Module;
using tvm::ffi::ModuleObj;

inline int64_t& runners() {
  static int64_t count = 0;
  return count;
}

template <class... A>
void write_down(const std::string& name, const A&... values) {
  std::string text;
  ((text += (text.empty() ? "" : ",") + told(values)), ...);
  auto stream = reinterpret_cast<uintptr_t>(TVMFFIEnvGetStream(kDLCPU, 0));
  calls().push_back("{\"function\":\"" + name + "\",\"stream\":" + std::to_string(stream) + ",\"arguments\":[" +
                    text + "]}");
  if (!failure().empty()) {
    std::string why;
    std::swap(why, failure());
    TVM_FFI_THROW(RuntimeError) << why;
  }
}

// As the real ones do: memory for the call, and given back at its end.
inline void allocate() {
  int64_t shape[2] = {3, 5}, strides[2] = {5, 1};
  DLTensor wanted{nullptr, DLDevice{kDLCPU, 0}, 2, DLDataType{kDLInt, 8, 1}, shape, strides, 0};
  Tensor room = Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, tvm::ffi::ShapeView(shape, 2), wanted.dtype,
                                     wanted.device);
  std::memset(room.data_ptr(), 7, 15);
}

template <class... Run>
class Runner : public ModuleObj {
 public:
  Runner() { ++runners(); }
  ~Runner() { --runners(); }
  const char* kind() const final { return "fused_moe_runner"; }
  Optional<Function> GetFunction(const String& name) final {
    if (name == "run_moe") {
      return Function::FromTyped([this](Run... values) {
        write_down("run_moe", values...);
        allocate();
      });
    }
    if (name == "get_gemm1_tactic_count") return Function::FromTyped([this]() -> int64_t { return 5; });
    if (name == "get_gemm2_tactic_count") return Function::FromTyped([this]() -> int64_t { return 3; });
    return Function(nullptr);
  }
};

}  // namespace stand_in
