"""A bundle's bytes are what their digest says, and cannot lead out of a view."""

import json

import pytest
import rfc8785

from kernel_depot.bundle import (
    ArtifactKind,
    Bundle,
    BundleArtifact,
    BundleError,
    BundleWheel,
    MissingWheel,
    PinSetRef,
    read_bundle,
)
from kernel_depot.digest import sha256_bytes
from kernel_depot.platform import Arch, CudaTag, Platform, Sm

A, B = "a" * 64, "b" * 64
BUNDLE = Bundle(
    pin_sets=(PinSetRef("set", A),),
    platform=Platform(CudaTag(13, 0), Arch.X86_64, Sm(9, 0, "a")),
    modules=("norm",),
    wheels=(BundleWheel("p", "1", "p-1-py3-none-any.whl", B, 10, "cu130"),),
    artifacts=(
        BundleArtifact("x/norm.so", ArtifactKind.MODULE, A, 5, B, "norm", ("sm_90a",), ("compute_90",)),
        BundleArtifact("x/again.so", ArtifactKind.SUPPORT, A, 5, B),
    ),
    missing=(MissingWheel("q", "q-1-py3-none-any.whl", A, "unreachable"),),
)


def test_round_trip_through_canonical_json() -> None:
    data = rfc8785.dumps(BUNDLE.to_json())
    assert read_bundle(data, digest=sha256_bytes(data), where="test") == BUNDLE


def test_totals_count_each_blob_once_and_missing_wheels_make_it_incomplete() -> None:
    assert BUNDLE.total_size == 5
    assert not BUNDLE.complete


def test_bytes_that_do_not_match_the_digest_are_refused() -> None:
    data = rfc8785.dumps(BUNDLE.to_json())
    with pytest.raises(BundleError, match="do not match its digest"):
        read_bundle(data + b" ", digest=sha256_bytes(data), where="test")


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../b", "a//b", "./a", "", "a/", "a\\b", "a\0b", "..", "a/."]
)
def test_a_path_that_leaves_its_directory_is_refused(path: str) -> None:
    members = BUNDLE.to_json()
    members["artifacts"][0]["path"] = path
    data = json.dumps(members).encode()
    with pytest.raises(BundleError, match="path"):
        read_bundle(data, digest=sha256_bytes(data), where="test")


@pytest.mark.parametrize(
    ("key", "value"), [("schema", 2), ("artifacts", [{}]), ("platform", None), ("wheels", 3)]
)
def test_other_shapes_are_refused(key: str, value: object) -> None:
    data = json.dumps({**BUNDLE.to_json(), key: value}).encode()
    with pytest.raises(BundleError):
        read_bundle(data, digest=sha256_bytes(data), where="test")
