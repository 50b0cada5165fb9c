"""The worker's commands against the real service: materialize, serve, sync, env, smoke, doctor."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernel_depot.kernels.runtime import Runtime
from kernel_depot.opponent.errors import OpponentAbsent
from kernel_depot.opponent.gates import available, require_artifact
from kernel_depot.platform import Arch, CudaTag, Platform
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.client import Endpoint
from kernel_depot.worker.errors import BundleIncomplete, ServerRefused
from kernel_depot.worker.sync import SyncRequest, sync

ARCH = os.uname().machine
PLATFORM = Platform(CudaTag(13, 1), Arch.parse(ARCH))
COMMAND = [sys.executable, "-m", "kernel_depot.cli.main"]
CODE = r"""
void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message);
int __tvm_ffi_run(void* self, const void* args, int count, void* result) {
  TVMFFIErrorSetRaisedFromCStr("TypeError", "Expected: run(0: DLTensor*) -> void");
  return -1;
}
int __tvm_ffi_number(void* self, const void* args, int count, void* result) { return %d; }
"""


def command(*arguments: object, code: int = 0) -> Any:
    """Run kernel-depot and return the JSON it prints."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments), "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def modules(folder: Path, names: list[str]) -> dict[str, bytes]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to make modules with")
    made = {}
    for number, name in enumerate(names):
        source, target = folder / f"{name}.c", folder / f"{name}.so"
        source.write_text(CODE % number)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", target, source], check=True)
        made[f"flashinfer_jit_cache/jit_cache/{name}/{name}.so"] = target.read_bytes()
    return made


def runtime() -> bytes:
    spec = importlib.util.find_spec("tvm_ffi")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0], "lib", "libtvm_ffi.so").read_bytes()


def pin(wheel: Path) -> str:
    project = wheel.name.split("-")[0]
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return (
        f"[{project}.cu130.{ARCH}]\n"
        f'filename = "{wheel.name}"\nurl = "{wheel.as_uri()}"\nsha256 = "{sha256}"\n\n'
    )


class Depot:
    """A data directory that pin sets are materialized into, and the server over it."""

    def __init__(self, folder: Path) -> None:
        self.data_dir = folder / "depot"
        self.folder = folder

    def materialize(self, pin_sets: dict[str, list[Path]], *, lost: list[Path], tables: str = "") -> None:
        files = []
        for name, wheels in pin_sets.items():
            files.append(self.folder / f"{name}.toml")
            files[-1].write_text("".join(map(pin, wheels)) + tables)
        for wheel in lost:
            wheel.unlink()
        command(
            "materialize", *files, "--data-dir", self.data_dir, "--allow-file-urls", code=1 if lost else 0
        )

    def serve(self) -> str:
        arguments = ["serve", "--data-dir", str(self.data_dir), "--port", "0", "--allow-anonymous"]
        self.process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        match = re.search(r"http://\S+", self.process.stdout.readline())
        assert match is not None
        return match.group()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()
        del self.process


@pytest.fixture
def depot(tmp_path: Path) -> Iterator[Depot]:
    made = Depot(tmp_path)
    yield made
    if hasattr(made, "process"):
        made.stop()


def test_a_node_syncs_smokes_and_goes_on_without_the_server(
    depot: Depot, make_wheel: Callable[..., Path], tmp_path: Path
) -> None:
    libraries = modules(tmp_path, ["norm", "page", "gdn_prefill_sm90", "single_decode"])
    ffi = {"tvm_ffi/lib/libtvm_ffi.so": runtime()}
    cubins = {
        "flashinfer_cubin/__init__.py": b"",
        **{f"flashinfer_cubin/cubins/a/{n}/checksums.txt": b"%d " % n * n for n in range(400)},
        "flashinfer_cubin/cubins/big/checksums.txt": os.urandom(5 << 20),
    }
    lost = make_wheel({"flashinfer_cubin/__init__.py": b"1"}, project="flashinfer_cubin", version="0.6.4")
    depot.materialize(
        {
            "kernels": [
                make_wheel(libraries, project="flashinfer_jit_cache", version="0.6.3+cu130"),
                make_wheel(ffi, project="apache_tvm_ffi", version="0.1.3"),
            ],
            "cubins": [make_wheel(cubins, project="flashinfer_cubin", version="0.6.3")],
            "lost": [lost],
        },
        lost=[lost],
    )
    url = depot.serve()
    place = tmp_path / "cache"
    node = ("--cache", place)
    platform = ("--cuda", "13.1", "--arch", ARCH, "--sm", "none")
    both = ("--pins", "kernels", "--pins", "cubins")

    report = command("sync", "--server", url, *node, *platform, *both)
    assert report["changed"]
    assert report["missing"] == []
    for path, data in {**libraries, **ffi, **cubins}.items():
        assert (place / "current" / "files" / path).read_bytes() == data

    def again(**options: Any) -> Any:
        request = SyncRequest(**options)
        return sync(request, endpoint=Endpoint(url, trust_env=False), platform=PLATFORM, cache=Cache(place))

    quiet = again(pins=("kernels", "cubins"))
    assert (quiet.changed, quiet.requests) == (False, 1)
    assert again(pins=("kernels", "cubins"), zstd=False).requests == 1

    part = again(pins=("kernels", "cubins"), modules=("norm",))
    assert part.fetched_blobs == 0
    found = sorted(path.name for path in (place / "current" / "files").rglob("*.so"))
    assert found == ["libtvm_ffi.so", "norm.so"]
    with pytest.raises(ServerRefused) as refusal:
        again(pins=("kernels",), modules=("nrom",))
    assert refusal.value.type == "urn:kernel-depot:problem:module-unknown"
    with pytest.raises(BundleIncomplete, match=r"0\.6\.4"):
        again(pins=("lost",))
    assert [wheel.filename for wheel in again(pins=("lost",), allow_incomplete=True).missing] == [lost.name]

    again(pins=("kernels",), with_wheels=True)
    report = command("doctor", "--server", url, *node)
    assert report["server"]["ready"]
    assert report["cache"]["absent_blobs"] == 0
    depot.stop()

    refused = command("sync", "--server", url, *node, *platform, code=1)
    assert refused["type"] == "urn:kernel-depot:problem:server-unreachable"
    assert not command("sync", "--offline", *node)["changed"]
    variables = command("env", *node)["variables"]
    assert Path(variables["FLASHINFER_RS_CACHE_DIR"], "wheels").is_dir()
    smoke = command("smoke", *node)
    assert smoke["ok"]
    checks = {(outcome["check"], outcome["subject"]): outcome["status"] for outcome in smoke["outcomes"]}
    assert checks["tvm-ffi", "tvm_ffi/lib/libtvm_ffi.so"] == "pass"
    assert checks["module load", "norm"] == "pass"


