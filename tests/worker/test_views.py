from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernel_depot.bundle import BundleArtifact
from kernel_depot.platform import Arch, CudaTag, Platform, Sm
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.environment import environment
from kernel_depot.worker.errors import CacheEmpty, ViewImpossible
from kernel_depot.worker.sync import SyncRequest, sync
from kernel_depot.worker.views import View

PLATFORM = Platform(CudaTag(13, 0), Arch.X86_64, Sm(9, 0))
MODULES = ("norm", "page", "gdn_prefill_sm90", "single_decode")
JIT = {f"flashinfer_jit_cache/jit_cache/{name}/{name}.so": name.encode() * 100 for name in MODULES}
TVM = {"tvm_ffi/lib/libtvm_ffi.so": b"the runtime"}
CUBIN = {
    "flashinfer_cubin/__init__.py": b"from pathlib import Path\n\ndef get_cubin_dir():\n"
    b"    return str(Path(__file__).parent / 'cubins')\n",
    "flashinfer_cubin/cubins/abc/fmha/one.cubin": b"cubin one",
    "flashinfer_cubin-0.6.3.dist-info/METADATA": b"Name: flashinfer-cubin\nVersion: 0.6.3\n",
}
ALL_WHEELS = (
    ("flashinfer_jit_cache", "0.6.3+cu130"),
    ("apache_tvm_ffi", "0.1.3"),
    ("flashinfer_cubin", "0.6.3"),
)


def run(upstream: Any, cache: Cache, **options: Any) -> Any:
    return sync(SyncRequest(**options), endpoint=upstream.endpoint(), platform=PLATFORM, cache=cache)


def python(code: str, *, path: Path) -> Any:
    """Run code in a fresh interpreter that has the view first on its path, and read the JSON it prints."""
    answer = subprocess.run(
        [sys.executable, "-B", "-c", code],
        env={**os.environ, "PYTHONPATH": str(path)},
        check=True,
        capture_output=True,
    )
    return json.loads(answer.stdout)


@pytest.fixture
def synced(upstream: Any, make_bundle: Any, tmp_path: Path) -> Cache:
    upstream.publish(make_bundle(upstream, {**JIT, **TVM, **CUBIN}, wheels=ALL_WHEELS))
    cache = Cache(tmp_path / "cache")
    run(upstream, cache)
    return cache


def test_flashinfer_finds_the_drop_in(synced: Cache) -> None:
    code = """
import importlib.metadata, importlib.util, json, flashinfer_jit_cache as jit
from pathlib import Path
print(json.dumps({
    "version": jit.__version__,
    "distribution": importlib.metadata.version("flashinfer-jit-cache"),
    "norm": (Path(jit.get_jit_cache_dir()) / "norm" / "norm.so").read_text(),
    "found": importlib.util.find_spec("flashinfer_jit_cache") is not None,
    "providers": [vars(provider) for provider in jit.get_jit_cache_providers()],
}))
"""
    found = python(code, path=synced.current / "flashinfer")
    assert found["version"] == found["distribution"] == "0.6.3+cu130"
    assert found["norm"] == "norm" * 100
    (provider,) = found["providers"]
    assert provider["version"] == "0.6.3+cu130"
    assert provider["distribution"] == "flashinfer-jit-cache"
    assert provider["modules"] == sorted(MODULES)
    assert provider["cuda_architectures"] == ["sm90a"]
    assert all(re.fullmatch(r"sm\d{1,2}\d[af]?", name) for name in provider["cuda_architectures"])
    for name in MODULES:
        assert Path(provider["jit_cache_dir"], name, f"{name}.so").read_bytes() == name.encode() * 100


def test_the_drop_in_stays_with_its_bundle_when_current_moves(synced: Cache) -> None:
    code = "import json, flashinfer_jit_cache as jit; print(json.dumps(jit.get_jit_cache_dir()))"
    directory = python(code, path=synced.current / "flashinfer")
    assert str(synced.current_digest()) in directory


