"""The runtime: what it loads, when, how often, and what it says of what it cannot."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from kernel_depot.bundle import ArtifactKind, Bundle, BundleArtifact, BundleWheel
from kernel_depot.digest import sha256_bytes
from kernel_depot.kernels import runtime as runtimes
from kernel_depot.kernels.errors import (
    FunctionMissing,
    InvalidArgument,
    ModuleMissing,
    ModuleUnloadable,
    NoCodeForGpu,
    RuntimeIncompatible,
    SignatureMismatch,
)
from kernel_depot.kernels.memory import CPU, CUDA, Device
from kernel_depot.kernels.runtime import (
    KernelFile,
    Runtime,
    default_runtime,
    read_release,
    set_default_runtime,
)
from kernel_depot.kernels.signatures import Sent
from kernel_depot.platform import Arch, CudaTag, Platform, Sm
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.errors import CacheEmpty

RMSNORM = (Sent.TENSOR, Sent.TENSOR, Sent.TENSOR, Sent.FLOAT, Sent.BOOL)


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.6.3", (0, 6, 3)),
        ("0.6.3+cu130.sm90", (0, 6, 3)),
        ("0.6.10", (0, 6, 10)),
        ("0.7.4rc1", (0, 7, 4)),
        ("1!2.0", (2, 0)),
        ("unknown", ()),
    ],
)
def test_a_release_is_the_public_versions_numbers(version: str, release: tuple[int, ...]) -> None:
    assert read_release(version) == release


def test_a_directory_holds_modules_by_their_own_name_alone(stand_ins: Any) -> None:
    stand_ins.add("norm", "norm", (0, 6, 3))
    other = stand_ins.directory / "page"
    other.mkdir()
    shutil.copy(stand_ins.directory / "norm/norm.so", other / "else.so")
    (stand_ins.directory / "notes.txt").touch()
    assert list(stand_ins.runtime((0, 6, 3)).files) == ["norm"]


def test_a_module_is_loaded_from_a_blob_whose_name_has_no_suffix(stand_ins: Any, tmp_path: Path) -> None:
    stand_ins.add("norm", "norm", (0, 6, 3))
    blob = tmp_path / ("0" * 64)
    shutil.copy(stand_ins.directory / "norm/norm.so", blob)
    runtime = Runtime({"norm": KernelFile("norm", blob)}, release=(0, 6, 3), where="here")
    assert runtime.module("norm").function("rmsnorm", RMSNORM).name == "norm.rmsnorm"


def test_a_gpus_module_is_not_given_the_hosts_tensors(stand_ins: Any) -> None:
    stand_ins.add("norm", "norm", (0, 6, 3))
    path = stand_ins.directory / "norm/norm.so"
    file = KernelFile("norm", path, sms=("sm_90a",))
    runtime = Runtime({"norm": file}, release=(0, 6, 3), where="here")
    runtime.module("norm")
    with pytest.raises(InvalidArgument) as caught:
        runtime.module("norm", device=Device(CPU))
    assert caught.value.found == "cpu"


def test_a_module_is_loaded_once_when_it_is_first_asked_for(
    stand_ins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins.add("norm", "norm", (0, 6, 3))
    stand_ins.add("page", "page", (0, 6, 3))
    runtime = stand_ins.runtime((0, 6, 3))
    loads: list[str] = []
    load = runtimes._load
    monkeypatch.setattr(runtimes, "_load", lambda file: loads.append(file.uri) or load(file))
    assert loads == []
    barrier = Barrier(8)

    def ask() -> object:
        barrier.wait()
        return runtime.module("norm")

    with ThreadPoolExecutor(8) as pool:
        found = {id(one.result()) for one in [pool.submit(ask) for _ in range(8)]}
    assert len(found) == 1
    assert loads == ["norm"]


def test_a_function_is_asked_for_its_signature_once(stand_ins: Any) -> None:
    stand_ins.add("norm", "norm", (0, 6, 3))
    module = stand_ins.runtime((0, 6, 3)).module("norm")
    assert module.function("rmsnorm", RMSNORM) is module.function("rmsnorm", RMSNORM)
    with pytest.raises(SignatureMismatch) as caught:
        module.function("rmsnorm", RMSNORM[:-1])
    assert "rmsnorm(tensor, tensor, tensor, float)" in str(caught.value.expected)
    assert "rmsnorm(DLTensor*, DLTensor*, DLTensor*, float, bool) -> void" in str(caught.value.found)
    with pytest.raises(FunctionMissing) as missing:
        module.function("softmax", RMSNORM)
    assert missing.value.expected == "softmax"
    assert module.has("rmsnorm")
    assert not module.has("softmax")
    assert stand_ins.calls("norm") == []


def test_a_missing_module_is_named_with_those_most_like_it_and_a_way_to_it(stand_ins: Any) -> None:
    for uri in ("norm", "page", "fused_moe_90"):
        stand_ins.add(uri, "norm", (0, 6, 3))
    runtime = stand_ins.runtime((0, 6, 3))
    with pytest.raises(ModuleMissing) as caught:
        runtime.module("fused_moe_100")
    assert caught.value.data["nearest"][0] == "fused_moe_90"
    for way in ("kernel-depot sync", "--group", "kernel-depot build"):
        assert way in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("sms", "ptx", "sm", "runs"),
    [
        (("sm90a",), (), Sm(9, 0), True),
        (("sm90a",), (), Sm(10, 0), False),
        (("sm80",), (), Sm(8, 9), True),
        (("sm80",), (), Sm(9, 0), False),
        (("sm80",), ("sm80",), Sm(9, 0), True),
        (("sm120f",), (), Sm(12, 1), True),
        ((), (), Sm(9, 0), True),
        (None, (), Sm(9, 0), True),
    ],
)
def test_a_module_without_code_for_the_gpu_is_refused_before_it_is_loaded(
    stand_ins: Any,
    monkeypatch: pytest.MonkeyPatch,
    sms: tuple[str, ...] | None,
    ptx: tuple[str, ...],
    sm: Sm,
    runs: bool,
) -> None:
    stand_ins.add("norm", "norm", (0, 6, 3))
    path = stand_ins.directory / "norm/norm.so"
    runtime = Runtime({"norm": KernelFile("norm", path, sms, ptx)}, release=(0, 6, 3), where="here")
    monkeypatch.setattr(runtimes, "device_sm", lambda device: sm)
    if runs:
        assert runtime.module("norm", device=Device(CUDA)).file.path == path
        return
    monkeypatch.setattr(runtimes, "_load", lambda file: pytest.fail("it was loaded"))
    with pytest.raises(NoCodeForGpu) as caught:
        runtime.module("norm", device=Device(CUDA))
    assert caught.value.expected == str(sm)
    assert sms is not None
    assert sms[0] in str(caught.value.found)


@pytest.mark.parametrize("content", [b"", b"\x7fELF but nothing more", b"no library"])
def test_a_file_that_is_no_library_is_said_to_be_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "norm.so"
    path.write_bytes(content)
    runtime = Runtime({"norm": KernelFile("norm", path)}, release=(0, 6, 3), where="here")
    with pytest.raises(ModuleUnloadable) as caught:
        runtime.module("norm")
    assert caught.value.where == str(path)


@pytest.mark.parametrize("installed", ["0.2.0", "1.1.3", None])
def test_another_tvm_ffi_is_refused_with_both_versions(
    stand_ins: Any, monkeypatch: pytest.MonkeyPatch, installed: str | None
) -> None:
    stand_ins.add("norm", "norm", (0, 6, 3))

    def version(name: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(RuntimeIncompatible) as caught:
        stand_ins.runtime((0, 6, 3))
    assert caught.value.found == (installed or "none")
    assert "0.1" in str(caught.value.expected)
    assert "install" in str(caught.value.remedy)


def test_without_a_bundle_there_is_no_runtime(tmp_path: Path) -> None:
    with pytest.raises(CacheEmpty, match="kernel-depot sync"):
        Runtime.open(tmp_path)


def test_the_default_runtime_is_the_one_that_was_set(stand_ins: Any) -> None:
    stand_ins.add("norm", "norm", (0, 6, 3))
    runtime = stand_ins.runtime((0, 6, 3))
    set_default_runtime(runtime)
    try:
        assert default_runtime() is runtime
    finally:
        set_default_runtime(None)


@pytest.mark.parametrize(("version", "fits"), [("0.6.3", True), ("0.6.30", False), ("0.7.4", False)])
def test_headers_come_with_the_bundle_if_they_are_of_the_modules_release(
    tmp_path: Path, version: str, fits: bool
) -> None:
    path = "flashinfer/data/csrc/nv_internal/tensorrt_llm/deep_gemm/fp8_gemm_impl.cuh"
    text = b"// a header"
    wheels = (
        BundleWheel("flashinfer_jit_cache", "0.6.3+cu130.sm90", "a.whl", "0" * 64, 1, "cu130"),
        BundleWheel("flashinfer_python", version, "b.whl", "1" * 64, 1, "cu130"),
    )
    header = BundleArtifact(path, ArtifactKind.SUPPORT, sha256_bytes(text), len(text), "1" * 64)
    bundle = Bundle((), Platform(CudaTag(13, 0), Arch.X86_64, None), wheels, (header,))
    manifest = json.dumps(bundle.to_json(), sort_keys=True, separators=(",", ":")).encode()
    digest = sha256_bytes(manifest)
    cache = Cache(tmp_path)
    cache.prepare()
    laid = cache.view_dir(digest) / "files" / path
    laid.parent.mkdir(parents=True)
    laid.write_bytes(text)
    with cache.private() as private:
        cache.write_bundle(digest, manifest, private=private)
        cache.switch(digest, private=private)
    found = Runtime.open(tmp_path).headers
    assert found == ((laid.parents[1],) if fits else ())
