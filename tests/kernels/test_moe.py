"""Fused MoE: runners, each release's arguments, scales in their order, and what is refused by name."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernel_depot.kernels import allocator, moe
from kernel_depot.kernels.errors import InvalidArgument, KernelCallFailed, ModuleMissing, SignatureMismatch
from kernel_depot.kernels.memory import CPU, Device
from kernel_depot.kernels.moe import (
    Activation,
    BlockScales,
    Fp8Scales,
    FusedMoe,
    HeadersMissing,
    Parallelism,
    Precision,
    Weights,
)
from kernel_depot.platform import Sm

HOST = Device(CPU)
RELEASES = [(0, 6, 3), (0, 6, 18), (0, 7, 4)]
URI = "fused_moe_90"
F16, BF16, E4M3 = [2, 16, 1], [4, 16, 1], [10, 8, 1]
EXPERTS, HIDDEN, INTER = 4, 256, 128


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host's device count as an H200."""
    monkeypatch.setattr(moe, "device_sm", lambda device: Sm(9, 0))


def half(*shape: int) -> Any:
    return np.zeros(shape, np.float16)


def weights(**changes: Any) -> Weights:
    given = {"fc1": half(EXPERTS, 2 * INTER, HIDDEN), "fc2": half(EXPERTS, HIDDEN, INTER), **changes}
    return Weights(**given)


def call(**changes: Any) -> dict[str, Any]:
    """6 tokens with two experts each."""
    return {
        "x": half(6, HIDDEN),
        "experts": np.zeros((6, 2), np.int32),
        "weights": weights(),
        "out": half(6, HIDDEN),
        **changes,
    }


@pytest.fixture
def mixture(stand_ins: Any) -> FusedMoe:
    stand_ins.add_moe(URI, (0, 6, 3))
    return FusedMoe(dtype="f16", device=HOST, runtime=stand_ins.runtime((0, 6, 3)))


@pytest.mark.parametrize("release", RELEASES)
def test_half_precision_sends_every_argument_in_its_place(stand_ins: Any, release: tuple[int, ...]) -> None:
    stand_ins.add_moe(URI, release)
    mixture = FusedMoe(
        dtype="f16", device=HOST, activation=Activation.SWIGLU_BIAS, runtime=stand_ins.runtime(release),
        parallelism=Parallelism(tp_size=2, tp_rank=1, ep_size=4, ep_rank=3),
    )  # fmt: skip
    later = [] if release < (0, 6, 15) else [True, False]
    (made,) = stand_ins.calls(URI)
    assert (made.function, made.arguments) == ("init", [F16, F16, F16, False, False, False, False, *later])

    held = weights(fc1_bias=half(EXPERTS, 2 * INTER), fc2_bias=half(EXPERTS, HIDDEN))
    limits = {f"swiglu_{name}": np.zeros(EXPERTS, np.float32) for name in ("alpha", "beta", "limit")}
    given = call(weights=held)
    gates = np.zeros((6, 2), np.float32)
    mixture.run(**given, expert_scales=gates, **limits, profile_ids=(4, 2), enable_pdl=True)
    (run,) = stand_ins.calls(URI)
    activation = {(0, 6, 3): [], (0, 6, 18): [True], (0, 7, 4): [None, None, None, True]}[release]
    tail = {(0, 6, 3): [], (0, 6, 18): [None], (0, 7, 4): [None, 0]}[release]
    profiles = [4, 2] if release < (0, 6, 18) else [4, 5 + 2]
    assert run.shapes == [
        [6, HIDDEN], [6, HIDDEN], [6, 2], [6, 2], [EXPERTS, 2 * INTER, HIDDEN], [EXPERTS, 2 * INTER],
        [EXPERTS, HIDDEN, INTER], [EXPERTS, HIDDEN], None, None, [EXPERTS], [EXPERTS], [EXPERTS], *activation,
        2, 1, 4, 3, 1, 0, False, False, profiles, True, 5, *tail,
    ]  # fmt: skip
    sent = [run.arguments[at]["address"] for at in (0, 1, 2, 3, 4, 6)]
    arrays = (given["out"], given["x"], given["experts"], gates, held.fc1, held.fc2)
    assert sent == [array.ctypes.data for array in arrays]


