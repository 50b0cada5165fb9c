"""Kernel modules for tests that run them, and a table of what was measured.

`KERNEL_DEPOT_GPU_MODULES` names wheels of the jit-cache layout, or directories of `<uri>/<uri>.so`, separated
like PATH; `KERNEL_DEPOT_GPU_RELEASE` the FlashInfer version they were compiled from (0.6.3). Without a GPU,
torch or modules these tests skip. `KERNEL_DEPOT_GPU_REPORT` names a JSON file for the measurements.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernel_depot.kernels.memory import CUDA, CudaCallFailed, Device, cuda_runtime
from kernel_depot.kernels.runtime import Runtime, read_release

GPU = Device(CUDA, 0)
DTYPES = {"f16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn"}


@dataclass(frozen=True)
class Measurement:
    """How far one case was from its float64 reference: ||out - ref|| / ||ref||, and the worst element."""

    case: str
    module: str
    relative: float
    worst: float
    lse: float | None
    limit: float


_measurements: list[Measurement] = []


@pytest.fixture(scope="session")
def torch() -> Any:
    """Torch with a CUDA device; skips where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and its DLPack addon warn about what these tests do not use
        found = pytest.importorskip("torch")
        pytest.importorskip("tvm_ffi")
        if not found.cuda.is_available():
            pytest.skip("there is no CUDA device")
        found.zeros(1, device="cuda")
    return found


@pytest.fixture(scope="session")
def runtime(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    """The modules under test."""
    places = [Path(text) for text in os.environ.get("KERNEL_DEPOT_GPU_MODULES", "").split(os.pathsep) if text]
    if not places:
        pytest.skip("KERNEL_DEPOT_GPU_MODULES names no kernel modules")
    try:
        cuda_runtime()
    except CudaCallFailed as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("modules")
    for place in places:
        assert place.exists(), f"KERNEL_DEPOT_GPU_MODULES: there is no {place}"
        for uri, data in _modules(place):
            target = directory / uri / f"{uri}.so"
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(data)
    found = Runtime.of_directory(
        directory, release=read_release(os.environ.get("KERNEL_DEPOT_GPU_RELEASE", "0.6.3"))
    )
    assert found.files, f"no module in {places}"
    return found


def _modules(place: Path) -> list[tuple[str, bytes]]:
    if place.is_dir():
        return [(path.stem, path.read_bytes()) for path in sorted(place.glob("**/*.so"))]
    with zipfile.ZipFile(place) as wheel:
        names = [name for name in wheel.namelist() if "/jit_cache/" in name and name.endswith(".so")]
        return [(Path(name).stem, wheel.read(name)) for name in names]


class Meter:
    """Compares a result with its reference, keeps the figures, and says all of them when one is too far."""

    def __init__(self, case: str) -> None:
        self.case = case

    def __call__(
        self,
        module: str,
        out: Any,
        reference: Any,
        *,
        limit: float,
        lse: Any | None = None,
        lse_reference: Any | None = None,
        lse_limit: float = 2e-3,
    ) -> None:
        """Fail when out is not finite, or relatively further from the reference than `limit`."""
        found = out.double().cpu().numpy()
        assert found.shape == reference.shape, (self.case, found.shape, reference.shape)
        bad = int((~np.isfinite(found)).sum())
        difference = np.abs(np.nan_to_num(found, nan=1e30, posinf=1e30, neginf=-1e30) - reference)
        at = np.unravel_index(int(difference.argmax()), difference.shape)
        relative = float(np.linalg.norm(difference) / max(float(np.linalg.norm(reference)), 1e-30))
        far = None
        if lse is not None:
            far = float(np.abs(lse.double().cpu().numpy() - lse_reference).max())
        _measurements.append(Measurement(self.case, module, relative, float(difference[at]), far, limit))
        facts = (
            f"{self.case}: relative {relative:.3g} (limit {limit:.3g}), {bad} of {found.size} not finite,"
            f" worst at {[int(index) for index in at]}: expected {reference[at]:.6g}, found {found[at]:.6g},"
            f" lse off by {far} (limit {lse_limit}), module {module}"
        )
        assert bad == 0, facts
        assert relative <= limit, facts
        assert far is None or far <= lse_limit, facts


@pytest.fixture
def meter(request: pytest.FixtureRequest) -> Meter:
    return Meter(request.node.name)


class Maker:
    """Seeded tensors on the GPU, and their exact values as float64."""

    def __init__(self, torch: Any, seed: int) -> None:
        self.torch = torch
        self.generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(self, dtype: str, *shape: int) -> Any:
        values = self.torch.randn(*shape, device="cuda", generator=self.generator)
        return values.to(getattr(self.torch, DTYPES[dtype]))

    def poisoned(self, dtype: str, *shape: int) -> Any:
        kind = self.torch.float32 if dtype == "f32" else getattr(self.torch, DTYPES[dtype])
        return self.torch.full(shape, math.nan, device="cuda", dtype=kind)

    def device(self, values: Any) -> Any:
        return self.torch.from_numpy(np.ascontiguousarray(values)).cuda()


@pytest.fixture
def make(torch: Any) -> Maker:
    return Maker(torch, seed=7)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _measurements:
        return
    terminalreporter.section("relative errors against float64")
    for one in _measurements:
        lse = "-" if one.lse is None else f"{one.lse:.1e}"
        terminalreporter.write_line(
            f"{one.relative:.2e} (limit {one.limit:.0e})  worst {one.worst:.1e}  lse {lse}  {one.case}"
        )
    report = os.environ.get("KERNEL_DEPOT_GPU_REPORT")
    if report:
        part = Path(f"{report}.part")
        part.write_text(json.dumps([asdict(one) for one in _measurements], indent=1), encoding="utf-8")
        shutil.move(part, report)
