"""What is taken from the shared modules, and what is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kernel_depot.builder.cache import BuildCache, BuiltModule
from kernel_depot.builder.errors import DepotUnreachable


class Shelf:
    """Shared modules in memory; `change` alters what is found."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[BuiltModule, bytes]] = {}
        self.offered: list[str] = []
        self.change: Callable[[BuiltModule], BuiltModule] = lambda built: built
        self.damage = False
        self.down = False

    def find(self, keys: Sequence[str]) -> dict[str, BuiltModule]:
        return {key: self.change(self.kept[key][0]) for key in keys if key in self.kept}

    def fetch(self, built: BuiltModule, target: Path) -> bool:
        target.write_bytes(next(data for one, data in self.kept.values() if one.sha256 == built.sha256))
        return not self.damage

    def offer(self, built: BuiltModule, library: Path, *, stop: Event | None = None) -> None:
        self.offered.append(built.uri)
        if self.down:
            raise DepotUnreachable("down")
        self.kept[built.key] = (built, library.read_bytes())


def states(report: Any) -> dict[str, str]:
    return {module.uri: str(module.state) for module in report.modules}


def test_a_module_is_taken_once_and_given_once(bench: Any) -> None:
    shelf, plan = Shelf(), bench.plan("norm", "page")
    first = bench.build(plan, shared=shelf)
    assert sorted(shelf.offered) == ["norm", "page"]
    second = bench.build(plan, cache="other", out="other-out", shared=shelf)
    assert states(second) == {"norm": "shared", "page": "shared"}
    assert second.wheel.path.read_bytes() == first.wheel.path.read_bytes()
    third = bench.build(plan, cache="other", out="other-out", shared=shelf)
    assert states(third) == {"norm": "cached", "page": "cached"}
    assert len(shelf.offered) == 2
    assert list(BuildCache(bench.root / "other").work.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda built: replace(built, uri="norm"),
        lambda built: replace(built, key="0" * 64),
        lambda built: replace(built, recipe="0" * 64),
        lambda built: replace(built, sms=("sm80",)),
        lambda built: replace(built, functions=("__tvm_ffi_other",)),
        None,
    ],
)
def test_what_does_not_fit_is_compiled(
    bench: Any, change: Callable[[BuiltModule], BuiltModule] | None, caplog: pytest.LogCaptureFixture
) -> None:
    shelf, plan = Shelf(), bench.plan("page")
    bench.build(plan, shared=shelf)
    if change is None:
        shelf.damage = True
    else:
        shelf.change = change
    report = bench.build(plan, cache="other", shared=shelf)
    assert states(report) == {"page": "built"}
    assert "page is compiled here, though the depot has it" in caplog.text


def test_a_shelf_that_takes_nothing_ends_no_build(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf()
    shelf.down = True
    assert states(bench.build(bench.plan("page"), shared=shelf)) == {"page": "built"}
    assert "page is not shared: down" in caplog.text


def test_a_dry_run_gives_nothing(bench: Any) -> None:
    shelf, plan = Shelf(), bench.plan("page")
    bench.build(plan)
    assert states(bench.build(plan, shared=shelf, dry_run=True)) == {"page": "cached"}
    assert shelf.offered == []
