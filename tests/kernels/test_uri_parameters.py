"""Reading a module's name is the reverse of writing it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_depot.kernels.attention import Backend, PosEncoding
from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.uri_parameters import AttentionModule, Family, MlaModule, PlainModule, parse_uri

RELEASES = {"a": (0, 6, 3), "b": (0, 6, 18), "c": (0, 7, 4)}
AHEAD = [line.split() for line in (Path(__file__).parent / "aot_modules.txt").read_text("ascii").splitlines()]
FP8_WITH_CAP = "use_logits_cap_True"


@pytest.mark.parametrize("letter", RELEASES)
def test_every_name_compiled_ahead_is_read_and_written_again(letter: str) -> None:
    names = [name for letters, name in AHEAD if letter in letters]
    assert names
    for name in names:
        parameters = parse_uri(name)
        if "_token_head_sf" in name:
            assert parameters is None
            continue
        assert parameters is not None, name
        if "dtype_q_e4m3" in name and FP8_WITH_CAP in name:
            with pytest.raises(InvalidArgument, match="logits_soft_cap"):
                parameters.uri(RELEASES[letter])
            continue
        assert parameters.uri(RELEASES[letter]) == name


HALF = st.sampled_from(["f16", "bf16"])


@st.composite
def attention_modules(draw: st.DrawFn) -> AttentionModule:
    half = draw(HALF)
    family = draw(
        st.sampled_from(
            [Family.SINGLE_PREFILL, Family.BATCH_PREFILL, Family.SINGLE_DECODE, Family.BATCH_DECODE]
        )
    )
    prefill = family in (Family.SINGLE_PREFILL, Family.BATCH_PREFILL)
    dtype_q = draw(st.sampled_from([half, "e4m3", "e5m2"])) if prefill else half
    return AttentionModule(
        family=family,
        dtype_q=dtype_q,
        dtype_kv=dtype_q if dtype_q != half else draw(st.sampled_from([half, "e4m3", "e5m2"])),
        dtype_o=half,
        head_dim_qk=draw(st.integers(1, 1000)),
        head_dim_vo=draw(st.integers(1, 1000)),
        pos_encoding=draw(st.sampled_from(PosEncoding)),
        window=draw(st.booleans()),
        soft_cap=dtype_q == half and draw(st.booleans()),
        f16_qk_reduction=prefill and dtype_q == "f16" and draw(st.booleans()),
        backend=draw(st.sampled_from([Backend.FA2, Backend.FA3])) if prefill else Backend.FA2,
    )


@given(attention_modules(), st.sampled_from(sorted(RELEASES.values())))
def test_attention_is_read_as_it_was_written(module: AttentionModule, release: tuple[int, ...]) -> None:
    assert parse_uri(module.uri(release)) == module


@given(HALF, st.integers(1, 999), st.integers(1, 999), st.sampled_from(sorted(RELEASES.values())))
def test_latent_attention_is_read_as_it_was_written(
    half: str, ckv: int, kpe: int, release: tuple[int, ...]
) -> None:
    for backend in (Backend.FA2, Backend.FA3):
        module = MlaModule(half, half, half, ckv, kpe, backend)
        assert parse_uri(module.uri(release)) == module


@given(st.text(max_size=60))
def test_no_text_is_read_as_a_module_that_would_be_called_otherwise(text: str) -> None:
    for uri in (text, "norm" + text, "fused_moe_" + text):
        found = parse_uri(uri)
        if found is not None:
            assert isinstance(found, PlainModule)
            assert found.uri((0, 6, 3)) == uri


@pytest.mark.parametrize(
    "name",
    [
        "batch_attention_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16",
        "sampling",
        "fused_moe_",
        "norm_sm90",
        "batch_mla_attention_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_ckv_512_"
        "head_dim_kpe_64_profiler_True",
    ],
)
def test_what_is_not_called_here_is_not_read(name: str) -> None:
    assert parse_uri(name) is None


def test_a_release_that_calls_it_otherwise_is_noticed() -> None:
    name = next(name for letters, name in AHEAD if name.endswith("_False_kv_stride_equal") and "c" in letters)
    parameters = parse_uri(name)
    assert parameters is not None
    assert [parameters.uri(release) == name for release in RELEASES.values()] == [False, False, True]
