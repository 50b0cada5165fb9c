"""Module names against those that FlashInfer compiles ahead, and against its own functions.

`aot_modules.txt` lists the ahead-of-time modules of the families that are called here (flashinfer/aot.py,
every architecture), each behind the releases that have it: a is 0.6.3, b 0.6.18, c 0.7.4.
"""

from __future__ import annotations

import ast
import itertools
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernel_depot.kernels.attention import FA3_HEAD_DIMS, Attention, Backend, PosEncoding
from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.uri import (
    GDN_PREFILL,
    NORM,
    PAGE,
    Release,
    batch_decode_uri,
    batch_mla_uri,
    batch_prefill_uri,
    fused_moe_uri,
    single_decode_uri,
    single_prefill_uri,
)

RELEASES: dict[str, Release] = {"a": (0, 6, 3), "b": (0, 6, 18), "c": (0, 7, 4)}
AHEAD = [line.split() for line in (Path(__file__).parent / "aot_modules.txt").read_text("ascii").splitlines()]
HALVES = ("f16", "bf16")
SQUARE = [(dim, dim) for dim in (64, 128, 256)]


def ahead(letter: str) -> set[str]:
    """Return a release's modules; those with a scale for each token's head are called by nothing here."""
    return {name for letters, name in AHEAD if letter in letters and "_token_head_sf" not in name}


def attentions(dims: list[tuple[int, int]], dtypes: list[tuple[str, str, str]]) -> Iterator[Attention]:
    for (qk, vo), (q, kv, o), swa, cap in itertools.product(dims, dtypes, (-1, 8), (0.0, 30.0)):
        if q == "e4m3" and cap:
            continue  # refused
        yield Attention(
            num_qo_heads=8, num_kv_heads=8, head_dim_qk=qk, head_dim_vo=vo, dtype_q=q, dtype_kv=kv, dtype_o=o,
            window_left=swa, logits_soft_cap=cap,
        )  # fmt: skip


def called(release: Release) -> set[str]:
    """Return every name that calls can ask for, with what upstream compiles ahead for that release."""
    cache = [(half, kv, half) for half in HALVES for kv in (half, "e4m3")]
    plain = [(half, half, half) for half in HALVES]
    names = {NORM, PAGE, *(fused_moe_uri(sm) for sm in ("sm90a", "sm100a", "sm103a", "sm120f"))}
    if release < (0, 6, 14):
        names.add(GDN_PREFILL)
    for one in attentions(SQUARE, cache):
        names |= {batch_decode_uri(one), batch_prefill_uri(one, Backend.FA2, release)}
        if release < (0, 7):
            names |= {single_decode_uri(one), single_prefill_uri(one, Backend.FA2)}
    for one in attentions(sorted(FA3_HEAD_DIMS), plain):
        names.add(batch_prefill_uri(one, Backend.FA3, release))
    for one in attentions([(128, 128), (256, 256)], [("e4m3", "e4m3", half) for half in HALVES]):
        names.add(batch_prefill_uri(one, Backend.FA3, release))
    for half, backend in itertools.product(HALVES, (Backend.FA2, Backend.FA3)):
        names.add(mla(half, backend, release))
    return names


def mla(dtype: str, backend: Backend, release: Release) -> str:
    return batch_mla_uri(
        dtype_q=dtype, dtype_kv=dtype, dtype_o=dtype, head_dim_ckv=512, head_dim_kpe=64, backend=backend,
        release=release,
    )  # fmt: skip


@pytest.mark.parametrize("letter", RELEASES)
def test_names_are_those_compiled_ahead_no_more_and_no_fewer(letter: str) -> None:
    names, compiled = called(RELEASES[letter]), ahead(letter)
    assert sorted(names - compiled) == []
    # Upstream also compiles FP8 queries with a soft cap, which that kernel leaves out (DefaultFP8Attention).
    assert [name for name in sorted(compiled - names) if "use_logits_cap_True" not in name] == []
    assert all("dtype_q_e4m3" in name for name in compiled - names)


