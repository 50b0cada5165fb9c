"""What kernels compute, in float64: the mathematics alone, written for reading."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kernel_depot.kernels.attention import Attention, PosEncoding
from kernel_depot.smoke.numerics.formats import Reals

Seen = NDArray[np.bool_]
"""[rows, keys]: which keys each query sees."""

Request = tuple[Reals, Reals, Reals]
"""Queries [rows, heads, dim], keys and values [keys, kv_heads, dim] of one request."""

_FLOOR: Final = -1e30
"""Below every logit, and no infinity: a query without keys must not make a NaN."""


def rms_normalised(x: Reals, weight: Reals, *, eps: float) -> Reals:
    """Return the RMSNorm of the last dimension."""
    out: Reals = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight
    return out


def layer_normalised(x: Reals, gamma: Reals, beta: Reals, *, eps: float) -> Reals:
    """Return the LayerNorm of the last dimension."""
    centred = x - x.mean(axis=-1, keepdims=True)
    out: Reals = centred / np.sqrt(centred.var(axis=-1, keepdims=True) + eps) * gamma + beta
    return out


def attend(
    q: Reals,
    k: Reals,
    v: Reals,
    *,
    scale: float,
    mask: Seen | None = None,
    bias: Reals | None = None,
    cap: float = 0.0,
) -> tuple[Reals, Reals]:
    """Return attention [rows, heads, dim] and the base-2 logarithm of the softmax's sum [rows, heads].

    `q` [rows, heads, dim], `k` and `v` [keys, kv_heads, dim], `bias` [heads, rows, keys].
    """
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    logits = np.einsum("qhd,khd->hqk", q, k, optimize=True) * scale
    if bias is not None:
        logits = logits + bias
    if cap:
        logits = cap * np.tanh(logits / cap)
    if mask is not None:
        logits = np.where(mask[None], logits, -np.inf)
    top = logits.max(axis=-1, keepdims=True, initial=_FLOOR)
    weights = np.exp(logits - top)
    total = weights.sum(axis=-1, keepdims=True)
    out = np.einsum("hqk,khd->qhd", weights / total, v, optimize=True)
    return out, ((top + np.log(total))[..., 0] / math.log(2)).T


def rotate(x: Reals, positions: NDArray[np.int64], *, scale: float, theta: float) -> Reals:
    """Return RoPE of `x` [tokens, heads, dim], halves rotated, as LLaMA does."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / scale * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def visible(rows: int, keys: int, *, causal: bool = False, window: int = -1) -> Seen:
    """Return which keys each query sees; the last query is at the last key."""
    at = np.arange(rows)[:, None] + keys - rows
    key = np.arange(keys)[None]
    seen = np.ones((rows, keys), dtype=bool)
    if causal:
        seen &= key <= at
    if window >= 0:
        seen &= key >= at - window
    return seen


def attended(
    attention: Attention, requests: list[Request], masks: list[Seen], slopes: Reals | None = None
) -> tuple[Reals, Reals]:
    """Return outputs and `lse` of all requests, one after another; `slopes` [heads] are ALiBi's."""
    outs, lses = [], []
    for (q, k, v), mask in zip(requests, masks, strict=True):
        rows, keys = mask.shape
        bias = None
        if attention.pos_encoding is PosEncoding.ROPE:
            spin = {"scale": attention.rope_scale, "theta": attention.rope_theta}
            q = rotate(q, np.arange(rows) + keys - rows, **spin)
            k = rotate(k, np.arange(keys), **spin)
        if slopes is not None:
            bias = slopes[:, None, None] * (np.arange(keys)[None, None] - np.arange(rows)[None, :, None])
        out, lse = attend(q, k, v, scale=attention.scale, mask=mask, bias=bias, cap=attention.logits_soft_cap)
        outs.append(out)
        lses.append(lse)
    return np.concatenate(outs), np.concatenate(lses)


def delta_rule(
    q: Reals, k: Reals, v: Reals, state: Reals, alpha: Reals, beta: Reals, *, scale: float
) -> tuple[Reals, Reals]:
    """Return the gated delta rule's outputs [tokens, heads, dim] and last state [heads, values, keys].

    `q`, `k`, `v` [tokens, heads, dim], each with its number of heads; `alpha`, `beta` [tokens, heads].
    """
    heads = max(q.shape[1], v.shape[1])
    q, k, v = (np.repeat(part, heads // part.shape[1], axis=1) for part in (q, k, v))
    state, outs = state.copy(), []
    for at in range(q.shape[0]):
        state *= alpha[at][:, None, None]
        missing = v[at] - np.einsum("hvk,hk->hv", state, k[at])
        state += beta[at][:, None, None] * missing[:, :, None] * k[at][:, None, :]
        outs.append(np.einsum("hvk,hk->hv", state, q[at]) * scale)
    return np.stack(outs), state


def mixed_experts(
    x: Reals, experts: NDArray[np.int32], expert_scales: Reals, fc1: Reals, fc2: Reals
) -> Reals:
    """Return SwiGLU experts' weighted sum [tokens, hidden].

    `x` [tokens, hidden]; `experts` and `expert_scales` [tokens, experts of a token]; `fc1` [experts, 2 inter,
    hidden], the linear half before the gate; `fc2` [experts, hidden, inter].
    """
    out = np.zeros_like(x)
    inter = fc2.shape[2]
    for token, (row, chosen, scales) in enumerate(zip(x, experts, expert_scales, strict=True)):
        for expert, scale in zip(chosen, scales, strict=True):
            both = fc1[expert] @ row
            linear, gate = both[:inter], both[inter:]
            out[token] += scale * (fc2[expert] @ (gate / (1.0 + np.exp(-gate)) * linear))
    return out
