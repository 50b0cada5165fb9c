"""Which paths are artifacts."""

from __future__ import annotations

import pytest

from kernel_depot.bundle import ArtifactKind
from kernel_depot.wheels.kinds import classify, is_compiled_by


@pytest.mark.parametrize(
    ("path", "kind", "module"),
    [
        ("flashinfer_jit_cache/jit_cache/norm/norm.so", ArtifactKind.MODULE, "norm"),
        ("flashinfer_jit_cache_sm90a/jit_cache/page/page.so", ArtifactKind.MODULE, "page"),
        ("flashinfer_jit_cache/providers/sm120f/jit_cache/page/page.so", ArtifactKind.MODULE, "page"),
        ("flashinfer_jit_cache/jit_cache/norm/other.so", None, None),
        ("flashinfer_jit_cache/jit_cache/norm.so", None, None),
        ("other/jit_cache/norm/norm.so", None, None),
        ("tvm_ffi/lib/libtvm_ffi.so", ArtifactKind.TVM_FFI, None),
        ("a-1.data/purelib/tvm_ffi/lib/libtvm_ffi.so", ArtifactKind.TVM_FFI, None),
        ("tvm_ffi/lib/libtvm_ffi_testing.so", None, None),
        ("tvm_ffi/core.abi3.so", None, None),
        ("flashinfer_cubin/cubins/ab/fmha/x.cubin", ArtifactKind.CUBIN, None),
        ("flashinfer_cubin/cubins/ab/fmha/x.cubin.lock", None, None),
        ("flashinfer_cubin/cubins/ab/fmha/checksums.txt", ArtifactKind.SUPPORT, None),
        ("flashinfer_cubin/cubins/ab/gemm/include/flashinferMetaInfo.h", ArtifactKind.SUPPORT, None),
        ("flashinfer_cubin/__init__.py", ArtifactKind.SUPPORT, None),
        ("flashinfer_cubin/_build_meta.py", ArtifactKind.SUPPORT, None),
        (
            "flashinfer/data/csrc/nv_internal/tensorrt_llm/deep_gemm/fp8_gemm_impl.cuh",
            ArtifactKind.SUPPORT,
            None,
        ),
        ("flashinfer/data/csrc/nv_internal/tensorrt_llm/kernels/quantization.cuh", None, None),
        ("flashinfer/deep_gemm.py", None, None),
        ("tvm_ffi/include/tvm/ffi/c_api.h", None, None),
        ("flashinfer_cubin-0.6.3.dist-info/METADATA", ArtifactKind.METADATA, None),
        ("a-1.dist-info/licenses/LICENSE", ArtifactKind.METADATA, None),
        ("a/b-1.dist-info/METADATA", None, None),
        ("a-1.data/scripts/tool", None, None),
    ],
)
def test_classify(path: str, kind: ArtifactKind | None, module: str | None) -> None:
    assert classify(path) == (kind, module)


def test_fused_moe_alone_needs_the_headers() -> None:
    header = "flashinfer/data/csrc/nv_internal/tensorrt_llm/deep_gemm/utils.cuh"
    assert is_compiled_by(header, "fused_moe_90")
    assert not is_compiled_by(header, "norm")
    assert not is_compiled_by("flashinfer_jit_cache/jit_cache/norm/norm.so", "fused_moe_90")
