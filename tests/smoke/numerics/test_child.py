"""What a case's end comes to, also when the device is lost with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kernel_depot.kernels.errors import InvalidArgument, KernelCallFailed, NoCodeForGpu
from kernel_depot.kernels.memory import CPU, CUDA, CudaCallFailed, Device
from kernel_depot.kernels.moe import HeadersMissing
from kernel_depot.smoke.numerics import child
from kernel_depot.smoke.numerics.case import Case, Skipped
from kernel_depot.smoke.numerics.verdict import Distance, Wrong


def ending(end: BaseException | list[Distance], device: Device) -> dict[str, Any]:
    def run(_: Any) -> list[Distance]:
        if isinstance(end, BaseException):
            raise end
        return end

    bench: Any = SimpleNamespace(device=device)
    return child.run_case(Case("a case", run), bench)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (Wrong("out is off", expected="1", found="2"), "fail"),
        (Skipped("needs sm90"), "skipped"),
        (HeadersMissing("no headers"), "skipped"),
        (NoCodeForGpu("norm", where="x", sm="sm90", sms=(), ptx=()), "refused"),
        (KernelCallFailed("norm.rmsnorm", where="x", error=RuntimeError("no")), "fail"),
        (InvalidArgument("x", expected=1, found=2), "fail"),
        (CudaCallFailed("cudaMalloc: out of memory"), "fail"),
    ],
)
def test_each_ending_has_its_status(end: BaseException, status: str) -> None:
    assert ending(end, Device(CPU))["status"] == status


def test_the_output_nearest_its_limit_is_told() -> None:
    outcome = ending([Distance("lse", 1e-6, 2e-3), Distance("out", 5e-4, 1e-3)], Device(CPU))
    assert (outcome["status"], outcome["error"], outcome["limit"]) == ("pass", 5e-4, 1e-3)
    assert outcome["detail"] == "out 5.0e-04 of 1e-03"


def test_a_case_that_takes_the_device_with_it_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        raise CudaCallFailed("cudaDeviceSynchronize: an illegal memory access was encountered")

    monkeypatch.setattr(child, "cuda_runtime", lambda: SimpleNamespace(synchronize=synchronize))
    with pytest.raises(child.DeviceLost) as caught:
        ending(CudaCallFailed("cudaMemcpy failed"), Device(CUDA))
    outcome = caught.value.args[0]
    assert outcome["status"] == "crashed"
    assert "illegal memory access" in outcome["detail"]
