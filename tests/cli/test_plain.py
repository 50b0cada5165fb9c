"""Plain command lines are called without typer, and mean what typer makes of them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kernel_depot.cli.main import load
from kernel_depot.cli.plain import PLAIN, Flag, Number, Option, Value, Values, plain_call


def described(parameter: Any) -> Option:
    if parameter.is_flag:
        return Flag(parameter.name)
    if parameter.multiple:
        return Values(parameter.name)
    if isinstance(parameter.default, int):
        return Number(parameter.name, most=64)
    return Value(parameter.name, parameter.envvar)


@pytest.mark.parametrize("name", PLAIN)
def test_the_options_are_those_typer_knows(name: str) -> None:
    params = [parameter for parameter in load(name).params if not parameter.name.endswith("_completion")]
    options = {parameter.opts[0]: parameter for parameter in params if parameter.opts[0][:1] == "-"}
    loose = [parameter.name for parameter in params if parameter.opts[0][:1] != "-"]
    known = {
        option: known._replace(choices=()) if isinstance(known, Value) else known
        for option, known in PLAIN[name].options.items()
    }
    assert {option: described(parameter) for option, parameter in options.items()} == known
    assert loose == [PLAIN[name].arguments] * (PLAIN[name].arguments is not None)


def test_plain_words_become_parameters() -> None:
    words = ["sync", "--server=http://x", "--pins", "a", "--pins", "b", "--jobs", "3", "--offline", "--json"]
    call: Any = plain_call(words, {"KERNEL_DEPOT_TOKEN": "t", "KERNEL_DEPOT_SERVER": "http://other"})
    assert call.func.__name__ == "run_sync"
    assert call.keywords == {
        "server": "http://x",
        "pins": ["a", "b"],
        "jobs": 3,
        "offline": True,
        "as_json": True,
        "token": "t",
    }
    call = plain_call(["materialize", "a.toml", "--arch", "all", "b.toml"], {})
    assert call.keywords == {"pins": ["a.toml", "b.toml"], "arch": "all"}


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--debug", "sync", "--server", "http://x"],
        ["serve"],
        ["sync"],
        ["sync", "--help"],
        ["sync", "--server"],
        ["sync", "--server", "--json"],
        ["sync", "--server", ""],
        ["sync", "--server", "http://x", "--server", "http://y"],
        ["sync", "--server", "http://x", "--serv", "http://y"],
        ["sync", "--server", "http://x", "--jobs", "65"],
        ["sync", "--server", "http://x", "--jobs", "-1"],
        ["sync", "--server", "http://x", "--jobs", "٣"],
        ["sync", "--server", "http://x", "--json=1"],
        ["sync", "--server", "http://x", "--compression", "gzip"],
        ["sync", "--server", "http://x", "word"],
        ["sync", "--server", "http://x", "--"],
        ["materialize"],
        ["materialize", "--json"],
    ],
)
def test_everything_else_is_left_to_typer(words: list[str]) -> None:
    assert plain_call(words, {}) is None


def test_a_plain_command_waits_for_no_library_it_does_not_need() -> None:
    probe = """
import sys
from kernel_depot.cli.main import main
sys.argv = ["kernel-depot", "sync", "--offline", "--cache", sys.argv[1], "--json"]
try:
    main()
except SystemExit as end:
    print("HEAVY", sorted({"typer", "rich", "pydantic", "httpx"} & set(sys.modules)), end.code)
"""
    done = subprocess.run(
        [sys.executable, "-c", probe, "/nowhere"], capture_output=True, text=True, check=True
    )
    assert "HEAVY [] 1" in done.stdout
    assert "cache-empty" in done.stdout
