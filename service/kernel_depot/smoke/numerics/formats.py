"""The number formats of kernels as numpy's bits, and the exact values of these bits as float64."""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]

_FP8: Final = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}
"""Bits of exponent and mantissa, and the exponent's bias (OCP 8-bit floating point: e4m3 has no infinity)."""

_STORAGE: Final[dict[str, np.dtype[Any]]] = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "f32": np.dtype(np.float32),
    "e4m3": np.dtype(np.uint8),
    "e5m2": np.dtype(np.uint8),
    "u8": np.dtype(np.uint8),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
}

POISON: Final = 0xFF
"""A byte that, repeated, is a NaN in every float format here."""


def storage(dtype: str) -> np.dtype[Any]:
    """Return the numpy dtype that holds a format's bits."""
    return _STORAGE[dtype]


def encode(dtype: str, values: Any) -> NDArray[Any]:
    """Return numbers in a format: bf16 cut off, FP8 rounded to the nearest, others as numpy rounds.

    Nothing may overflow. Inputs are what their bits say (`decode`), so how they were rounded is no error.
    """
    array = np.asarray(values)
    if dtype == "bf16":
        return (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype in _FP8:
        order, ascending = _nearest(dtype)
        at = np.searchsorted(ascending, np.asarray(array, np.float64)).clip(1, ascending.size - 1)
        below = np.abs(array - ascending[at - 1]) <= np.abs(array - ascending[at])
        return order[np.where(below, at - 1, at)]
    return array.astype(_STORAGE[dtype])


def decode(dtype: str, bits: NDArray[Any]) -> Reals:
    """Return what bits in a format mean."""
    if dtype == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype in _FP8:
        meant: Reals = _meanings(dtype)[bits]
        return meant
    return bits.astype(np.float64)


@functools.cache
def _meanings(dtype: str) -> Reals:
    """What each of the 256 bytes means."""
    exponent_bits, mantissa_bits, bias = _FP8[dtype]
    byte = np.arange(256)
    sign = np.where(byte & 0x80, -1.0, 1.0)
    exponent = (byte & 0x7F) >> mantissa_bits
    mantissa = (byte & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    scale = 2.0 ** (np.maximum(exponent, 1) - bias)
    values: Reals = sign * scale * (mantissa + (exponent > 0))
    top = (1 << exponent_bits) - 1
    if dtype == "e4m3":
        values[(byte & 0x7F) == 0x7F] = np.nan
    else:
        values[(exponent == top) & (mantissa == 0)] = np.inf
        values[(exponent == top) & (mantissa > 0)] = np.nan
        values[byte == 0xFC] = -np.inf
    return values


@functools.cache
def _nearest(dtype: str) -> tuple[NDArray[np.uint8], Reals]:
    """The bytes of finite numbers in ascending order, and these numbers; zero is the positive one."""
    values = _meanings(dtype)
    finite = np.array([byte for byte in range(256) if np.isfinite(values[byte]) and byte != 0x80], np.uint8)
    order = finite[np.argsort(values[finite], kind="stable")]
    return order, values[order]
