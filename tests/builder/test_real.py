"""One real module, `page` of flashinfer-python 0.6.3, compiled by nvcc: twice, in two places at once."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernel_depot.builder.build import BuildOptions, BuildReport, build
from kernel_depot.builder.cache import BuildCache
from kernel_depot.builder.generate import __file__ as generator
from kernel_depot.builder.plan import parse_plan
from kernel_depot.builder.source import bring, source_tree
from kernel_depot.builder.toolchain import HOST_PATH, candidates, examine
from kernel_depot.settings import load_settings
from kernel_depot.shipped import shipped_dir

ROOTS = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]


def text() -> str:
    """The plan `small`, of `page` alone."""
    head, _, _ = (shipped_dir("builds") / "small.toml").read_text().partition("[[module]]")
    return head.replace('needs = ["cublas", "curand"]', "") + '[[module]]\nuri = "page"\n'


@pytest.mark.network
def test_page_is_built_the_same_twice_found_by_flashinfer_and_loads(tmp_path: Path) -> None:
    plan = parse_plan(text(), where="page")
    roots = candidates(plan.cuda, named=ROOTS, search_path=os.environ["PATH"])
    first = BuildCache(tmp_path / "one")
    checks = examine(plan, cache=first, roots=roots)
    if not checks[0].detail.startswith("the system's"):
        pytest.skip(f"no CUDA {plan.cuda} with nvcc on this machine ({checks[0].detail})")
    if absent := [check for check in checks if not check.ok]:
        pytest.skip(f"the toolchain is not complete: {absent}")
    settings = load_settings()
    wheel = bring(plan.source, cache=first, settings=settings, given=None, progress=lambda *_: None)

    def run(name: str) -> BuildReport:
        return build(
            plan,
            BuildOptions(out=tmp_path / name / "out", jobs=1, roots=roots, source=wheel),
            cache=BuildCache(tmp_path / name),
            settings=settings,
            watch=lambda state: None,
            progress=lambda *_: None,
        )

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(run, ["one", "two/in another directory"])
    assert one.modules[0].built is not None
    assert one.modules[0].built.functions == (
        "__tvm_ffi_append_paged_kv_cache",
        "__tvm_ffi_append_paged_mla_kv_cache",
    )
    assert one.wheel is not None
    assert two.wheel is not None
    assert one.wheel.path.read_bytes() == two.wheel.path.read_bytes()

    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", one.wheel.path, site], check=True)
    tree = source_tree(wheel, plan.source, cache=first)
    found = python(_FIND, tmp_path, site, {"FLASHINFER_CUDA_ARCH_LIST": "9.0a", "TREE": str(tree)})
    library = site / "flashinfer_jit_cache/jit_cache/page/page.so"
    assert found == [str(library), True]

    stub = tmp_path / "stub"
    stub.mkdir()
    command = ["c++", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(stub / "libcuda.so.1"), "-x", "c++"]
    subprocess.run([*command, os.devnull], check=True)
    paths = f"{one.toolchain.root / 'lib64'}:{stub}"
    [signature] = python(_LOAD, tmp_path, site, {"LD_LIBRARY_PATH": paths, "LIBRARY": str(library)})
    assert signature.count("DLTensor*") == 9
    assert "append_paged_kv_cache(0: DLTensor*, " in signature


def python(code: str, home: Path, site: Path, environment: dict[str, str]) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-B", "-c", code],
        env={
            "PATH": HOST_PATH,
            "PYTHONPATH": str(site),
            "FLASHINFER_WORKSPACE_BASE": str(home),
            "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
            "GENERATOR": generator,
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: list[object] = json.loads(done.stdout)
    return result


# FlashInfer's own rules for where a module lies, of the unmodified 0.6.3, without the torch it wants.
_FIND = """
import json, os, runpy, sys, types
modules = sys.modules
modules["torch"] = None
import tvm_ffi
modules["torch"] = runpy.run_path(os.environ["GENERATOR"])["torch_stand_in"]("13.0")
package = modules["flashinfer"] = types.ModuleType("flashinfer")
package.__path__ = [os.environ["TREE"] + "/flashinfer"]
from flashinfer.jit.page import gen_page_module
spec = gen_page_module()
print(json.dumps([str(spec.get_library_path()), spec.is_aot]))
"""

_LOAD = """
import json, os, tvm_ffi
module = tvm_ffi.load_module(os.environ["LIBRARY"])
try:
    module["append_paged_kv_cache"]()
except TypeError as error:
    print(json.dumps([str(error)]))
"""
