"""The argument lists of FlashInfer's attention functions, in order, by the version they were compiled from.

What changed when: flashinfer's csrc/*_jit_binding.cu and jit/attention/modules.py of each version. A list is
a tuple of exactly what the function takes; nothing here looks at tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernel_depot.kernels.attention import FP8, Attention, Backend, MaskMode
from kernel_depot.kernels.uri import Release


@dataclass(frozen=True)
class Scales:
    """The factors of FP8 tensors, each a number, a float32 tensor with one number a head, or None for 1.0."""

    q: Any = None
    k: Any = None
    v: Any = None


NO_SCALES = Scales()


@dataclass(frozen=True)
class Extras:
    """The optional tensors of one attention. `token_pos_in_items_len` is the row length of that tensor."""

    custom_mask: Any = None
    mask_indptr: Any = None
    alibi_slopes: Any = None
    prefix_len: Any = None
    token_pos_in_items: Any = None
    max_item_len: Any = None
    token_pos_in_items_len: int = 0


def single_prefill_tail(
    attention: Attention, backend: Backend, release: Release, *, extras: Extras, scales: Scales
) -> tuple[Any, ...]:
    """What `run` of a single prefill takes after `window_left`."""
    if backend is Backend.FA3:
        return _fa3_tail(attention, extras, scales, items=False)
    return (
        extras.custom_mask,
        extras.alibi_slopes,
        *_block_scales(release),
        float(attention.logits_soft_cap),
        attention.scale,
        attention.rope_rcp_scale,
        attention.rope_rcp_theta,
    )


def batch_prefill_tail(
    attention: Attention, backend: Backend, release: Release, *, extras: Extras, scales: Scales
) -> tuple[Any, ...]:
    """What `ragged_run` and `paged_run` of a batch prefill take after `enable_pdl`."""
    if backend is Backend.FA3:
        return _fa3_tail(attention, extras, scales, items=True)
    return (
        extras.custom_mask,
        extras.mask_indptr,
        extras.alibi_slopes,
        extras.prefix_len,
        extras.token_pos_in_items,
        extras.max_item_len,
        *_block_scales(release),
        float(attention.logits_soft_cap),
        attention.scale,
        attention.rope_rcp_scale,
        attention.rope_rcp_theta,
        extras.token_pos_in_items_len,
    )


def batch_prefill_plan_tail(
    attention: Attention,
    backend: Backend,
    release: Release,
    *,
    cuda_graph: bool,
    fixed_split_size: int,
    disable_split_kv: bool,
    num_colocated_ctas: int,
) -> tuple[Any, ...]:
    """What `plan` of a batch prefill takes after `page_size`."""
    common = (
        cuda_graph,
        attention.head_dim_qk,
        attention.head_dim_vo,
        attention.mask in (MaskMode.CAUSAL, MaskMode.MULTI_ITEM),
        attention.window_left,
    )
    if backend is Backend.FA3:
        return common
    tail: tuple[Any, ...] = (fixed_split_size, disable_split_kv, num_colocated_ctas)
    if release >= (0, 6, 16):
        tail += (0,)  # uniform_q_len: not told, so the planner looks for itself
    if release >= (0, 7):
        tail += (False,)  # fixed_uniform_q_len
    return common + tail


def mla_run_tail(release: Release, *, sm_scale: float, lse_base_e: bool) -> tuple[Any, ...]:
    """What `run` of batch MLA takes after `page_size`; caches that are not FP8 have neutral scales."""
    tail: tuple[Any, ...] = (sm_scale, lse_base_e)
    if release >= (0, 6, 14):
        tail += (1.0, 1.0)
    if release >= (0, 6, 18):
        tail += (None,)
    return tail


def _block_scales(release: Release) -> tuple[None, ...]:
    """The block scales of a four-bit cache, which FlashAttention 2 takes from 0.6.10 on."""
    return (None, None) if release >= (0, 6, 10) else ()


def _fa3_tail(attention: Attention, extras: Extras, scales: Scales, *, items: bool) -> tuple[Any, ...]:
    v_tensor, v_number = _split(scales.v)
    if attention.dtype_q in FP8:
        q_tensor, q_number = _split(scales.q)
        k_tensor, k_number = _split(scales.k)
        return q_tensor, k_tensor, v_tensor, attention.scale, q_number, k_number, v_number
    numbers = (v_tensor, float(attention.logits_soft_cap), attention.scale, v_number)
    if not items:
        return numbers
    return (
        extras.prefix_len,
        extras.token_pos_in_items,
        extras.max_item_len,
        *numbers,
        extras.token_pos_in_items_len,
    )


def _split(scale: Any) -> tuple[Any, float]:
    """A factor as the kernels take it: a tensor, or None and a number."""
    if scale is None:
        return None, 1.0
    if isinstance(scale, int | float):
        return None, float(scale)
    return scale, 1.0
