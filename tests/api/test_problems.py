from __future__ import annotations

import re
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kernel_depot.errors import DepotError

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def generator() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


@pytest.fixture(scope="module")
def kinds(generator: dict[str, Any]) -> list[type[DepotError]]:
    return [kind for kinds in generator["rooms"]().values() for kind in kinds]


def test_page_lists_what_the_code_raises_and_nothing_else(generator: dict[str, Any]) -> None:
    assert (DOCS / "problems.md").read_text() == generator["page"](), "run `python docs/generate.py`"


def test_every_kind_has_a_slug_of_its_own(kinds: list[type[DepotError]]) -> None:
    counts = Counter(kind.slug for kind in kinds)
    shared = {slug: [kind.__name__ for kind in kinds if kind.slug == slug] for slug in counts}
    assert {slug: names for slug, names in shared.items() if len(names) > 1} == {}


def test_every_kind_says_what_it_is(kinds: list[type[DepotError]]) -> None:
    for kind in kinds:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", kind.slug), kind
        assert kind.title, kind
        assert kind.__doc__, kind
        assert kind.__doc__ != DepotError.__doc__, kind
        assert 400 <= kind.status <= 599, kind
