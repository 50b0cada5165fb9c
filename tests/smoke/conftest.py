"""A node's cache filled by hand, and modules to put there: C that only loads, C++ that really computes."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from kernel_depot.bundle import ArtifactKind, Bundle, BundleArtifact, BundleWheel
from kernel_depot.platform import Arch, CudaTag, Platform
from kernel_depot.smoke.cases import Host, smoke
from kernel_depot.smoke.report import SmokeReport
from kernel_depot.worker.cache import Cache

HERE = Path(__file__).parent
ARCH = Arch.parse(os.uname().machine)
HOST = Host(ARCH)


@pytest.fixture(scope="session")
def libtvm_ffi() -> bytes:
    """The runtime of the installed apache-tvm-ffi, found without importing it."""
    spec = importlib.util.find_spec("tvm_ffi")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0], "lib", "libtvm_ffi.so").read_bytes()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to make modules with")
    directory = tmp_path_factory.mktemp("modules")

    def build(source: str, *options: str) -> bytes:
        name = hashlib.sha256((source + "".join(options)).encode()).hexdigest()[:12]
        target = directory / f"{name}.so"
        if not target.exists():
            code = directory / f"{name}.c"
            code.write_text(source)
            subprocess.run([compiler, "-shared", "-fPIC", "-o", str(target), str(code), *options], check=True)
        return target.read_bytes()

    return build


class Node:
    """A cache filled by hand: blobs, a manifest, `current`."""

    def __init__(self, root: Path) -> None:
        self.cache = Cache(root)
        self.cache.prepare()
        self.artifacts: list[BundleArtifact] = []
        self.host = HOST
        self.tvm_ffi_version = "0.1.6"

    def add(
        self,
        path: str,
        data: bytes,
        kind: ArtifactKind,
        *,
        module: str | None = None,
        sms: tuple[str, ...] = (),
    ) -> None:
        sha256 = hashlib.sha256(data).hexdigest()
        self.cache.fan_out([sha256])
        self.cache.blob_path(sha256).write_bytes(data)
        self.artifacts.append(BundleArtifact(path, kind, sha256, len(data), "a" * 64, module, sms=sms))

    def module(self, name: str, data: bytes, *, sms: tuple[str, ...] = ()) -> None:
        path = f"flashinfer_jit_cache/jit_cache/{name}/{name}.so"
        self.add(path, data, ArtifactKind.MODULE, module=name, sms=sms)

    def runtime(self, data: bytes) -> None:
        self.add("tvm_ffi/lib/libtvm_ffi.so", data, ArtifactKind.TVM_FFI)

    def publish(self) -> str:
        wheel = BundleWheel("flashinfer_jit_cache", "0.6.3", "x.whl", "a" * 64, 1, "cu130")
        runtime = BundleWheel("apache_tvm_ffi", self.tvm_ffi_version, "y.whl", "b" * 64, 1, "cu130")
        bundle = Bundle((), Platform(CudaTag(13, 0), ARCH), (wheel, runtime), tuple(self.artifacts))
        data = json.dumps(bundle.to_json(), sort_keys=True).encode()
        digest = hashlib.sha256(data).hexdigest()
        self.cache.bundle_path(digest).write_bytes(data)
        with self.cache.private() as private:
            self.cache.switch(digest, private=private)
        return digest

    def smoke(self, host: Host | None = None, **options: Any) -> SmokeReport:
        self.publish()
        return smoke(self.cache, host=host or self.host, **options)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "cache")


class Computing:
    """Modules of C++ that compute on the CPU; each is compiled once for all processes of a session."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, family: str, *, fault: str = "kNone", posenc: int = 0) -> bytes:
        """Return a module of a family (`norm` is norm.cpp), with one of computing.h's faults."""
        target = self._directory / f"{family}-{fault}-{posenc}.so"
        with FileLock(self._directory / "lock"):
            if not target.exists():
                self._compile(HERE / f"{family}.cpp", target, fault, posenc)
        return target.read_bytes()

    def _compile(self, source: Path, target: Path, fault: str, posenc: int) -> None:
        flags = subprocess.run(
            [sys.executable, "-m", "tvm_ffi.config", "--cxxflags"], check=True, capture_output=True, text=True
        ).stdout.split()
        part = target.with_suffix(".part")
        command = [
            "c++",
            "-std=c++17",
            "-O2",
            "-fPIC",
            "-shared",
            "-s",
            *flags,
            f"-DFAULT=computing::{fault}",
            f"-DPOSENC={posenc}",
        ]
        done = subprocess.run(
            [*command, str(source), "-o", str(part)], check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-4000:]
        part.rename(target)


@pytest.fixture(scope="session")
def computing(tmp_path_factory: pytest.TempPathFactory) -> Computing:
    """One for all processes of a session: pytest-xdist's have their directories under the session's own."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler to make modules with")
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "computing"
    directory.mkdir(exist_ok=True)
    return Computing(directory)