def test_fp8_sends_four_scales_in_the_kernels_order(stand_ins: Any, tensor: Any) -> None:
    stand_ins.add_moe(URI, (0, 6, 3))
    mixture = FusedMoe(
        dtype="bf16", device=HOST, precision=Precision.FP8, runtime=stand_ins.runtime((0, 6, 3))
    )
    assert stand_ins.calls(URI)[0].arguments[:4] == [E4M3, E4M3, BF16, False]
    scales = Fp8Scales(tensor("f32", EXPERTS), tensor("f32"), tensor("f32", EXPERTS), tensor("f32"))
    held = Weights(
        tensor("e4m3", EXPERTS, 2 * INTER, HIDDEN), tensor("e4m3", EXPERTS, HIDDEN, INTER), scales=scales
    )
    given = call(x=tensor("e4m3", 6, HIDDEN), out=tensor("bf16", 6, HIDDEN), weights=held)
    mixture.run(**given)
    (run,) = stand_ins.calls(URI)
    assert [part["shape"] for part in run.arguments[8]] == [[EXPERTS], [], [EXPERTS], []]
    assert [part["address"] for part in run.arguments[8]] == [
        scale.data_ptr()
        for scale in (scales.fc1_dequant, scales.fc2_quant, scales.fc2_dequant, scales.fc1_input_dequant)
    ]
    wrong = {
        "fc1_dequant": tensor("f32", EXPERTS + 1),
        "fc2_quant": tensor("f32", 1, 1),
        "fc2_dequant": tensor("f16", EXPERTS),
        "fc1_input_dequant": tensor("f32", 1),
    }
    for name, value in wrong.items():
        parts = {**scales.__dict__, name: value}
        with pytest.raises(InvalidArgument) as caught:
            mixture.run(**{**given, "weights": Weights(held.fc1, held.fc2, scales=Fp8Scales(**parts))})
        assert caught.value.name == f"weights.scales.{name}"
    assert stand_ins.calls(URI) == []


def test_deepseek_sets_its_headers_and_sends_block_scales(
    stand_ins: Any, tensor: Any, tmp_path: Path
) -> None:
    stand_ins.add_moe(URI, (0, 6, 3))
    runtime = stand_ins.runtime((0, 6, 3))
    given: dict[str, Any] = {"dtype": "bf16", "device": HOST, "precision": Precision.DEEPSEEK}
    for headers in (None, (), (tmp_path,)):
        with pytest.raises(HeadersMissing, match="nv_internal/tensorrt_llm"):
            FusedMoe(**given, headers=headers, runtime=runtime)
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm/fp8_gemm_impl.cuh").touch()
    (tmp_path / "cuda_fp8.h").touch()
    mixture = FusedMoe(**given, headers=[tmp_path], runtime=runtime)
    headers_set, made = stand_ins.calls(URI)
    assert (headers_set.function, headers_set.arguments) == (
        "set_deepgemm_jit_include_dirs",
        [[str(tmp_path)]],
    )
    assert made.arguments == [BF16, E4M3, BF16, True, False, False, False]
    del mixture
    runtime.headers = (tmp_path,)
    mixture = FusedMoe(**given, runtime=runtime)
    assert stand_ins.calls(URI)[0].arguments == [[str(tmp_path)]]
    fc1, fc2 = tensor("e4m3", EXPERTS, 2 * INTER, HIDDEN), tensor("e4m3", EXPERTS, HIDDEN, INTER)
    scales = BlockScales(tensor("f32", EXPERTS, 2, 2), tensor("f32", EXPERTS, 2, 1))
    tokens = {"x": tensor("bf16", 6, HIDDEN), "out": tensor("bf16", 6, HIDDEN)}
    mixture.run(**call(**tokens, weights=Weights(fc1, fc2, scales=scales)))
    (run,) = stand_ins.calls(URI)
    assert [part["shape"] for part in run.arguments[8]] == [[EXPERTS, 2, 2], [EXPERTS, 2, 1]]
    narrow = Weights(tensor("e4m3", EXPERTS, 192, HIDDEN), tensor("e4m3", EXPERTS, HIDDEN, 96), scales=scales)
    with pytest.raises(InvalidArgument, match="inter divisible by 128"):
        mixture.run(**call(**tokens, weights=narrow))
    with pytest.raises(InvalidArgument, match="BlockScales with deepseek"):
        mixture.run(**call(**tokens, weights=Weights(fc1, fc2)))