@pytest.mark.parametrize("default", [False, True])
def test_only_a_sync_that_asks_for_the_opponent_opens_its_artifact_gate(
    depot: Depot, make_wheel: Callable[..., Path], tmp_path: Path, default: bool
) -> None:
    """With `default` its module lies in everyone's bundle, and the gate stays shut all the same."""
    libraries = modules(tmp_path, ["norm", "prefill"])
    depot.materialize(
        {"kernels": [make_wheel(libraries, project="flashinfer_jit_cache", version="0.6.3+cu130")]},
        lost=[],
        tables=f'[groups.opponent]\nmodules = ["prefill"]\ndefault = {str(default).lower()}\n',
    )
    url, place = depot.serve(), tmp_path / "cache"
    platform = ("--cuda", "13.1", "--arch", ARCH, "--sm", "none")

    def synced(*options: str) -> list[str]:
        command("sync", "--server", url, "--cache", place, *platform, *options)
        return sorted(path.stem for path in (place / "current" / "files").rglob("*.so"))

    everyones = ["norm", "prefill"] if default else ["norm"]
    assert synced() == everyones
    assert available(place) is False
    with pytest.raises(OpponentAbsent):
        require_artifact(place)
    assert synced("--group", "opponent") == ["norm", "prefill"]
    assert available(place) is True
    assert list(require_artifact(place).files) == ["prefill"]
    assert synced() == everyones
    assert available(place) is False
    with pytest.raises(OpponentAbsent):
        require_artifact(place)
    assert synced("--modules", "norm,prefill") == ["norm", "prefill"]
    assert available(place) is False

    refused = command("sync", "--server", url, "--cache", place, *platform, "--group", "oponent", code=1)
    assert refused["type"] == "urn:kernel-depot:problem:module-group-unknown"
    assert "opponent" in refused["expected"]


def test_headers_of_the_source_wheel_reach_the_runtime(
    depot: Depot, make_wheel: Callable[..., Path], tmp_path: Path
) -> None:
    """Fused MoE's DeepSeek kernels are compiled from them; nothing else of that wheel is kept."""
    folder = "flashinfer/data/csrc/nv_internal/tensorrt_llm"
    headers = {f"{folder}/deep_gemm/{name}.cuh": name.encode() for name in ("fp8_gemm_impl", "utils")}
    others = {"flashinfer/__init__.py": b"import torch", f"{folder}/kernels/quantization.cuh": b"another"}
    libraries = modules(tmp_path, ["norm", "fused_moe_90"])
    depot.materialize(
        {
            "kernels": [make_wheel(libraries, project="flashinfer_jit_cache", version="0.6.3+cu130")],
            "headers": [make_wheel({**headers, **others}, project="flashinfer_python", version="0.6.3")],
        },
        lost=[],
    )
    url = depot.serve()
    place = tmp_path / "cache"
    for options in ({}, {"modules": ("fused_moe_90",)}):
        request: Any = SyncRequest(**options)
        sync(request, endpoint=Endpoint(url, trust_env=False), platform=PLATFORM, cache=Cache(place))
        view = (place / "current").resolve() / "files"
        assert Runtime.open(place).headers == (view / folder,)
        found = {str(path.relative_to(view)): path.read_bytes() for path in view.rglob("*.cuh")}
        assert found == headers
        assert not (view / "flashinfer" / "__init__.py").exists()
