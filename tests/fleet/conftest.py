"""A real server over kernel modules compiled on the spot, and real agents in processes of their own."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

ARCH = os.uname().machine
COMMAND = [sys.executable, "-m", "kernel_depot.cli.main"]
GOOD = r"""
void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message);
int __tvm_ffi_run(void* self, const void* args, int count, void* result) {
  TVMFFIErrorSetRaisedFromCStr("TypeError", "Expected: run(0: DLTensor*) -> void, build %d");
  return -1;
}
"""
BAD = "int __tvm_ffi_run(void* self, const void* args, int count, void* result) { return 0; /* %d */ }\n"


def wait_for(look: Callable[[], Any], *, seconds: float = 60.0) -> Any:
    """Return the first true thing that `look` gives."""
    until = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < until, f"not within {seconds} s: {look.__doc__ or look}"
        time.sleep(0.1)


@dataclass
class Fleet:
    """One server, and the agents that were started."""

    folder: Path
    make_wheel: Callable[..., Path]
    settings: dict[str, str] = field(default_factory=dict)
    url: str = ""
    server: subprocess.Popen[str] | None = None
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    builds: int = 0

    @property
    def data_dir(self) -> Path:
        return self.folder / "depot"

    def library(self, source: str) -> bytes:
        """Compile one kernel module; each has other bytes."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler to make modules with")
        self.builds += 1
        text, target = self.folder / f"m{self.builds}.c", self.folder / f"m{self.builds}.so"
        text.write_text(source % self.builds)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", target, text], check=True)
        return target.read_bytes()

    def pins(self, modules: dict[str, bytes], *, version: str) -> str:
        """Make the wheels of kernel modules and of libtvm_ffi.so; return the pin set's TOML."""
        spec = importlib.util.find_spec("tvm_ffi")
        assert spec is not None
        assert spec.submodule_search_locations
        runtime = Path(spec.submodule_search_locations[0], "lib", "libtvm_ffi.so").read_bytes()
        wheels = [
            self.make_wheel(
                {f"flashinfer_jit_cache/jit_cache/{name}/{name}.so": data for name, data in modules.items()},
                project="flashinfer_jit_cache",
                version=version,
            ),
            self.make_wheel(
                {"tvm_ffi/lib/libtvm_ffi.so": runtime}, project="apache_tvm_ffi", version="0.1.3"
            ),
        ]
        return "".join(
            f'[{wheel.name.split("-")[0]}.cu130.{ARCH}]\nfilename = "{wheel.name}"\n'
            f'url = "{wheel.as_uri()}"\nsha256 = "{hashlib.sha256(wheel.read_bytes()).hexdigest()}"\n\n'
            for wheel in wheels
        )

    def serve(self) -> None:
        arguments = ["serve", "--data-dir", self.data_dir, "--port", self.url.rpartition(":")[2] or "0"]
        self.server = subprocess.Popen(
            [*COMMAND, *map(str, arguments), "--allow-anonymous", "--allow-file-urls"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.settings},
        )
        assert self.server.stdout is not None
        match = re.search(r"http://\S+", self.server.stdout.readline())
        assert match is not None
        self.url = match.group()

    def stop_server(self, number: int = signal.SIGTERM) -> None:
        assert self.server is not None
        self.server.send_signal(number)
        self.server.wait(30)
        if self.server.stdout is not None:
            self.server.stdout.close()
        self.server = None

    def ask(self, method: str, path: str, *, code: int = 200, **request: Any) -> Any:
        answer = httpx.request(method, self.url + path, timeout=30, trust_env=False, **request)
        assert answer.status_code == code, answer.text
        return answer.json() if answer.content else None

    def propose(self, name: str, toml: str) -> str:
        """Record a revision, bring its wheels in, return its digest."""
        answer = httpx.post(
            f"{self.url}/v1/pins",
            params={"name": name, "propose": "true", "why": "a test"},
            content=toml,
            headers={"content-type": "application/toml"},
            trust_env=False,
        )
        assert answer.status_code in (200, 201), answer.text
        revision = str(answer.json()["revision"])
        job = self.ask("POST", "/v1/materialize", json={"revisions": [revision]}, code=202)["id"]
        ended = wait_for(
            lambda: (
                answer
                if (answer := self.ask("GET", f"/v1/jobs/{job}"))["state"] in ("succeeded", "failed")
                else None
            )
        )
        assert ended["state"] == "succeeded", ended
        return revision

    def activate(self, name: str, revision: str, *, code: int = 200, **options: Any) -> Any:
        return self.ask(
            "POST", f"/v1/pins/{name}/activate", json={"revision": revision, **options}, code=code
        )

    def agent(self, name: str, *options: object) -> subprocess.Popen[bytes]:
        """Start an agent with a cache of its own."""
        log = (self.folder / f"{name}.log").open("ab")
        words = [
            "agent",
            "--server",
            self.url,
            "--name",
            name,
            "--cache",
            self.folder / name,
            "--cuda",
            "cu130",
        ]
        words += ["--sm", "none", *options]
        self.agents[name] = subprocess.Popen([*COMMAND, *map(str, words)], stdout=log, stderr=log)
        log.close()
        return self.agents[name]

    def node(self, name: str) -> Any:
        return self.ask("GET", f"/v1/nodes/{name}")

    def ready(self, name: str, bundle: str | None = None) -> Any:
        """Wait until a node is ready, with `bundle` when it is given."""

        def look() -> Any:
            if not any(node["name"] == name for node in self.ask("GET", "/v1/nodes")["nodes"]):
                return None
            facts = self.node(name)
            wanted = bundle or facts["desired"]["bundle"]
            node = facts["node"]
            return facts if (node["state"], node["bundle"]) == ("ready", wanted) else None

        try:
            return wait_for(look)
        except AssertionError as error:
            log = (self.folder / f"{name}.log").read_text()[-3000:]
            raise AssertionError(f"{error}\n{self.node(name)}\n{log}") from error

    def close(self) -> None:
        for process in self.agents.values():
            process.kill()
            process.wait()
        if self.server is not None:
            self.server.kill()
            self.stop_server(signal.SIGKILL)


@pytest.fixture
def fleet(tmp_path: Path, make_wheel: Callable[..., Path]) -> Iterator[Fleet]:
    """A server with nothing pinned yet."""
    made = Fleet(tmp_path, make_wheel)
    made.serve()
    yield made
    made.close()


@pytest.fixture(name="wait_for")
def waiting() -> Callable[..., Any]:
    """Return the function that waits for something to be true."""
    return wait_for


@pytest.fixture
def good() -> str:
    """The C source of a module that smoke finds no fault with: it loads, and there is no GPU to run it."""
    return GOOD


@pytest.fixture
def bad() -> str:
    """The C source of a module that fails it: its function takes a call without arguments."""
    return BAD
