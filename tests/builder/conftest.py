"""A small source of kernel modules and a small CUDA: real generator, real ninja, real C++ compiler, no nvcc.

The source is laid out like flashinfer-python: a generator in `flashinfer.jit` that writes ninja rules. Its
modules are C++ only, so each compiles in a moment. Rules write the name of what they make to `cuda/made`,
and wait while `cuda/hold-<name>` exists.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kernel_depot.builder.build import BuildOptions, BuildReport, ModuleState, build
from kernel_depot.builder.cache import BuildCache
from kernel_depot.builder.plan import Plan, parse_plan
from kernel_depot.digest import sha256_file
from kernel_depot.settings import Settings

VERSION = "9.9.9"

_ENV = """
import os, pathlib
_BASE = pathlib.Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / ".cache"
FLASHINFER_JIT_DIR = _BASE / "cached_ops"
FLASHINFER_GEN_SRC_DIR = _BASE / "generated"
CSRC = pathlib.Path(__file__).resolve().parents[1] / "data" / "csrc"
"""

_CORE = """
import os
from pathlib import Path
import torch
from . import env

class Spec:
    def __init__(self, name, sources, flags="", memory=""):
        self.name, self.sources, self.flags = name, [Path(one) for one in sources], flags
        self.extra_include_dirs = None

    @property
    def ninja_path(self):
        return env.FLASHINFER_JIT_DIR / self.name / "build.ninja"

    def write_ninja(self):
        out = self.ninja_path.parent
        out.mkdir(parents=True, exist_ok=True)
        objects = [str(out / (one.stem + ".o")) for one in self.sources]
        lines = [
            f"cuda_home = {os.environ['CUDA_HOME']}",
            f"cflags = -D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)} -fPIC -O1 -I{env.CSRC}"
            + f" {self.flags}",
            "ldflags = -shared",
            "rule compile",
            "  command = while test -e $cuda_home/hold-`basename $out`; do sleep 0.1; done;"
            + " echo `basename $out` >> $cuda_home/made; c++ $cflags -c $in -o $out",
            "rule link",
            "  command = c++ $in $ldflags -o $out",
        ]
        lines += [f"build {obj}: compile {one}" for obj, one in zip(objects, self.sources)]
        lines += [f"build {out / (self.name + '.so')}: link " + " ".join(reversed(objects))]
        self.ninja_path.write_text("\\n".join(lines) + "\\n")

def generated(uri, text):
    path = env.FLASHINFER_GEN_SRC_DIR / uri / (uri[:40] + ".cc")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
