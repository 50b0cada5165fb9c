"""Dependencies point one way, and the worker never imports the server."""

import ast
import os
import subprocess
import sys
import venv
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import tomlkit
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = Path(__file__).parents[1] / "service" / "kernel_depot"
VALUES = {"__version__", "errors", "digest", "platform", "bundle", "shipped", "liveness"}
ALLOWED = {
    "pins": VALUES,
    "wheels": VALUES,
    "store": VALUES,
    "catalog": VALUES | {"pins", "wheels"},
    "jobs": VALUES | {"pins", "wheels", "store", "catalog", "settings"},
    "fleet": VALUES | {"pins", "catalog"},
    "api": VALUES | {"pins", "wheels", "store", "catalog", "fleet", "jobs", "settings", "builder"},
    "builder": VALUES | {"pins", "wheels", "settings", "kernels"},
    "worker": VALUES,
    "kernels": VALUES | {"worker"},
    "smoke": VALUES | {"worker", "kernels"},
    "agent": VALUES | {"worker", "smoke"},
    "opponent": VALUES | {"worker", "kernels"},
}


def distributions(*extras: str) -> set[str]:
    """The normalized names of what this project's base install, or an extra of it, asks for."""
    project = tomlkit.parse((PACKAGE.parents[1] / "pyproject.toml").read_text()).unwrap()["project"]
    wanted = [line for extra in extras for line in project["optional-dependencies"][extra]]
    return {canonicalize_name(Requirement(line).name) for line in wanted or project["dependencies"]}


# httpx, which the worker has, brings anyio too.
SERVER_DISTRIBUTIONS = distributions("server", "postgres") - distributions() - {"anyio"}
SERVER_LIBRARIES = {
    module
    for module, names in packages_distributions().items()
    if SERVER_DISTRIBUTIONS & {canonicalize_name(name) for name in names}
}


def imported(path: Path) -> set[str]:
    """The absolute names a module imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules(room: str) -> list[Path]:
    return sorted((PACKAGE / room).glob("**/*.py"))


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_what_lies_below_it(room: str) -> None:
    wrong = []
    for path in modules(room):
        for name in imported(path):
            if name.startswith("kernel_depot.") and name.split(".")[1] not in ALLOWED[room] | {room}:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert wrong == []


def test_the_server_reads_build_plans_and_compiles_nothing() -> None:
    used = {name for room in ("api", "jobs") for path in modules(room) for name in imported(path)}
    of_builder = {name for name in used if name.startswith("kernel_depot.builder")}
    assert {".".join(name.split(".")[:3]) for name in of_builder} == {
        "kernel_depot.builder.plan",
        "kernel_depot.builder.errors",
    }


@pytest.mark.parametrize("room", ["worker", "kernels", "smoke", "opponent"])
def test_the_worker_imports_no_server_library(room: str) -> None:
    for path in modules(room):
        used = {name.split(".")[0] for name in imported(path)} & SERVER_LIBRARIES
        assert not used, f"{path.relative_to(PACKAGE)} imports {used}"


def test_the_shared_values_need_the_standard_library_only() -> None:
    for name in sorted(VALUES - {"__version__"}):
        roots = {item.split(".")[0] for item in imported(PACKAGE / f"{name}.py")}
        assert roots - {"kernel_depot", "__future__"} <= set(sys.stdlib_module_names), name


def test_the_server_libraries_are_known_by_the_names_they_are_imported_by() -> None:
    assert {"fastapi", "sqlmodel", "sqlalchemy", "obstore", "alembic", "elftools", "dbos"} <= SERVER_LIBRARIES
    assert not {"httpx", "pydantic", "typer", "rich"} & SERVER_LIBRARIES


def test_every_room_is_guarded() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms - {"cli"} == set(ALLOWED)


def test_importing_the_worker_client_loads_neither_the_server_nor_an_http_library() -> None:
    code = "import sys, kernel_depot.worker.client; print(*sorted(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {name.split(".")[0] for name in shown.split()}
    assert not loaded & (SERVER_LIBRARIES | {"httpx", "pydantic", "rich", "typer"})


@pytest.mark.network
@pytest.mark.timeout(600)
def test_the_base_install_alone_syncs(tmp_path: Path) -> None:
    """In a fresh environment with only the base install every worker command starts."""
    venv.create(tmp_path / "venv", with_pip=True)
    bin_dir = tmp_path / "venv" / "bin"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, check=False, env=environment
        )

    built = run(bin_dir / "python", "-m", "pip", "install", "-q", PACKAGE.parents[1])
    assert built.returncode == 0, built.stderr
    freeze = run(bin_dir / "python", "-m", "pip", "list", "--format=freeze").stdout.lower()
    installed = {canonicalize_name(line.split("==")[0]) for line in freeze.split()}
    assert distributions() - {"tomli"} <= installed
    assert not installed & SERVER_DISTRIBUTIONS
    help_text = run(bin_dir / "kernel-depot", "--help")
    assert help_text.returncode == 0, help_text.stderr
    for command in ("sync", "env", "doctor", "smoke"):
        shown = run(bin_dir / "kernel-depot", command, "--help")
        assert shown.returncode == 0, shown.stderr
    offline = run(bin_dir / "kernel-depot", "sync", "--offline", "--cache", tmp_path / "cache", "--json")
    assert offline.returncode == 1
    assert "urn:kernel-depot:problem:" in offline.stdout
    server = run(bin_dir / "kernel-depot", "serve")
    assert server.returncode == 1
    assert "kernel-depot[server]" in server.stderr