def test_one_provider_for_each_set_of_architectures(upstream: Any, make_bundle: Any, tmp_path: Path) -> None:
    bundle = make_bundle(upstream, {**JIT, **TVM})

    def targets(artifact: BundleArtifact) -> tuple[str, ...]:
        return {"norm": ("sm_90a", "sm_80"), "page": ()}.get(str(artifact.module), ("sm_90a",))

    upstream.publish(replace(bundle, artifacts=tuple(replace(a, sms=targets(a)) for a in bundle.artifacts)))
    cache = Cache(tmp_path)
    run(upstream, cache)
    code = (
        "import json, flashinfer_jit_cache as jit;"
        "print(json.dumps([[p.provider_id, p.cuda_architectures, p.modules]"
        " for p in jit.get_jit_cache_providers()]))"
    )
    assert python(code, path=cache.current / "flashinfer") == [
        ["kernel-depot-jit_cache-sm80-sm90a", ["sm80", "sm90a"], ["norm"]],
        ["kernel-depot-jit_cache-sm90", ["sm90"], ["page"]],
        ["kernel-depot-jit_cache-sm90a", ["sm90a"], ["gdn_prefill_sm90", "single_decode"]],
    ]


def test_wheels_for_one_gpu_each_keep_their_modules_apart(
    upstream: Any, make_bundle: Any, tmp_path: Path
) -> None:
    """From 0.7 on: a shim and a wheel for each GPU, in which the same module stands under its own name."""
    names = ("flashinfer_jit_cache_sm100a", "flashinfer_jit_cache", "flashinfer_jit_cache_sm90a")
    files = {
        f"{name}/jit_cache/norm/norm.so": name.encode() for name in names if name != "flashinfer_jit_cache"
    }
    bundle = make_bundle(upstream, files, wheels=[(name, "0.7.4+cu130") for name in names])
    from kernel_depot.bundle import ArtifactKind

    artifacts = tuple(
        replace(artifact, kind=ArtifactKind.MODULE, module="norm", sms=(sm,))
        for artifact, sm in zip(bundle.artifacts, ("sm_100a", "sm_90a"), strict=True)
    )
    upstream.publish(replace(bundle, artifacts=artifacts))
    cache = Cache(tmp_path)
    run(upstream, cache)
    code = """
import json, flashinfer_jit_cache as jit
from pathlib import Path
print(json.dumps([[p.cuda_architectures, Path(p.jit_cache_dir, "norm", "norm.so").read_text()]
                  for p in jit.get_jit_cache_providers()]))
"""
    assert python(code, path=cache.current / "flashinfer") == [
        [["sm100a"], "flashinfer_jit_cache_sm100a"],
        [["sm90a"], "flashinfer_jit_cache_sm90a"],
    ]


def test_cubins_come_with_their_package(synced: Cache) -> None:
    code = """
import importlib.metadata, json, flashinfer_cubin
from pathlib import Path
print(json.dumps([
    importlib.metadata.version("flashinfer-cubin"),
    Path(flashinfer_cubin.get_cubin_dir(), "abc/fmha/one.cubin").read_text(),
]))
"""
    assert python(code, path=synced.current / "flashinfer") == ["0.6.3", "cubin one"]


def test_without_cubins_there_is_no_cubin_package(upstream: Any, make_bundle: Any, tmp_path: Path) -> None:
    upstream.publish(make_bundle(upstream, {**JIT, **TVM}))
    run(upstream, Cache(tmp_path))
    assert sorted(path.name for path in (tmp_path / "current" / "flashinfer").iterdir()) == [
        "flashinfer_jit_cache",
        "flashinfer_jit_cache-0.6.3+cu130.dist-info",
    ]


def test_the_crate_finds_its_layout(synced: Cache, upstream: Any) -> None:
    bundle = synced.bundle(str(synced.current_digest()))
    assert bundle is not None
    jit, tvm = bundle.wheels[0], bundle.wheels[1]
    name = hashlib.sha256((jit.sha256 + tvm.sha256).encode()).hexdigest()
    top = synced.current / "flashinfer-rs" / name
    assert (top / "libtvm_ffi.so").read_bytes() == b"the runtime"
    for module in ("norm", "page", "gdn_prefill_sm90"):
        assert (top / f"{module}.so").read_bytes() == module.encode() * 100
    for module in MODULES:
        assert (top / "jit_cache" / module / f"{module}.so").read_bytes() == module.encode() * 100
    assert not (synced.current / "flashinfer-rs" / "wheels").exists()
    assert "FLASHINFER_RS_CACHE_DIR" not in environment(synced).variables
    assert any("--with-wheels" in note for note in environment(synced).notes)
    report = run(upstream, synced, with_wheels=True)
    assert (report.changed, report.fetched_blobs) == (True, 2)
    wheels = synced.current / "flashinfer-rs" / "wheels"
    assert {path.name for path in wheels.iterdir()} == {f"{w.sha256}-{w.filename}" for w in (jit, tvm)}
    for path in wheels.iterdir():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name[:64]
    assert environment(synced).variables["FLASHINFER_RS_CACHE_DIR"] == str(wheels.resolve().parent)
    assert not run(upstream, synced, with_wheels=True).changed


