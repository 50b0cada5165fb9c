"""Which members of a wheel are artifacts. Everything else is verified and recorded, but not kept."""

from __future__ import annotations

import re

from kernel_depot.bundle import ArtifactKind

# A monolithic wheel has one jit_cache directory, a provider wheel one in a package of its own.
_MODULE = re.compile(r"flashinfer_jit_cache\w*/(?:[^/]+/)*jit_cache/(?P<uri>[^/]+)/(?P=uri)\.so")
_DATA = re.compile(r"[^/]+\.data/(?:purelib|platlib)/")
_METADATA = re.compile(r"[^/]+\.dist-info/")
# What flashinfer's loader opens beside the cubins; the `.lock` files next to them it makes itself.
_SUPPORT = re.compile(
    r"flashinfer_cubin/(?:__init__\.py|_build_meta\.py|cubins/(?:[^/]+/)*(?:checksums\.txt|[^/]+\.h))"
)
# What fused MoE's DeepSeek kernels are compiled from when they run; only the source's wheel has it.
_HEADER = re.compile(r"flashinfer/data/csrc/nv_internal/tensorrt_llm/deep_gemm/[^/]+\.cuh")


def classify(path: str) -> tuple[ArtifactKind | None, str | None]:
    """Return what the member at `path` is, and the module's URI when it is one.

    A file under `*.data/purelib/` or `*.data/platlib/` is what it is where it would be installed (PEP 427).
    """
    if path.endswith(".cubin"):
        return ArtifactKind.CUBIN, None
    if path.endswith(".lock"):
        return None, None
    if _METADATA.match(path):
        return ArtifactKind.METADATA, None
    installed = path[match.end() :] if (match := _DATA.match(path)) else path
    if installed.endswith("/libtvm_ffi.so"):
        return ArtifactKind.TVM_FFI, None
    if match := _MODULE.fullmatch(installed):
        return ArtifactKind.MODULE, match["uri"]
    if _SUPPORT.fullmatch(installed) or _HEADER.fullmatch(installed):
        return ArtifactKind.SUPPORT, None
    return None, None


def is_compiled_by(path: str, module: str) -> bool:
    """Tell whether a module compiles the file at `path` when it runs, and so cannot do without it."""
    return module.startswith("fused_moe_") and _HEADER.search(path) is not None
