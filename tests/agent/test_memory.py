"""What an agent remembers over its own death, and what it has yet to tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernel_depot.agent.errors import AgentRunning
from kernel_depot.agent.memory import alone, remembered


def outcome(word: str) -> dict[str, Any]:
    return {"module": "norm", "outcome": word}


def test_what_was_not_told_is_still_to_be_told_after_a_death(tmp_path: Path) -> None:
    path = tmp_path / "agent" / "memory.json"
    memory = remembered(path)
    memory.keep("a", "580", outcome("pass"))
    memory.keep("b", "580", outcome("fail"))
    assert memory.to_tell(["a", "b", "c"], "580").keys() == {"a/580", "b/580"}
    memory.told(["a/580"])
    memory.ready = "f" * 64
    memory.save(held={"a", "b"})
    again = remembered(path)
    assert (again.ready, again.outcome("a", "580")) == ("f" * 64, outcome("pass"))
    assert again.to_tell(["a", "b"], "580") == {"b/580": outcome("fail")}
    assert again.to_tell(["a", "b"], "590") == {}
    again.tell_again()
    assert again.to_tell(["a", "b"], "580").keys() == {"a/580", "b/580"}


def test_what_is_about_bytes_that_are_gone_is_forgotten(tmp_path: Path) -> None:
    memory = remembered(tmp_path / "memory.json")
    memory.keep("a", None, outcome("pass"))
    memory.keep("b", None, outcome("pass"))
    memory.save(held={"b"})
    assert memory.outcome("a", None) is None
    assert remembered(tmp_path / "memory.json").untold == {"b/"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"ready": 3, "smoked": {}, "untold": []}', "\0"])
def test_a_torn_memory_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "memory.json"
    path.write_text(text)
    memory = remembered(path)
    assert (memory.ready, memory.smoked, memory.untold) == (None, {}, set())


def test_a_cache_has_one_agent(tmp_path: Path) -> None:
    with alone(tmp_path / "lock"), pytest.raises(AgentRunning), alone(tmp_path / "lock"):
        pass
    with alone(tmp_path / "lock"):
        pass