def test_every_file_is_the_blob_itself(synced: Cache) -> None:
    for path in (synced.current / "files").rglob("*.so"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert path.stat().st_ino == synced.blob_path(digest).stat().st_ino


def test_where_hard_links_are_refused_symbolic_ones_serve(
    upstream: Any, make_bundle: Any, tmp_path: Path
) -> None:
    """Across filesystems, for one; the same way serves a file that has all the names it may have."""
    from kernel_depot.worker import views

    upstream.publish(make_bundle(upstream, {**JIT, **TVM}))
    cache = Cache(tmp_path / "cache")
    run(upstream, cache)
    blob = next(cache.blobs.glob("*/*"))
    other = Path("/dev/shm")  # another filesystem
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second filesystem to link across")
    name = other / f"kernel-depot-test-{os.getpid()}"
    try:
        views._link(str(blob), str(name), final=name)
        assert name.is_symlink()
        assert name.read_bytes() == blob.read_bytes()
    finally:
        name.unlink(missing_ok=True)


def test_a_view_that_cannot_be_is_refused_when_named(upstream: Any, make_bundle: Any, tmp_path: Path) -> None:
    upstream.publish(make_bundle(upstream, CUBIN, wheels=ALL_WHEELS[2:]))
    cache = Cache(tmp_path)
    with pytest.raises(ViewImpossible, match="apache-tvm-ffi"):
        run(upstream, cache, views=(View.FLASHINFER_RS,))
    with pytest.raises(ViewImpossible, match="with-wheels"):
        run(upstream, cache, with_wheels=True)
    report = run(upstream, cache)
    assert set(report.views) == {"files", "flashinfer"}
    with pytest.raises(ViewImpossible, match="flashinfer-rs"):
        View.parse("flashinfer_rs")


def test_two_wheels_with_different_files_at_one_path_are_named(
    upstream: Any, make_bundle: Any, tmp_path: Path
) -> None:
    bundle = make_bundle(upstream, {**JIT, **TVM})
    clash = replace(bundle.artifacts[0], sha256=upstream.add(b"other"), size=5, wheel=bundle.wheels[1].sha256)
    upstream.publish(replace(bundle, artifacts=(*bundle.artifacts, clash)))
    cache = Cache(tmp_path)
    with pytest.raises(ViewImpossible, match="apache_tvm_ffi"):
        run(upstream, cache)
    assert not cache.current.exists()


def test_named_views_alone_are_built_and_more_can_follow(
    upstream: Any, make_bundle: Any, tmp_path: Path
) -> None:
    upstream.publish(make_bundle(upstream, {**JIT, **TVM}))
    cache = Cache(tmp_path)
    assert set(run(upstream, cache, views=(View.FLASHINFER,)).views) == {"flashinfer"}
    assert [path.name for path in cache.current.iterdir()] == ["flashinfer"]
    assert run(upstream, cache).changed
    assert {path.name for path in cache.current.iterdir()} == {"files", "flashinfer", "flashinfer-rs"}


def test_the_exports_are_fit_for_a_shell(upstream: Any, make_bundle: Any, tmp_path: Path) -> None:
    upstream.publish(make_bundle(upstream, {**JIT, **TVM, **CUBIN}, wheels=ALL_WHEELS))
    cache = Cache(tmp_path / "it's a $(cache)")
    run(upstream, cache)
    script = (
        environment(cache).shell()
        + '\nprintf "%s\\n" "$PYTHONPATH" "$FLASHINFER_CUBIN_DIR" "$FLASHINFER_DISABLE_JIT"'
    )
    answer = subprocess.run(
        ["sh", "-euc", script], env={"PYTHONPATH": "/before"}, check=True, capture_output=True, text=True
    )
    first, cubins, disabled = answer.stdout.splitlines()
    base = cache.view_dir(str(cache.current_digest()))
    assert first == f"{base}/flashinfer:/before"
    assert Path(cubins) == base / "files/flashinfer_cubin/cubins"
    assert disabled == "1"
    assert "CuTe-DSL" in script
    bare = subprocess.run(["sh", "-euc", script], env={}, check=True, capture_output=True, text=True)
    assert bare.stdout.splitlines()[0] == f"{base}/flashinfer"


def test_no_environment_without_a_bundle(tmp_path: Path) -> None:
    with pytest.raises(CacheEmpty, match="sync first"):
        environment(Cache(tmp_path))