def test_deepseek_looks_for_cudas_headers_too(
    stand_ins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVRTC has no cuda_fp8.h of its own, and looks in no directory that it was not told of."""
    from cuda import pathfinder

    stand_ins.add_moe(URI, (0, 6, 3))
    given: dict[str, Any] = {"dtype": "bf16", "device": HOST, "precision": Precision.DEEPSEEK}
    given |= {"headers": [tmp_path], "runtime": stand_ins.runtime((0, 6, 3))}
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm/fp8_gemm_impl.cuh").touch()
    cuda = tmp_path / "cuda"
    cuda.mkdir()
    asked = []

    def find(name: str) -> str | None:
        asked.append(name)
        return str(cuda) if len(asked) > 1 else None

    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", find)
    for found in ("no directory", "no such file"):
        with pytest.raises(HeadersMissing, match="nvidia-cuda-runtime") as caught:
            FusedMoe(**given)
        assert caught.value.found == found
    assert stand_ins.calls(URI) == []
    (cuda / "cuda_fp8.h").touch()
    mixture = FusedMoe(**given)
    assert stand_ins.calls(URI)[0].arguments == [[str(tmp_path), str(cuda)]]
    assert mixture.uri == URI
    assert asked == ["cudart"] * 3


@pytest.mark.parametrize(
    ("sm", "uri"),
    [
        (Sm(9, 0), "fused_moe_90"),
        (Sm(10, 0), "fused_moe_100"),
        (Sm(10, 3), "fused_moe_103"),
        (Sm(11, 0), "fused_moe_100"),
        (Sm(12, 0), "fused_moe_120"),
        (Sm(12, 1), "fused_moe_120"),
    ],
)
def test_every_gpu_calls_its_module(
    stand_ins: Any, monkeypatch: pytest.MonkeyPatch, sm: Sm, uri: str
) -> None:
    monkeypatch.setattr(moe, "device_sm", lambda device: sm)
    with pytest.raises(ModuleMissing) as caught:
        FusedMoe(dtype="f16", device=HOST, runtime=stand_ins.runtime((0, 6, 3)))
    assert caught.value.uri == uri
    stand_ins.add_moe(uri, (0, 6, 3))
    mixture = FusedMoe(dtype="f16", device=HOST, runtime=stand_ins.runtime((0, 6, 3)))
    mixture.run(**call())
    assert [one.function for one in stand_ins.calls(uri)] == ["init", "run_moe"]
    if sm != Sm(9, 0):
        with pytest.raises(InvalidArgument, match="precision"):
            FusedMoe(
                dtype="bf16", device=HOST, precision=Precision.DEEPSEEK, runtime=stand_ins.runtime((0, 6, 3))
            )


def test_a_runner_is_one_for_its_types_and_goes_with_its_last_user(stand_ins: Any) -> None:
    stand_ins.add_moe(URI, (0, 6, 3))
    runtime = stand_ins.runtime((0, 6, 3))
    same = [FusedMoe(dtype="f16", device=HOST, runtime=runtime) for _ in range(3)]
    other = FusedMoe(dtype="bf16", device=HOST, runtime=runtime)
    assert stand_ins.runners(URI) == 2
    same[0].run(**call())
    del same[1:]
    gc.collect()
    assert stand_ins.runners(URI) == 2
    same[0].run(**call())
    del same, other
    gc.collect()
    assert stand_ins.runners(URI) == 0
    again = FusedMoe(dtype="f16", device=HOST, runtime=runtime)
    again.run(**call())
    assert stand_ins.runners(URI) == 1


def test_memory_of_a_call_is_given_back_at_its_end(mixture: FusedMoe) -> None:
    before = allocator.live()
    for _ in range(100):
        mixture.run(**call())
    assert allocator.live() == before


def test_the_runners_own_text_arrives(mixture: FusedMoe, stand_ins: Any) -> None:
    stand_ins.fail_next(URI, "Could not construct fused moe op")
    with pytest.raises(KernelCallFailed, match="Could not construct fused moe op"):
        mixture.run(**call())


def test_a_module_of_another_release_is_refused(stand_ins: Any) -> None:
    stand_ins.add_moe(URI, (0, 7, 4))
    with pytest.raises(SignatureMismatch):
        FusedMoe(dtype="f16", device=HOST, runtime=stand_ins.runtime((0, 6, 3)))


@pytest.mark.parametrize(
    ("activation", "numbers"),
    [(Activation.GELU, (0, 0, 0)), (Activation.RELU2, (6, 6, 6)), (Activation.IDENTITY, (7, 9, 9))],
)
def test_an_activation_has_its_releases_number(
    stand_ins: Any, activation: Activation, numbers: tuple[int, ...]
) -> None:
    for release, number in zip(RELEASES, numbers, strict=True):
        assert activation.number(release) == number
    assert Activation.IDENTITY.number((0, 6, 13)) == 8
    stand_ins.add_moe(URI, (0, 6, 3))
    mixture = FusedMoe(dtype="f16", device=HOST, activation=activation, runtime=stand_ins.runtime((0, 6, 3)))
    with pytest.raises(InvalidArgument, match=r"weights\.fc1"):
        mixture.run(**call())
    mixture.run(**call(weights=weights(fc1=half(EXPERTS, INTER, HIDDEN))))
    assert stand_ins.calls(URI)[-1].arguments[23] == numbers[0]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("x", {"x": half(6, HIDDEN, 1)}),
        ("x", {"x": half(0, HIDDEN), "out": half(0, HIDDEN)}),
        ("x", {"x": np.zeros((6, HIDDEN), np.float32)}),
        ("x", {"x": half(6, 2 * HIDDEN)[:, ::2]}),
        ("out", {"out": half(5, HIDDEN)}),
        ("out", {"out": np.zeros((6, HIDDEN), np.float32)}),
        ("out", {"out": half(6, 2 * HIDDEN)[:, :HIDDEN]}),
        ("experts", {"experts": np.zeros((6, 2), np.int64)}),
        ("experts", {"experts": np.zeros((5, 2), np.int32)}),
        ("experts", {"experts": np.zeros((6, 0), np.int32)}),
        ("experts", {"experts": np.zeros((6, EXPERTS + 1), np.int32)}),
        ("expert_scales", {"expert_scales": np.zeros((6, 1), np.float32)}),
        ("expert_scales", {"expert_scales": half(6, 2)}),
        ("weights.fc1", {"weights": weights(fc1=half(EXPERTS, INTER, HIDDEN))}),
        ("weights.fc1", {"weights": weights(fc1=half(EXPERTS + 1, 2 * INTER, HIDDEN))}),
        ("weights.fc2", {"weights": weights(fc2=half(EXPERTS, HIDDEN))}),
        ("weights.fc2", {"weights": weights(fc2=np.zeros((EXPERTS, HIDDEN, INTER), np.float32))}),
        (
            "weights.fc2",
            {"weights": weights(fc1=half(EXPERTS, 8, HIDDEN), fc2=half(EXPERTS, HIDDEN, 4))},
        ),
        ("weights.fc1_bias", {"weights": weights(fc1_bias=half(EXPERTS, 2 * INTER))}),
        ("weights.fc2_bias", {"weights": weights(fc2_bias=half(EXPERTS, HIDDEN))}),
        (
            "weights.fc1_bias",
            {"weights": weights(fc1_bias=half(EXPERTS, INTER), fc2_bias=half(EXPERTS, HIDDEN))},
        ),
        ("weights.scales", {"weights": weights(scales=BlockScales(None, None))}),
        ("swiglu_alpha", {"swiglu_alpha": np.zeros(EXPERTS, np.float32)}),
        ("profile_ids[0]", {"profile_ids": (5, None)}),
        ("profile_ids[1]", {"profile_ids": (None, 3)}),
        ("profile_ids[1]", {"profile_ids": (0, -1)}),
        ("stream", {"stream": "none"}),
    ],
)
def test_a_wrong_argument_is_refused_by_name_and_nothing_is_sent(
    mixture: FusedMoe, stand_ins: Any, name: str, changes: dict[str, Any]
) -> None:
    stand_ins.calls(URI)
    with pytest.raises(InvalidArgument) as caught:
        mixture.run(**call(**changes))
    assert caught.value.name == name
    assert stand_ins.calls(URI) == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tp_size", {"tp_size": 0}),
        ("tp_rank", {"tp_size": 2, "tp_rank": 2}),
        ("ep_rank", {"ep_rank": -1}),
        ("ep_rank", {"ep_rank": 1}),
    ],
)
def test_ranks_lie_within_their_size(name: str, options: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Parallelism(**options)
    assert caught.value.name == name


def test_dtypes_it_has_no_kernels_for_are_refused(stand_ins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = stand_ins.runtime((0, 6, 3))
    with pytest.raises(InvalidArgument, match="dtype"):
        FusedMoe(dtype="f32", device=HOST, runtime=runtime)
    with pytest.raises(InvalidArgument, match="dtype"):
        FusedMoe(dtype="f16", device=HOST, precision=Precision.DEEPSEEK, runtime=runtime)
    monkeypatch.setattr(moe, "device_sm", lambda device: None)
    with pytest.raises(InvalidArgument, match="device"):
        FusedMoe(dtype="f16", device=HOST, runtime=runtime)
