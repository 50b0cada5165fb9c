"""How many bytes a sync moves for each byte it delivers, on the libraries of a real CUDA wheel.

    python benchmarks/wire.py [WHEEL] [--pattern GLOB] [--json] [--check]

The wheel's CUDA libraries are packed into a wheel of jit-cache's layout, materialized, and synced once the
server has made their zstd forms; all bytes between client and server are counted by a relay between the two,
headers, manifest and resolution included. Without WHEEL, pip downloads bitsandbytes, whose wheel carries the
same kernels built by several CUDA versions. What nvcc compressed itself (its default from CUDA 13 on) hardly
shrinks again, so each library is listed.
"""

from __future__ import annotations

import argparse
import base64
import fnmatch
import hashlib
import json
import socket
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import zstandard

from serve import depot_server
from sync import check_cache, fill_depot, manifest, sync_command, wait_for_zstd

GOAL = 0.3
PROJECT = "bitsandbytes"
PATTERN = "*_cuda*.so"


def download(folder: Path) -> Path:
    """Let pip fetch the wheel."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "-d",
            folder,
            PROJECT,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return next(folder.glob("*.whl"))


def repack(wheel: Path, pattern: str, folder: Path) -> tuple[Path, dict[str, float]]:
    """Write the libraries as modules of a jit-cache wheel; return it and how each shrinks by itself."""
    target = folder / "flashinfer_jit_cache-0.0.1+cu130-cp39-abi3-manylinux_2_28_x86_64.whl"
    info = "flashinfer_jit_cache-0.0.1+cu130.dist-info"
    record: list[str] = []
    shrinks: dict[str, float] = {}
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(name: str, data: bytes) -> None:
            archive.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")

        for name in source.namelist():
            if not fnmatch.fnmatch(name, pattern):
                continue
            data = source.read(name)
            uri = Path(name).stem
            shrinks[Path(name).name] = len(zstandard.ZstdCompressor(level=3).compress(data)) / len(data)
            add(f"flashinfer_jit_cache/jit_cache/{uri}/{uri}.so", data)
        if not shrinks:
            raise SystemExit(f"{wheel.name} holds nothing like {pattern}")
        add(f"{info}/METADATA", b"Metadata-Version: 2.1\nName: flashinfer-jit-cache\nVersion: 0.0.1+cu130\n")
        add(
            f"{info}/WHEEL",
            b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp39-abi3-manylinux_2_28_x86_64\n",
        )
        archive.writestr(f"{info}/RECORD", "".join(record) + f"{info}/RECORD,,\n")
    return target, shrinks


class Relay:
    """Passes connections on to the server and counts the bytes both ways."""

    def __init__(self, server: str) -> None:
        parts = urlsplit(server)
        self.target = (parts.hostname, parts.port)
        self.up = self.down = 0
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        """Take connections until the listener is closed."""
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(self.target)
            for source, sink, way in ((client, server, "up"), (server, client, "down")):
                threading.Thread(target=self.carry, args=(source, sink, way), daemon=True).start()

    def carry(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        """Pass one direction on."""
        while True:
            try:
                data = source.recv(1 << 18)
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
            except OSError:
                return
            with self.lock:
                setattr(self, way, getattr(self, way) + len(data))


@contextmanager
def relay(server: str) -> Iterator[Relay]:
    """Run a relay in front of the server."""
    made = Relay(server)
    try:
        yield made
    finally:
        made.listener.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheel", type=Path, nargs="?", metavar="WHEEL")
    parser.add_argument("--pattern", default=PATTERN, help="which members are CUDA libraries")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help=f"exit 1 above {GOAL}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wire-") as name:
        folder = Path(name)
        packed, shrinks = repack(arguments.wheel or download(folder), arguments.pattern, folder)
        data_dir = fill_depot(packed, folder / "server")
        with depot_server(data_dir) as server, relay(server) as between:
            wait_for_zstd(data_dir)
            bundle = manifest(server)
            subprocess.run(sync_command(between.url, folder / "cache"), check=True, stdout=subprocess.DEVNULL)
            check_cache(folder / "cache", bundle)
            moved = between.up + between.down
    delivered = sum({item["sha256"]: item["size"] for item in bundle["artifacts"]}.values())
    ratio = moved / delivered
    if arguments.json:
        print(
            json.dumps(
                {"delivered": delivered, "moved": moved, "ratio": ratio, "goal": GOAL, "libraries": shrinks}
            )
        )
    else:
        for library, shrink in sorted(shrinks.items()):
            print(f"{library:<40}{shrink:>8.3f} of its size at zstd level 3")
        print(f"\ndelivered {delivered} bytes, moved {moved} both ways")
        print(f"ratio {ratio:.3f} (goal: at most {GOAL})")
    if arguments.check and ratio > GOAL:
        sys.exit(1)


if __name__ == "__main__":
    main()
