from __future__ import annotations

import json
import subprocess
import sys

import pytest

import kernel_depot
from kernel_depot.cli.main import COMMANDS
from kernel_depot.cli.render import problem_of, problem_text, size_text
from kernel_depot.errors import DepotError

PROBE = """
import sys
from kernel_depot.cli.main import main
sys.argv = ["kernel-depot", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    code = end.code
heavy = sorted({"sqlalchemy", "fastapi", "dbos", "httpx", "pydantic", "alembic"} & set(sys.modules))
print("HEAVY", heavy, code)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kernel_depot.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_lists_every_command_and_imports_none() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, "--help"], capture_output=True, text=True, check=True)
    for name in COMMANDS:
        assert f" {name} " in done.stdout
    assert "HEAVY [] 0" in done.stdout


def test_version_is_plain() -> None:
    assert run("--version").stdout == f"kernel-depot {kernel_depot.__version__}\n"


def test_every_command_has_help_of_its_own() -> None:
    for name in COMMANDS:
        done = run(name, "--help")
        assert done.returncode == 0, f"{name}: {done.stderr}"
        assert "Usage" in done.stdout


def test_wrong_usage_exits_2() -> None:
    assert run("no-such-command").returncode == 2


def test_a_failure_is_text_or_json_and_exits_1() -> None:
    text = run("db", "check", "--database-url", "mysql://host/x")
    assert text.returncode == 1
    assert "type: urn:kernel-depot:problem:database-url-invalid" in text.stderr
    assert "Traceback" not in text.stderr
    as_json = run("db", "check", "--database-url", "mysql://host/x", "--json")
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout)["type"] == "urn:kernel-depot:problem:database-url-invalid"
    debug = run("--debug", "db", "check", "--database-url", "mysql://host/x")
    assert "Traceback" in debug.stderr


def test_what_was_not_foreseen_is_one_line_and_a_hint() -> None:
    text = problem_text(problem_of(ValueError("first\nsecond")))
    assert text.startswith("error: ValueError: first\n")
    assert "second" not in text
    assert "--debug" in text


def test_every_fact_of_a_problem_is_shown() -> None:
    error = DepotError("what", where="there", expected=["a", "b"], remedy="do this", problems=[{"line": 3}])
    text = problem_text(problem_of(error))
    for part in ("error: what", "where: there", "expected: a, b", "what to do: do this", "- line: 3"):
        assert part in text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 30, "5.0 GiB"), (1 << 50, "1048576.0 GiB")],
)
def test_sizes(size: int, text: str) -> None:
    assert size_text(size) == text
