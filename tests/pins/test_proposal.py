"""A set with some of its pins replaced, and its text, which says the same when it is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_depot.pins.document import parse_pin_set
from kernel_depot.pins.groups import ModuleGroup
from kernel_depot.pins.pin import IndexOrigin, Pin, PinSet, StoreOrigin, UrlOrigin
from kernel_depot.pins.problem import PinSetInvalid
from kernel_depot.pins.proposal import pin_set_text, propose
from kernel_depot.platform import Arch, CudaTag, Sm

URL = "https://github.com/x/flashinfer_jit_cache-0.6.3+cu130-py3-none-any.whl"


def pin(sha256: str = "a", *, sm: str | None = None, local: str = "cu130", store: bool = False) -> Pin:
    filename = f"flashinfer_jit_cache-0.6.3+{local}-py3-none-any.whl"
    return Pin(
        project="flashinfer_jit_cache",
        version=f"0.6.3+{local}",
        filename=filename,
        sha256=sha256 * 64,
        cuda=CudaTag(13, 0),
        arch=Arch.X86_64,
        sm=Sm.parse(sm) if sm else None,
        origin=StoreOrigin() if store else UrlOrigin(f"https://github.com/x/{filename}"),
    )


def test_a_pin_for_the_same_platform_is_replaced_and_the_others_stay() -> None:
    monolith, provider = pin("a"), pin("b", sm="sm90a", local="cu130.one")
    other = replace(
        pin("c"),
        project="apache_tvm_ffi",
        version="0.1.6",
        filename="apache_tvm_ffi-0.1.6-py3-none-any.whl",
        origin=IndexOrigin("pypi"),
        size=7,
        record_sha256="d" * 64,
    )
    groups = (ModuleGroup("opponent", ("norm",)),)
    current = PinSet("mine", (monolith, provider, other), "# a comment\n", "a file", groups)
    built = pin("e", sm="sm90a", local="cu130.two", store=True)
    proposal = propose(current, [built], name="mine", origin="a test")
    assert set(proposal.pin_set.pins) == {monolith, other, built}
    assert proposal.replaced == (provider,)
    assert proposal.pin_set.groups == groups
    assert proposal.pin_set.digest != current.digest
    again = propose(proposal.pin_set, [built], name="mine", origin="a test")
    assert again.replaced == ()
    assert again.pin_set.digest == proposal.pin_set.digest


def test_a_set_begins_with_its_first_pin() -> None:
    proposal = propose(None, [pin(store=True)], name="mine", origin="a test")
    assert proposal.pin_set.pins == (pin(store=True),)
    assert "store = true" in proposal.pin_set.text


def test_what_would_be_wrong_is_refused() -> None:
    current = PinSet("mine", (pin("a"),), "", "a file")
    with pytest.raises(PinSetInvalid, match="hash-conflict"):
        propose(current, [pin("b", sm="sm90a")], name="mine", origin="a test")


ORIGINS = st.one_of(
    st.just(StoreOrigin()), st.just(IndexOrigin("pypi")), st.just(UrlOrigin(URL)), st.just(UrlOrigin(URL))
)


@given(
    places=st.sets(
        st.tuples(
            st.sampled_from([Arch.X86_64, Arch.AARCH64]),
            st.sampled_from([None, "sm90a", "sm100a", "sm121"]),
        ),
        min_size=1,
    ),
    origin=ORIGINS,
    size=st.one_of(st.none(), st.integers(1, 2**53 - 1)),
    default=st.booleans(),
)
def test_a_written_set_is_read_back_as_it_was(
    places: set[tuple[Arch, str | None]], origin: object, size: int | None, default: bool
) -> None:
    pins = [replace(pin(sm=sm), arch=arch, origin=origin, size=size) for arch, sm in sorted(places, key=str)]
    groups = (ModuleGroup("opponent", ("norm", "page"), default),)
    text = pin_set_text(pins, groups=groups)
    read = parse_pin_set(text, name="mine", origin="a test")
    assert set(read.pins) == set(pins)
    assert read.groups == groups