@pytest.mark.parametrize(
    ("sm", "module"),
    [
        ("sm89", "89"),
        ("sm90", "90"),
        ("sm90a", "90"),
        ("sm100", "100"),
        ("sm100a", "100"),
        ("sm103a", "103"),
        ("sm110a", "100"),
        ("sm120f", "120"),
        ("sm121a", "120"),
    ],
)
def test_each_gpu_has_its_fused_moe(sm: str, module: str) -> None:
    assert fused_moe_uri(sm) == f"fused_moe_{module}"


@pytest.mark.parametrize("sm", ["sm75", "sm80", "sm86", "sm130", "h200", ""])
def test_a_gpu_without_fused_moe_is_told_which_have_one(sm: str) -> None:
    with pytest.raises(InvalidArgument, match="sm121") as caught:
        fused_moe_uri(sm)
    assert caught.value.name == "sm"


class _Same(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return key


def upstream(version: str) -> dict[str, Callable[..., str]]:
    """Return flashinfer-python's own URI functions, out of its wheel, with names of dtypes for dtypes.

    `KERNEL_DEPOT_TEST_WHEELS` is a directory with the wheels, which are not fetched for this.
    """
    place = Path(
        os.environ.get("KERNEL_DEPOT_TEST_WHEELS", ""), f"flashinfer_python-{version}-py3-none-any.whl"
    )
    if not place.is_file():
        pytest.skip(f"KERNEL_DEPOT_TEST_WHEELS has no {place.name}")
    with zipfile.ZipFile(place) as wheel:
        tree = ast.parse(wheel.read("flashinfer/jit/attention/modules.py"))
    functions = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.endswith("_uri")
    ]
    for function in functions:
        function.returns = None
        for argument in (*function.args.args, *function.args.kwonlyargs):
            argument.annotation = None
    space: dict[str, Any] = {
        "torch": SimpleNamespace(),
        "filename_safe_dtype_map": _Same(),
        "filename_safe_dtype_map_kv": str,
    }
    exec(compile(ast.Module(functions, []), str(place), "exec"), space)
    return space


@pytest.mark.parametrize("release", [(0, 6, 3), (0, 7, 4)])
def test_names_are_those_of_flashinfers_own_functions(release: Release) -> None:
    functions = upstream(".".join(map(str, release)))
    end = "_kv_stride_equal" if release >= (0, 7) else ""
    dtypes = [(half, kv, half) for half in HALVES for kv in (half, "e4m3", "e5m2")]
    for one in attentions([*SQUARE, (192, 128)], dtypes):
        for posenc, f16qk in itertools.product(PosEncoding, (False, True)):
            if f16qk and one.dtype_q != "f16":
                continue
            asked = Attention(**{**one.__dict__, "pos_encoding": posenc, "f16_qk_reduction": f16qk})
            kinds = (asked.dtype_q, asked.dtype_kv, asked.dtype_o)
            rest = (
                asked.head_dim_qk, asked.head_dim_vo, int(posenc), asked.window_left >= 0,
                asked.logits_soft_cap > 0,
            )  # fmt: skip
            assert functions["get_single_decode_uri"](*kinds, *rest) == single_decode_uri(asked)
            assert functions["get_batch_decode_uri"](*kinds, "i32", *rest) == batch_decode_uri(asked)
            for backend in (Backend.FA2, Backend.FA3):
                single = functions["get_single_prefill_uri"](str(backend), *kinds, *rest, f16qk)
                assert single == single_prefill_uri(asked, backend)
                batch = functions["get_batch_prefill_uri"](str(backend), *kinds, "i32", *rest, f16qk)
                tail = end if backend is Backend.FA2 else ""
                assert batch + tail == batch_prefill_uri(asked, backend, release)
    for half, backend in itertools.product(HALVES, (Backend.FA2, Backend.FA3)):
        own = functions["get_batch_mla_uri"](str(backend), half, half, half, "i32", 512, 64, False)
        assert own == mla(half, backend, release)