"""

_EXPORT = 'extern "C" __attribute__((visibility("default"))) int __tvm_ffi_%s() { return %d; }\n'

FILES = {
    "flashinfer/__init__.py": "raise ImportError('the generator must not import all of flashinfer')\n",
    "flashinfer/version.py": f"__version__ = {VERSION!r}\n",
    "flashinfer/jit/__init__.py": "",
    "flashinfer/jit/env.py": _ENV,
    "flashinfer/jit/core.py": _CORE,
    "flashinfer/jit/norm.py": "from .core import Spec, env\n\ndef gen_norm_module():\n"
    "    return Spec('norm', [env.CSRC / 'norm.cc', env.CSRC / 'norm_binding.cc'])\n",
    "flashinfer/jit/page.py": "from .core import Spec, env\n\ndef gen_page_module():\n"
    "    return Spec('page', [env.CSRC / 'page.cc'])\n",
    "flashinfer/jit/rope.py": "from .core import Spec, env\n\ndef gen_rope_module():\n"
    "    return Spec('rope', [env.CSRC / 'rope.cc'])\n",
    "flashinfer/jit/sampling.py": "from .core import Spec, env\n\ndef gen_sampling_module():\n"
    "    return Spec('sampling', [env.CSRC / 'sampling.cc'])\n",
    "flashinfer/jit/topk.py": "def gen_topk_module():\n"
    "    raise RuntimeError('No supported CUDA architectures found for major versions [10, 11].')\n",
    "flashinfer/jit/gdn.py": "from .core import Spec, env\n\ndef gen_gdn_prefill_sm90_module():\n"
    "    return Spec('gdn_prefill_sm90', [env.CSRC / 'page.cc'],"
    " '-DARCH=-gencode=arch=compute_80,code=sm_80')\n",
    "flashinfer/jit/cascade.py": "from .core import Spec, env\n\ndef gen_cascade_module():\n"
    "    return Spec('cascade', [env.CSRC / 'hungry.cc'],"
    " '-fconstexpr-loop-limit=2147483647 -fconstexpr-ops-limit=9223372036854775807')\n",
    "flashinfer/jit/attention/__init__.py": "from ..core import Spec, generated\n\n"
    "def gen_single_decode_module(dtype_q, dtype_kv, dtype_o, head_dim_qk, head_dim_vo,\n"
    "        pos_encoding_mode, use_sliding_window, use_logits_soft_cap):\n"
    "    name = {'float16': 'f16', 'bfloat16': 'bf16'}\n"
    "    uri = (f'single_decode_with_kv_cache_dtype_q_{name[dtype_q.name]}_dtype_kv_{name[dtype_kv.name]}'\n"
    "        f'_dtype_o_{name[dtype_o.name]}_head_dim_qk_{head_dim_qk}_head_dim_vo_{head_dim_vo}'\n"
    "        f'_posenc_{pos_encoding_mode}_use_swa_{use_sliding_window}'\n"
    "        f'_use_logits_cap_{use_logits_soft_cap}')\n"
    f"    return Spec(uri, [generated(uri, {_EXPORT % ('run', 7)!r})])\n",
    "flashinfer/data/csrc/norm.cc": '#include "norm.h"\n' + _EXPORT % ("rmsnorm", 1),
    "flashinfer/data/csrc/norm.h": "inline const char* where() { return __FILE__; }\n",
    "flashinfer/data/csrc/norm_binding.cc": '#include "norm.h"\n'
    'extern "C" __attribute__((visibility("default"))) const char* __tvm_ffi_where() { return where(); }\n',
    "flashinfer/data/csrc/page.cc": _EXPORT % ("append", 2),
    "flashinfer/data/csrc/rope.cc": "#include <curand_absent.h>\n",
    "flashinfer/data/csrc/sampling.cc": "#error this source is wrong\n",
    # Constant evaluation keeps every value it made: this takes gigabytes if it is let.
    "flashinfer/data/csrc/hungry.cc": "struct Big { int a[1 << 27];\n"
    "  constexpr Big() : a() { for (int i = 0; i < (1 << 27); ++i) a[i] = i; } };\n"
    "constexpr Big big{};\n" + _EXPORT % ("cascade", 3),
}


def toolkit(root: Path) -> Path:
    """Write what looks like a CUDA 13.0: headers, a library, and an nvcc that tells its version."""
    (root / "bin").mkdir(parents=True)
    (root / "include/crt").mkdir(parents=True)
    (root / "lib64").mkdir()
    (root / "include/cuda.h").write_text("#define CUDA_VERSION 13000\n")
    (root / "include/cuda_runtime_api.h").write_text("")
    (root / "include/crt/host_defines.h").write_text("")
    (root / "lib64/libcudart.so").write_bytes(b"")
    nvcc = root / "bin/nvcc"
    nvcc.write_text(
        "#!/bin/sh\ncase $1 in --version) echo 'Cuda compilation tools, release 13.0, V13.0.88';;"
        " *) echo sm_80; echo sm_90;; esac\n"
    )
    nvcc.chmod(0o755)
    return root


@dataclass(frozen=True)
class Bench:
    """A place to build: a source wheel, a CUDA, and a cache of its own."""

    root: Path
    wheel: Path
    cuda: Path

    def plan(self, *modules: str, more: str = "", limits: str = "", sm: str = "sm90a") -> Plan:
        """Return a plan of some modules by URI."""
        return parse_plan(self.text(*modules, more=more, limits=limits, sm=sm), where="test")

    def text(self, *modules: str, more: str = "", limits: str = "", sm: str = "sm90a") -> str:
        """Return that plan's TOML."""
        tables = "".join(f'[[module]]\nuri = "{uri}"\n' for uri in modules)
        return (
            f'name = "bench"\ncuda = "cu130"\nsm = ["{sm}"]\n[source]\nproject = "flashinfer-python"\n'
            f'version = "{VERSION}"\nfilename = "{self.wheel.name}"\nsha256 = "{sha256_file(self.wheel)}"\n'
            f'url = "https://example.org/{self.wheel.name}"\n[limits]\n{limits}\n{tables}{more}'
        )

    def build(self, plan: Plan, *, cache: str = "cache", out: str = "out", **options: object) -> BuildReport:
        """Build the plan."""
        states: list[ModuleState] = []
        chosen: dict[str, object] = {"jobs": 2, "source": self.wheel, **options}
        return build(
            plan,
            BuildOptions(out=self.root / out, roots=[self.cuda], **chosen),
            cache=BuildCache(self.root / cache),
            settings=Settings(),
            watch=states.append,
            progress=lambda name, done, total: None,
        )

    def made(self) -> list[str]:
        """Return the object files that were compiled, in order."""
        path = self.cuda / "made"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def bench(tmp_path: Path, make_wheel: Callable[..., Path]) -> Bench:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler on this machine")
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("modules are for x86_64 and aarch64")
    files = {name: text.encode() for name, text in FILES.items()}
    wheel = make_wheel(files, project="flashinfer_python", version=VERSION, directory=tmp_path / "wheels")
    return Bench(tmp_path, wheel, toolkit(tmp_path / "cuda"))


COMMAND = [sys.executable, "-m", "kernel_depot.cli.main"]


@dataclass(frozen=True)
class Served:
    """A depot served by a process of its own, with its engine; claims hold for two seconds."""

    url: str
    data_dir: Path

    def token(self, scope: str) -> str:
        """Make a token."""
        done = subprocess.run(
            [*COMMAND, "tokens", "create", "--scope", scope, "--name", scope, "--data-dir", self.data_dir],
            capture_output=True,
            text=True,
            check=True,
        )
        found = re.search(r"kd_\S+", done.stdout)
        assert found is not None, done.stdout
        return found[0]

    def get(self, path: str, *, status: int = 200) -> Any:
        """Ask the depot."""
        answer = httpx.get(self.url + path, trust_env=False)
        assert answer.status_code == status, answer.text
        return answer.json()

    def post(self, path: str, body: object, *, status: int) -> Any:
        """Tell the depot something."""
        answer = httpx.post(self.url + path, json=body, trust_env=False)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    def reached(self, job_id: str, when: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Wait until a job is as it should be."""
        deadline = time.monotonic() + 120
        while True:
            job: dict[str, Any] = self.get(f"/v1/jobs/{job_id}")
            if when(job):
                return job
            assert time.monotonic() < deadline, job
            time.sleep(0.1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data_dir = tmp_path_factory.mktemp("depot")
    log = data_dir / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*COMMAND, "serve", "--data-dir", data_dir, "--port", "0", "--allow-anonymous"],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env={**os.environ, "KERNEL_DEPOT_LEASE_SECONDS": "2"},
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert "listening on" in line, log.read_text()
        yield Served(line.split()[-1], data_dir)
    finally:
        process.terminate()
        process.wait(timeout=60)
        process.stdout.close()
