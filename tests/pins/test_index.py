"""Pinned files are found in a package index served on loopback."""

import http.server
import threading
from collections.abc import Iterator

import pytest

from kernel_depot.pins.index import (
    FileNotInIndex,
    IndexHashMismatch,
    IndexUnknown,
    IndexUnreachable,
    locate,
)

SHA = "a" * 64
FILE = "demo_kernels-1.0-py3-none-any.whl"


class Index(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/simple/demo-kernels/":
            page = f'<html><body><a href="/f/{FILE}#sha256={SHA}">{FILE}</a></body></html>'
            self.send_response(200)
        elif self.path == "/simple/broken/":
            page = ""
            self.send_response(503)
        else:
            page = ""
            self.send_response(404)
        body = page.encode()
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture
def index() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/simple/"
        server.shutdown()
        thread.join()


def find(
    index: str, *, project: str = "demo_kernels", filename: str = FILE, sha256: str = SHA, name: str = "local"
) -> str:
    return locate(
        index=name,
        project=project,
        version="1.0",
        filename=filename,
        sha256=sha256,
        indexes={"local": index, "pypi": index},
    )


def test_a_listed_file_has_a_url(index: str) -> None:
    assert find(index).startswith(index.replace("/simple/", f"/f/{FILE}"))


def test_the_default_name_can_be_pointed_at_a_mirror(index: str) -> None:
    assert find(index, name="pypi").startswith("http://127.0.0.1")


def test_a_file_that_is_not_listed_names_the_nearest(index: str) -> None:
    with pytest.raises(FileNotInIndex) as caught:
        find(index, filename="demo_kernels-1.0-py2-none-any.whl")
    assert caught.value.found == [FILE]


def test_an_unknown_project_is_not_in_the_index(index: str) -> None:
    with pytest.raises(FileNotInIndex, match="no project"):
        find(index, project="nothing")


def test_an_announced_hash_that_contradicts_the_pin_is_refused(index: str) -> None:
    with pytest.raises(IndexHashMismatch) as caught:
        find(index, sha256="b" * 64)
    assert (caught.value.expected, caught.value.found) == ("b" * 64, SHA)


def test_an_index_that_fails_or_is_gone_is_unreachable(index: str) -> None:
    with pytest.raises(IndexUnreachable):
        find(index, project="broken")
    with pytest.raises(IndexUnreachable):
        find("http://127.0.0.1:9/simple/")


def test_a_name_without_an_address_says_which_variable_gives_one(index: str) -> None:
    with pytest.raises(IndexUnknown, match="KERNEL_DEPOT_INDEX_OTHER"):
        find(index, name="other")
