"""The systemd unit and the Kubernetes manifest start the agent with options that it has."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from kernel_depot.cli.agent import NO_TOKEN, app

DOCKER = Path(__file__).parents[1] / "docker"
UNIT = DOCKER / "systemd" / "kernel-depot-agent.service"


class Unit(configparser.ConfigParser):
    """A unit file: names keep their case."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def options() -> tuple[set[str], set[str]]:
    """Return the agent's options, and the environment variables that stand for some."""
    command = typer.main.get_command(app)
    names = {name for option in command.params for name in option.opts}
    return names, {str(option.envvar) for option in command.params if getattr(option, "envvar", None)}


def container() -> dict[str, Any]:
    documents = list(yaml.safe_load_all((DOCKER / "k8s" / "agent.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["Namespace", "ConfigMap", "DaemonSet"]
    daemons = documents[-1]["spec"]
    assert daemons["selector"]["matchLabels"] == daemons["template"]["metadata"]["labels"]
    (one,) = daemons["template"]["spec"]["containers"]
    volumes = {volume["name"] for volume in daemons["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in one["volumeMounts"]} == volumes
    assert daemons["template"]["spec"]["hostPID"]
    one["config"] = documents[1]["data"]
    return dict(one)


def test_the_daemon_set_starts_the_agent_as_it_wants_to_be_started() -> None:
    agent = container()
    names, variables = options()
    assert agent["args"][0] == "agent"
    assert {word for word in agent["args"] if word.startswith("--")} <= names
    assert {item["name"] for item in agent["env"]} | set(agent["config"]) <= variables
    assert re.search(r":\d+\.\d+\.\d+$", agent["image"])


def test_a_pod_is_ready_when_the_agent_says_so() -> None:
    agent = container()
    image = (DOCKER / "worker.Dockerfile").read_text()
    cache = re.search(r"KERNEL_DEPOT_CACHE=(\S+)", image)
    assert cache is not None
    assert agent["readinessProbe"]["exec"]["command"] == ["test", "-e", f"{cache[1]}/agent/ready"]
    mounts = [mount["mountPath"] for mount in agent["volumeMounts"] if not mount.get("readOnly")]
    assert any(cache[1].startswith(path) for path in mounts)


def test_the_service_starts_the_agent_and_not_again_with_a_refused_token() -> None:
    unit = Unit(strict=False, interpolation=None)
    unit.read(UNIT)
    service = unit["Service"]
    assert service["ExecStart"].split()[1:] == ["agent", "$KERNEL_DEPOT_AGENT_OPTIONS"]
    assert service["RestartPreventExitStatus"] == str(NO_TOKEN)
    set_there = set(re.findall(r"^Environment=(\w+)=", UNIT.read_text(), re.MULTILINE))
    assert set_there
    assert set_there <= options()[1]
    assert re.search(r"^# KERNEL_DEPOT_SERVER=…", UNIT.read_text(), re.MULTILINE)


def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze here")
    unit = tmp_path / UNIT.name
    # What it names is not installed where the tests run.
    unit.write_text(
        UNIT.read_text().replace("/opt/kernel-depot/bin/kernel-depot", shutil.which("true") or "")
    )
    done = subprocess.run(
        [program, "verify", "--man=no", "--generators=no", unit], capture_output=True, text=True, check=False
    )
    own = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert own == []
