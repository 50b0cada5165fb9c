"""The two gates before the opponent: the bundle's group, and the process's opt-in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kernel_depot.opponent as opponent
from kernel_depot.bundle import BundleGroup
from kernel_depot.digest import sha256_bytes
from kernel_depot.kernels.attention import Attention, Backend
from kernel_depot.kernels.uri import batch_prefill_uri
from kernel_depot.opponent.errors import OpponentAbsent, OpponentOff, SwitchInvalid
from kernel_depot.opponent.gates import require_artifact, require_switch
from kernel_depot.worker.cache import Cache

URI = batch_prefill_uri(Attention(4, 4, 128, 128, "bf16", "bf16", "bf16"), Backend.FA2, (0, 6, 3))
Synced = Callable[..., Path]


def call(cache: Path) -> None:
    q = np.zeros((1, 1, 128), np.float32)
    opponent.ragged_prefill_bf16_hd128(q, q, q, [0, 1], [0, 1], out=q, causal=False, cache=cache)


def test_a_node_that_never_synced_has_no_opponent(tmp_path: Path) -> None:
    assert opponent.available(tmp_path) is False
    with pytest.raises(OpponentAbsent) as caught:
        call(tmp_path)
    assert "kernel-depot sync --group opponent" in str(caught.value.remedy)


def test_the_module_in_the_default_set_does_not_open_the_artifact_gate(
    synced: Synced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(opponent.SWITCH, "1")
    cache = synced([URI], BundleGroup("other", (URI,)))
    assert opponent.available(cache) is False
    with pytest.raises(OpponentAbsent) as caught:
        call(cache)
    assert "kernel-depot sync --group opponent" in str(caught.value.remedy)
    assert caught.value.found == "other"


def test_the_group_opens_only_its_own_modules(synced: Synced) -> None:
    cache = synced([URI, "norm"], BundleGroup("opponent", (URI,)))
    assert opponent.available(cache) is True
    assert list(require_artifact(cache).files) == [URI]


def test_a_group_whose_file_is_gone_is_not_available(synced: Synced) -> None:
    cache = synced([URI], BundleGroup("opponent", (URI,)))
    Cache(cache).blob_path(sha256_bytes(URI.encode())).unlink()
    assert opponent.available(cache) is False
    with pytest.raises(OpponentAbsent):
        require_artifact(cache)


@pytest.mark.parametrize("value", [None, "0"])
def test_a_call_is_refused_unless_the_process_opts_in(
    synced: Synced, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    cache = synced([URI], BundleGroup("opponent", (URI,)))
    if value is None:
        monkeypatch.delenv(opponent.SWITCH, raising=False)
    else:
        monkeypatch.setenv(opponent.SWITCH, value)
    assert opponent.available(cache) is True
    with pytest.raises(OpponentOff) as caught:
        call(cache)
    assert "KERNEL_DEPOT_FLASHINFER_PREFILL=1" in str(caught.value.remedy)


@pytest.mark.parametrize("value", ["", "true", "yes", "2", " 1"])
def test_a_switch_that_is_neither_0_nor_1_is_an_error(
    synced: Synced, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    cache = synced([URI], BundleGroup("opponent", (URI,)))
    monkeypatch.setenv(opponent.SWITCH, value)
    with pytest.raises(SwitchInvalid):
        call(cache)


def test_only_1_switches_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(opponent.SWITCH, "1")
    require_switch()


def test_no_default_path_loads_the_opponent_or_a_prefill_module() -> None:
    code = """
import importlib, pathlib, sys
import kernel_depot
root = pathlib.Path(kernel_depot.__file__).parent
for path in sorted(root.rglob("*.py")):
    name = ".".join(("kernel_depot", *path.relative_to(root).with_suffix("").parts))
    if path.stem != "__init__" and not name.startswith(("kernel_depot.opponent", "kernel_depot.cli.bench")):
        importlib.import_module(name)
from kernel_depot.cli.main import COMMANDS, load
for name in COMMANDS.keys() - {"bench"}:
    load(name)
print(*(name for name in sys.modules if name.startswith("kernel_depot.opponent")))
with open("/proc/self/maps") as maps:
    print(*{line.split()[-1] for line in maps if "prefill" in line})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
