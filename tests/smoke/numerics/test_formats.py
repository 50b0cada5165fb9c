"""Number formats: what their bits mean, and that encoding takes the nearest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_depot.smoke.numerics.formats import POISON, decode, encode, storage

FLOATS = ["f16", "bf16", "f32", "e4m3", "e5m2"]


@pytest.mark.parametrize(
    ("dtype", "bits", "value"),
    [
        ("bf16", 0x3F80, 1.0),
        ("bf16", 0xC049, -3.140625),
        ("f16", np.float16(-1.5), -1.5),
        ("e4m3", 0x38, 1.0),
        ("e4m3", 0x7E, 448.0),
        ("e4m3", 0x01, 2.0**-9),
        ("e4m3", 0xC4, -3.0),
        ("e5m2", 0x3C, 1.0),
        ("e5m2", 0x7B, 57344.0),
        ("e5m2", 0x01, 2.0**-16),
        ("e5m2", 0x7C, np.inf),
        ("e5m2", 0xFC, -np.inf),
    ],
)
def test_bits_mean_what_the_standard_says(dtype: str, bits: object, value: float) -> None:
    assert decode(dtype, np.array([bits], storage(dtype)))[0] == value


@pytest.mark.parametrize("dtype", FLOATS)
def test_poison_is_no_number(dtype: str) -> None:
    bits = np.frombuffer(bytes([POISON]) * storage(dtype).itemsize, storage(dtype))
    assert np.isnan(decode(dtype, bits)[0])


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_every_finite_byte_is_encoded_again(dtype: str) -> None:
    every = np.arange(256, dtype=np.uint8)
    values = decode(dtype, every)
    finite = np.isfinite(values)
    assert int(finite.sum()) == {"e4m3": 254, "e5m2": 248}[dtype]
    assert np.array_equal(decode(dtype, encode(dtype, values[finite])), values[finite])


@given(st.lists(st.floats(-400, 400), min_size=1, max_size=20), st.sampled_from(["e4m3", "e5m2"]))
def test_no_other_byte_is_nearer(numbers: list[float], dtype: str) -> None:
    values = np.array(numbers)
    table = decode(dtype, np.arange(256, dtype=np.uint8))
    table = table[np.isfinite(table)]
    best = np.abs(table[None] - values[:, None]).min(axis=1)
    assert np.array_equal(np.abs(decode(dtype, encode(dtype, values)) - values), best)


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20))
def test_bf16_is_cut_off(numbers: list[float]) -> None:
    values = np.array(numbers)
    found = decode("bf16", encode("bf16", values))
    assert np.all(np.abs(found) <= np.abs(values))
    assert np.all(np.abs(found - values) <= np.maximum(np.abs(values) * 2.0**-7, 2.0**-133))
