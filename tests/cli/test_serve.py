from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kernel_depot.catalog.database import open_database

COMMAND = [sys.executable, "-m", "kernel_depot.cli.main"]
READ = f"/v1/blobs/sha256/{'0' * 64}"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.fullmatch(r"kernel-depot is listening on (http://\S+)\n", line)
        assert match, (line, process.communicate(timeout=10))
        yield process, match[1]
    finally:
        process.kill()
        process.communicate()


def test_serves_until_told_to_stop(tmp_path: Path) -> None:
    with serving("--data-dir", str(tmp_path / "depot"), "--allow-anonymous") as (process, url):
        assert httpx.get(f"{url}/readyz", trust_env=False).json() == {"status": "ok"}
        assert httpx.get(url + READ, trust_env=False).status_code == 404
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert output == ""
    assert "Traceback" not in errors


def test_asks_for_tokens_that_the_command_line_makes_and_revokes(tmp_path: Path) -> None:
    data_dir = str(tmp_path / "depot")
    create = ("tokens", "create", "--scope", "read", "--name", "me", "--json")
    made = json.loads(run(*create, "--data-dir", data_dir).stdout)
    headers = {"authorization": f"Bearer {made['secret']}"}
    with serving("--data-dir", data_dir) as (_, url), httpx.Client(base_url=url, trust_env=False) as client:
        assert client.get(READ).status_code == 401
        assert client.get(READ, headers=headers).status_code == 404
        assert run("tokens", "revoke", made["id"], "--data-dir", data_dir).returncode == 0
        until = time.monotonic() + 20
        while client.get(READ, headers=headers).status_code == 404:  # believed for a second
            assert time.monotonic() < until
        assert client.get(READ, headers=headers).status_code == 401


def test_nodes_that_wait_are_answered_when_the_server_ends(tmp_path: Path) -> None:
    facts = {"cuda": "cu130", "arch": "x86_64", "product": "0"}
    with (
        serving("--data-dir", str(tmp_path), "--allow-anonymous") as (process, url),
        httpx.Client(base_url=url, trust_env=False, timeout=60) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        client.put("/v1/nodes/a", json=facts).raise_for_status()
        tag = client.get("/v1/nodes/a/desired").headers["etag"]
        ask = {"url": "/v1/nodes/a/desired?wait=30", "headers": {"if-none-match": tag}}
        assert client.get("/v1/nodes/a/desired", headers=ask["headers"]).status_code == 304
        waits = pool.submit(lambda: client.get(**ask))
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        assert waits.result(15).status_code == 304  # not the connection that is cut after 20 s
        _, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors


def test_tokens_are_listed_without_their_secrets(tmp_path: Path) -> None:
    data_dir = ("--data-dir", str(tmp_path))
    assert "no tokens" in run("tokens", "list", *data_dir).stdout
    made = run("tokens", "create", "--scope", "node", "--name", "rack 7", "--expires", "90d", *data_dir)
    secret = made.stdout.splitlines()[-1]
    listed = run("tokens", "list", *data_dir)
    assert "rack 7" in listed.stdout
    assert secret not in listed.stdout
    (token,) = json.loads(run("tokens", "list", "--json", *data_dir).stdout)
    assert token["scopes"] == ["node"]
    assert token["state"] == "valid"
    assert token["expires_at"] > token["created_at"]
    assert secret.encode() not in b"".join(p.read_bytes() for p in tmp_path.glob("catalog.sqlite*"))


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["tokens", "create", "--scope", "read", "--name", "x", "--expires", "soon"], "duration-invalid"),
        (["tokens", "create", "--scope", "read", "--name", "x", "--expires", "0d"], "duration-invalid"),
        (["tokens", "revoke", "nobody"], "token-unknown"),
    ],
)
def test_tokens_that_cannot_be(tmp_path: Path, arguments: list[str], kind: str) -> None:
    done = run(*arguments, "--data-dir", str(tmp_path))
    assert done.returncode == 1
    assert f"urn:kernel-depot:problem:{kind}" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_in_use_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--data-dir", str(tmp_path), "--port", str(port))
    assert done.returncode == 1
    assert "urn:kernel-depot:problem:address-unavailable" in done.stderr
    assert str(port) in done.stderr


def test_an_unknown_schema_is_refused(tmp_path: Path) -> None:
    assert run("tokens", "list", "--data-dir", str(tmp_path)).returncode == 0
    engine = open_database(f"sqlite:///{tmp_path}/catalog.sqlite")
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = 'later'")
    engine.dispose()
    done = run("serve", "--data-dir", str(tmp_path), "--port", "0")
    assert done.returncode == 1
    assert "urn:kernel-depot:problem:schema-unknown" in done.stderr
    assert done.stdout == ""


def test_a_database_of_its_own_is_not_upgraded_unasked(tmp_path: Path, postgres_url: str) -> None:
    arguments = ("--data-dir", str(tmp_path), "--database-url", postgres_url)
    done = run("serve", "--port", "0", *arguments)
    assert done.returncode == 1
    assert "urn:kernel-depot:problem:schema-behind" in done.stderr
    assert "kernel-depot db upgrade" in done.stderr
    assert run("db", "upgrade", *arguments[2:]).returncode == 0
    with serving(*arguments, "--allow-anonymous") as (process, url):
        assert httpx.get(f"{url}/readyz", trust_env=False).is_success
        assert httpx.get(f"{url}/v1/pins", trust_env=False).json() == {"pin_sets": []}
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
