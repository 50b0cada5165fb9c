"""With a GPU: what the driver itself says of code for it."""

from __future__ import annotations

import ctypes

import pytest

from kernel_depot.smoke.cases import this_host
from kernel_depot.smoke.process import run_child
from kernel_depot.smoke.report import Status

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _needs_a_gpu() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip("no GPU")


def test_the_gpu_is_told() -> None:
    host = this_host()
    assert host.sm is not None
    assert host.gpu


def test_what_the_driver_refuses_is_a_failure(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path), "bad.cubin")
    path.write_bytes(b"\x7fELF" + bytes(500))
    case = {"check": "cubins", "device": 0, "paths": [str(path)]}
    outcome = run_child(case, check="cubin load", subject="bad", timeout=60)
    assert outcome.status is Status.FAIL
    assert "cuModuleLoadData" in outcome.detail
