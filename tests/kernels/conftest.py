"""Stand-ins for kernel modules: real TVM-FFI functions, FlashInfer's signatures, that write down their call.

`signatures.txt` lists them: release, module, function, arguments, result. A letter is an argument: T and M a
borrowed tensor and an optional one, W and O an owned tensor and an optional one, I int, F float, B bool, A
ints. They are compiled once; a module is linked from them by giving functions their exported names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from kernel_depot.kernels.memory import CPU, Device, Memory
from kernel_depot.kernels.runtime import Runtime
from kernel_depot.kernels.uri import Release

HERE = Path(__file__).parent
HOST = Device(CPU)

_TYPES = {
    "T": "TensorView",
    "M": "Optional<TensorView>",
    "O": "Optional<Tensor>",
    "W": "Tensor",
    "I": "int64_t",
    "F": "double",
    "B": "bool",
    "A": "Array<int64_t>",
}
_RESULTS = {"void": "void", "ints": "Array<int64_t>", "staged": "Tuple<Array<int64_t>, int64_t>"}


@dataclass(frozen=True)
class Signature:
    """One line of signatures.txt."""

    release: str
    module: str
    function: str
    arguments: str
    result: str

    @property
    def symbol(self) -> str:
        """The name of the compiled function."""
        return f"stand_in_{self.function}_{self.arguments}_{self.result}"

    @property
    def definition(self) -> str:
        """The line of C++ that defines it."""
        types = ", ".join(_TYPES[letter] for letter in self.arguments)
        return f'STAND_IN({self.symbol}, "{self.function}", {_RESULTS[self.result]}, {types})'


SIGNATURES = [
    Signature(*line.split()) for line in (HERE / "signatures.txt").read_text(encoding="ascii").splitlines()
]


@dataclass(frozen=True)
class Call:
    """What a stand-in was given. A tensor is a dict: code, bits, device, shape, strides, address, head."""

    function: str
    stream: int
    arguments: list[Any]

    @property
    def shapes(self) -> list[Any]:
        """The arguments with each tensor as its shape."""
        return [value["shape"] if isinstance(value, dict) else value for value in self.arguments]


class Toolbox:
    """Compiled stand-ins, and the modules linked from them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.object = directory / "stand_ins.o"
        with FileLock(directory / "lock"):
            if not self.object.exists():
                self._compile()

    def moe(self, release: str) -> Path:
        """Return a fused MoE module with that release's functions (moe.cpp)."""
        path, made = self.directory / f"moe-{release}.so", self.directory / "moe.o"
        with FileLock(self.directory / "lock"):
            if not made.exists():
                self._run(*self._flags(), "-c", HERE / "moe.cpp", output=made)
            if not path.exists():
                names = {
                    "init": f"moe_init_{release.replace('.', '_')}",
                    "set_deepgemm_jit_include_dirs": "moe_headers",
                    "runners": "moe_runners",
                }
                links = [f"-Wl,--defsym=__tvm_ffi_{name}={symbol}" for name, symbol in names.items()]
                self._run("-shared", "-s", made, *links, output=path)
        return path

    def _compile(self) -> None:
        definitions = dict.fromkeys(signature.definition for signature in SIGNATURES)
        source = self.directory / "stand_ins.cpp"
        source.write_text(
            "\n".join(['#include "recorder.h"', "using namespace stand_in;", *definitions]), encoding="ascii"
        )
        self._run(*self._flags(), "-c", source, output=self.object)

    def _flags(self) -> list[str]:
        include = subprocess.run(
            [sys.executable, "-m", "tvm_ffi.config", "--cxxflags"], check=True, capture_output=True, text=True
        ).stdout.split()
        # Statics of inline functions would be one for all modules of a process: -fno-gnu-unique.
        return ["-std=c++17", "-O0", "-fPIC", "-fno-gnu-unique", *include, f"-I{HERE}"]

    def link(self, module: str, release: str) -> Path:
        """Return a module with that release's functions of one of signatures.txt's modules."""
        path = self.directory / f"{module}-{release}.so"
        with FileLock(self.directory / "lock"):
            if not path.exists():
                chosen = [one for one in SIGNATURES if (one.module, one.release) == (module, release)]
                assert chosen, f"signatures.txt has no module {module} of {release}"
                names = [f"-Wl,--defsym=__tvm_ffi_{one.function}={one.symbol}" for one in chosen]
                self._run("-shared", "-s", self.object, *names, output=path)
        return path

    def _run(self, *arguments: str | Path, output: Path) -> None:
        part = output.with_suffix(".part")
        done = subprocess.run(["c++", *arguments, "-o", part], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        part.rename(output)


class StandIns:
    """A directory of stand-in modules, as `Runtime.of_directory` opens it."""

    def __init__(self, toolbox: Toolbox, directory: Path) -> None:
        self._toolbox = toolbox
        self.directory = directory

    def add(self, uri: str, module: str, release: Release) -> None:
        """Put a module there under a URI."""
        target = self.directory / uri / f"{uri}.so"
        target.parent.mkdir(parents=True)
        shutil.copy(self._toolbox.link(module, ".".join(map(str, release))), target)

    def add_moe(self, uri: str, release: Release) -> None:
        """Put a fused MoE module there under a URI."""
        target = self.directory / uri / f"{uri}.so"
        target.parent.mkdir(parents=True)
        shutil.copy(self._toolbox.moe(".".join(map(str, release))), target)

    def runners(self, uri: str) -> int:
        """Return how many runners of a fused MoE module are alive."""
        return int(self._loaded(uri).runners(0))

    def runtime(self, release: Release) -> Runtime:
        """Open what is there."""
        return Runtime.of_directory(self.directory, release=release)

    def calls(self, uri: str) -> list[Call]:
        """Return a module's calls since the last time, the latest 16 at most."""
        return [Call(**call) for call in json.loads(self._loaded(uri).recorded(0))]

    def fail_next(self, uri: str, why: str) -> None:
        """Let a module's next call fail with RuntimeError."""
        self._loaded(uri).fail_next(why)

    def _loaded(self, uri: str) -> Any:
        import tvm_ffi

        return tvm_ffi.load_module(str(self.directory / uri / f"{uri}.so"))


@pytest.fixture(scope="session")
def toolbox(tmp_path_factory: pytest.TempPathFactory) -> Toolbox:
    """One for all processes of a session: pytest-xdist's have their directories under the session's own."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "stand-ins"
    directory.mkdir(exist_ok=True)
    return Toolbox(directory)


@pytest.fixture
def stand_ins(toolbox: Toolbox, tmp_path: Path) -> StandIns:
    return StandIns(toolbox, tmp_path / "modules")


class Bench:
    """Host tensors of any dtype that kernels know; their memory lives as long as the bench."""

    def __init__(self) -> None:
        self._held: list[Memory] = []

    def __call__(self, dtype: str, *shape: int) -> Any:
        """Return a zeroed tensor."""
        size = 8
        for length in shape:
            size *= length
        self._held.append(Memory(max(size, 1), HOST))
        return self._held[-1].tensor(dtype, shape)


@pytest.fixture
def tensor() -> Bench:
    return Bench()
