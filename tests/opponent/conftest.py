"""A node's cache that holds bundles made on the spot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import rfc8785

from kernel_depot.bundle import ArtifactKind, Bundle, BundleArtifact, BundleGroup, BundleWheel
from kernel_depot.digest import sha256_bytes
from kernel_depot.platform import Arch, CudaTag, Platform
from kernel_depot.worker.cache import Cache

Synced = Callable[..., Path]


def bundle_of(modules: Sequence[str], groups: Sequence[BundleGroup]) -> Bundle:
    wheel = BundleWheel("flashinfer_jit_cache", "0.6.3+cu130", "w.whl", "0" * 64, 1, "cu130")
    artifacts = tuple(
        BundleArtifact(
            f"flashinfer_jit_cache/jit_cache/{uri}/{uri}.so",
            ArtifactKind.MODULE,
            sha256_bytes(uri.encode()),
            len(uri),
            "0" * 64,
            module=uri,
        )
        for uri in modules
    )
    platform = Platform(CudaTag(13, 0), Arch.X86_64, None)
    return Bundle((), platform, (wheel,), artifacts, groups=tuple(groups))


@pytest.fixture
def synced(tmp_path: Path) -> Synced:
    """Make a node's cache hold a bundle of modules and groups, and be current."""

    def make(modules: Sequence[str], *groups: BundleGroup) -> Path:
        bundle = bundle_of(modules, groups)
        manifest = rfc8785.dumps(bundle.to_json())
        digest = sha256_bytes(manifest)
        cache = Cache(tmp_path / "cache")
        cache.prepare()
        for artifact in bundle.artifacts:
            path = cache.blob_path(artifact.sha256)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(artifact.module.encode() if artifact.module else b"")
        with cache.private() as private:
            cache.write_bundle(digest, manifest, private=private)
        cache.view_dir(digest).mkdir(parents=True, exist_ok=True)
        with cache.private() as private:
            cache.switch(digest, private=private)
        return cache.root

    return make
