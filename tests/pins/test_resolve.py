"""A platform gets exact pins before near ones, providers before monoliths, and the reason for each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_depot.pins.pin import Pin, PinSet, UrlOrigin
from kernel_depot.pins.resolve import NothingFits, PinsConflict, Verdict, resolve
from kernel_depot.platform import Arch, CudaTag, Platform, Sm


def pin(project: str, cuda: str, arch: str = "x86_64", sm: str | None = None, mark: str = "a") -> Pin:
    filename = f"{project}-1-py3-none-manylinux_2_28_{arch}.whl"
    return Pin(
        project=project,
        version="1",
        filename=filename,
        sha256=(mark + (sm or "") + cuda).encode().hex().ljust(64, "0"),
        cuda=CudaTag.parse(cuda),
        arch=Arch(arch),
        sm=Sm.parse(sm) if sm else None,
        origin=UrlOrigin("https://host/" + filename),
    )


def pins(*items: Pin, name: str = "set") -> PinSet:
    return PinSet(name=name, pins=items, text="", origin="test")


def platform(cuda: str, arch: str = "x86_64", sm: str | None = None) -> Platform:
    return Platform(CudaTag.parse(cuda), Arch(arch), Sm.parse(sm) if sm else None)


def test_the_exact_tag_is_taken_and_the_older_passed_over() -> None:
    answer = resolve([pins(pin("p", "cu130"), pin("p", "cu131"))], platform("cu131"))
    (choice,) = answer.choices
    assert str(choice.pin.cuda) == "cu131"
    assert choice.reason == "exact CUDA tag cu131"
    assert [line.verdict for line in answer.trace] == [Verdict.PASSED_OVER, Verdict.TAKEN]


def test_the_nearest_lower_minor_is_taken_and_said() -> None:
    answer = resolve([pins(pin("p", "cu128"), pin("p", "cu130"), pin("p", "cu131"))], platform("cu134"))
    (choice,) = answer.choices
    assert str(choice.pin.cuda) == "cu131"
    assert choice.reason == "nearest lower minor cu131 for cu134"


@pytest.mark.parametrize("cuda", ["cu128", "cu129"])
def test_another_major_or_a_newer_minor_never_fits(cuda: str) -> None:
    with pytest.raises(NothingFits) as caught:
        resolve([pins(pin("p", "cu130"))], platform(cuda))
    problem = caught.value.problem()
    assert problem["available"] == ["set: p: cu130 x86_64"]
    assert any("another major" in line for line in problem["trace"])
    with pytest.raises(NothingFits):
        resolve([pins(pin("p", "cu131"))], platform("cu130"))


def test_the_other_arch_never_fits() -> None:
    with pytest.raises(NothingFits):
        resolve([pins(pin("p", "cu130", "aarch64"))], platform("cu130"))


@pytest.mark.parametrize(
    ("sm", "taken"),
    [
        ("sm90", "sm90a"),
        ("sm90a", "sm90a"),
        ("sm80", None),
        (None, None),
        ("sm103", "sm100f"),
        ("sm100", "sm100a"),
        ("sm120", None),
    ],
)
def test_the_provider_for_the_sm_comes_before_the_monolith(sm: str | None, taken: str | None) -> None:
    offered = [pin("p", "cu130", sm=provider) for provider in ("sm90a", "sm100f", "sm100a")]
    answer = resolve([pins(pin("p", "cu130"), *offered)], platform("cu130", sm=sm))
    (choice,) = answer.choices
    assert str(choice.pin.sm) == str(Sm.parse(taken) if taken else None)


def test_a_provider_alone_does_not_serve_another_sm() -> None:
    with pytest.raises(NothingFits, match="no pinned wheels fit"):
        resolve([pins(pin("p", "cu130", sm="sm90a"))], platform("cu130", sm="sm100"))


def test_sets_are_united_and_used_whole_or_not_at_all() -> None:
    whole = pins(pin("a", "cu130"), name="whole")
    broken = pins(pin("b", "cu130"), pin("c", "cu131"), name="broken")
    answer = resolve([whole, broken], platform("cu130"))
    assert [choice.pin.project for choice in answer.choices] == ["a"]
    assert any(line.pin_set == "broken" and "used whole" in line.reason for line in answer.trace)
    answer = resolve([whole, broken], platform("cu131"))
    assert [choice.pin.project for choice in answer.choices] == ["a", "b", "c"]


def test_two_sets_that_disagree_are_a_conflict_that_names_both() -> None:
    one, two = pins(pin("p", "cu130"), name="one"), pins(pin("p", "cu130", mark="b"), name="two")
    with pytest.raises(PinsConflict) as caught:
        resolve([one, two], platform("cu130"))
    assert "one" in str(caught.value)
    assert "two" in str(caught.value)
    assert resolve([one, pins(pin("p", "cu130"), name="same")], platform("cu130")).choices


def test_no_sets_at_all_is_said() -> None:
    with pytest.raises(NothingFits, match=r"\(none\)"):
        resolve([], platform("cu130"))


TAGS = st.sampled_from(["cu118", "cu126", "cu128", "cu129", "cu130", "cu131", "cu134"])
PINS = st.builds(
    pin,
    st.sampled_from(["p", "q"]),
    TAGS,
    st.sampled_from(["x86_64", "aarch64"]),
    st.sampled_from([None, "sm80", "sm90a", "sm100f"]),
)


@given(st.lists(PINS, max_size=10), TAGS, st.sampled_from([None, "sm80", "sm90", "sm103"]))
def test_whatever_is_chosen_fits_and_nothing_better_existed(
    items: list[Pin], cuda: str, sm: str | None
) -> None:
    target = platform(cuda, sm=sm)
    try:
        answer = resolve([pins(*items)], target)
    except NothingFits:
        answer = None
    fitting = {
        project: [
            item
            for item in items
            if item.project == project
            and item.arch is target.arch
            and item.cuda.major == target.cuda.major
            and item.cuda <= target.cuda
            and (item.sm is None or (target.sm is not None and target.sm.runs(item.sm)))
        ]
        for project in {item.project for item in items}
    }
    if not items or any(not candidates for candidates in fitting.values()):
        assert answer is None
        return
    assert answer is not None
    for choice in answer.choices:
        candidates = fitting[choice.pin.project]
        assert choice.pin in candidates
        assert choice.pin.cuda == max(item.cuda for item in candidates)
        near = [item for item in candidates if item.cuda == choice.pin.cuda]
        assert (choice.pin.sm is not None) == any(item.sm is not None for item in near)
    assert sum(line.verdict is Verdict.TAKEN for line in answer.trace) == len(answer.choices)
