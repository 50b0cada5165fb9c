"""Module groups: what a pin set's `groups` table may say, and what a group withholds."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_depot.kernels.attention import Attention, Backend
from kernel_depot.kernels.uri import batch_prefill_uri
from kernel_depot.pins.document import parse_pin_set, read_pin_set
from kernel_depot.pins.groups import ModuleGroup, read_groups, withheld
from kernel_depot.pins.problem import PinSetInvalid

PIN = """
[apache_tvm_ffi.cu130.x86_64]
filename = "apache_tvm_ffi-0.1.3-cp310-cp310-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"
index = "pypi"
sha256 = "48ad3df2224f1b0943344895c6cba2f3f0a53bc67ddafdd3e9d7a34f56100aa9"
"""
GROUP = '\n[groups.opponent]\nmodules = ["page", "norm"]\n'


def test_groups_are_read_and_change_the_revision() -> None:
    plain = parse_pin_set(PIN, name="set", origin="test")
    grouped = parse_pin_set(PIN + GROUP, name="set", origin="test")
    assert grouped.groups == (ModuleGroup("opponent", ("norm", "page")),)
    assert plain.groups == ()
    assert plain.digest != grouped.digest
    assert grouped.pins == plain.pins


@pytest.mark.parametrize(
    ("table", "code", "line"),
    [
        ("\n[groups.opponent]\nmodules = []\n", "missing-key", 8),
        ('\n[groups.opponent]\nmodules = ["no/rm"]\n', "bad-module", 8),
        ('\n[groups.opponent]\nmodules = ["norm", "norm"]\n', "duplicate-module", 8),
        ('\n[groups.opponent]\nmodules = ["norm"]\ndefault = 1\n', "wrong-type", 9),
        ('\n[groups.opponent]\nmodules = ["norm"]\nsm = "sm90a"\n', "unknown-key", 9),
        ('\n[groups.Opponent]\nmodules = ["norm"]\n', "bad-group", 7),
        ("\n[groups]\nopponent = 1\n", "not-a-table", 8),
    ],
)
def test_a_wrong_group_is_refused_by_name_and_line(table: str, code: str, line: int) -> None:
    with pytest.raises(PinSetInvalid) as caught:
        parse_pin_set(PIN + table, name="set", origin="test")
    (problem,) = caught.value.problems
    assert (problem.code, problem.line) == (code, line)


def test_an_empty_groups_table_is_no_groups_table() -> None:
    assert read_groups({})[1][0].code == "not-a-table"


def test_a_group_withholds_what_nobody_else_gets() -> None:
    groups = (
        ModuleGroup("opponent", ("a", "b")),
        ModuleGroup("other", ("b", "c")),
        ModuleGroup("open", ("c",), default=True),
    )
    assert withheld(groups, ()) == {"a", "b"}
    assert withheld(groups, ("opponent",)) == set()
    assert withheld(groups, ("other",)) == {"a"}


def test_the_shipped_opponent_group_names_what_the_opponent_calls() -> None:
    root = Path(__file__).parents[2]
    (group,) = read_pin_set(root / "pins" / "flashinfer-0.6.3.toml").groups
    wanted = {
        batch_prefill_uri(Attention(4, 4, dim, dim, "bf16", "bf16", "bf16"), backend, (0, 6, 3))
        for dim in (128, 256)
        for backend in (Backend.FA2, Backend.FA3)
    }
    assert (group.name, group.default, set(group.modules)) == ("opponent", True, wanted)
