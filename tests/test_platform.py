"""Platform words are read in every spelling and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_depot.platform import Arch, CudaTag, Platform, PlatformError, Sm, has_code_for


@pytest.mark.parametrize("text", ["cu130", "13.0", "130", " CU130 ", "cuda13.0"])
def test_cuda_spellings(text: str) -> None:
    assert CudaTag.parse(text) == CudaTag(13, 0)


@pytest.mark.parametrize("text", ["", "cu", "13", "cu1300", "13.10", "13.0.1", "cu13o", "-130"])
def test_what_is_no_cuda_version(text: str) -> None:
    with pytest.raises(PlatformError, match="not a CUDA version"):
        CudaTag.parse(text)


@pytest.mark.parametrize(
    ("text", "arch"),
    [("amd64", Arch.X86_64), ("X86_64", Arch.X86_64), ("arm64", Arch.AARCH64), ("aarch64", Arch.AARCH64)],
)
def test_arch_spellings(text: str, arch: Arch) -> None:
    assert Arch.parse(text) is arch


def test_an_unknown_arch_lists_the_known_ones() -> None:
    with pytest.raises(PlatformError) as caught:
        Arch.parse("riscv64")
    assert "aarch64" in str(caught.value.expected)


@pytest.mark.parametrize("text", ["sm90a", "sm_90a", "9.0a", "90a", "compute_90a"])
def test_sm_spellings(text: str) -> None:
    assert Sm.parse(text) == Sm(9, 0, "a")
    assert Sm.parse(text).target == "sm_90a"


@given(st.integers(5, 13), st.integers(0, 9), st.sampled_from(["", "a", "f"]))
def test_sm_round_trip(major: int, minor: int, suffix: str) -> None:
    sm = Sm(major, minor, suffix)
    assert Sm.parse(str(sm)) == Sm.parse(sm.target) == sm


@pytest.mark.parametrize(
    ("node", "sms", "ptx", "runs"),
    [
        ("sm90", ["sm_90a"], [], True),
        ("sm90", ["sm_80"], [], False),
        ("sm89", ["sm_80"], [], True),
        ("sm80", ["sm_89"], [], False),
        ("sm103", ["sm_100f"], [], True),
        ("sm103", ["sm_100a"], [], False),
        ("sm121", ["sm_120f"], [], True),
        ("sm121", [], ["compute_90"], True),
        ("sm121", [], ["compute_90a"], False),
        ("sm90", [], ["compute_90a"], True),
        ("sm80", [], ["compute_90"], False),
        ("sm90", [], [], False),
    ],
)
def test_which_code_runs_where(node: str, sms: list[str], ptx: list[str], runs: bool) -> None:
    assert has_code_for(Sm.parse(node), sms=sms, ptx=ptx) is runs


def test_platform_json_round_trip() -> None:
    for platform in (
        Platform(CudaTag(13, 0), Arch.X86_64),
        Platform(CudaTag(12, 9), Arch.AARCH64, Sm(9, 0, "a")),
    ):
        assert Platform.from_json(platform.to_json()) == platform
