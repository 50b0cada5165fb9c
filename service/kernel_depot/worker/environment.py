"""The variables that make programs on this node use the synced files, and what they do not do."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernel_depot.bundle import ArtifactKind, Bundle
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.errors import CacheEmpty, RecorderMissing
from kernel_depot.worker.views import RECORD_VARIABLE, RECORDER, View, rs_complete

CUTE_DSL = (
    "FLASHINFER_DISABLE_JIT stops nvcc and ninja only: kernels that FlashInfer writes in CuTe-DSL still "
    "compile at run time (norm from 0.6.7 on, unless FLASHINFER_USE_CUDA_NORM=1; gdn from 0.6.14 on)"
)


@dataclass(frozen=True, slots=True)
class Environment:
    """Variables to set, directories to put first on PYTHONPATH, and notes for people."""

    variables: dict[str, str]
    python_path: tuple[str, ...]
    notes: tuple[str, ...]

    def shell(self) -> str:
        """Return lines for a POSIX shell to evaluate; notes become comments."""
        lines = [f"# {note}" for note in self.notes]
        if self.python_path:
            first = shlex.quote(":".join(self.python_path))
            lines.append(f"export PYTHONPATH={first}${{PYTHONPATH:+:$PYTHONPATH}}")
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return "\n".join(lines)

    def over(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return a program's variables: `variables` and these, with these first where both say something."""
        path = [*self.python_path, *filter(None, [variables.get("PYTHONPATH")])]
        joined = {"PYTHONPATH": os.pathsep.join(path)} if path else {}
        return {**variables, **joined, **self.variables}


def environment(cache: Cache, *, record: Path | None = None) -> Environment:
    """Tell the environment for the current bundle. Raise CacheEmpty when nothing was synced.

    Paths name the bundle's own views, not `current`: a program keeps its bundle through later syncs. With
    `record`, FlashInfer's questions for modules are appended to that file; raise RecorderMissing where the
    view cannot do that.
    """
    digest, bundle = _current(cache)
    base = cache.view_dir(digest)
    variables: dict[str, str] = {}
    python_path: tuple[str, ...] = ()
    notes: list[str] = []
    flashinfer = base / View.FLASHINFER.value
    if flashinfer.is_dir():
        python_path = (str(flashinfer),)
        variables["FLASHINFER_DISABLE_JIT"] = "1"
        variables["FLASHINFER_USE_CUDA_NORM"] = "1"
        variables["FLASHINFER_WORKSPACE_BASE"] = str(workspace_base(cache))
        notes.append(CUTE_DSL)
    if record is not None:
        if not (flashinfer / RECORDER).is_file():
            raise RecorderMissing(
                "nothing here can record which modules are asked for",
                where=str(flashinfer),
                expected=RECORDER,
                remedy="sync a bundle with kernel modules, with its view flashinfer; if there is one, it was "
                "made by an earlier version: remove it and sync again",
            )
        variables[RECORD_VARIABLE] = str(record.absolute())
    cubins = base / View.FILES.value / "flashinfer_cubin" / "cubins"
    if any(artifact.kind is ArtifactKind.CUBIN for artifact in bundle.artifacts) and cubins.is_dir():
        variables["FLASHINFER_CUBIN_DIR"] = str(cubins)
    crate = base / View.FLASHINFER_RS.value
    if crate.is_dir():
        if rs_complete(bundle, crate):
            variables["FLASHINFER_RS_CACHE_DIR"] = str(crate)
        else:
            notes.append(
                "flashinfer-rs would download its wheels: sync --with-wheels lays them where it looks"
            )
    return Environment(variables, python_path, tuple(notes))


def current_bundle(cache: Cache) -> Bundle:
    """Return the bundle that programs use now. Raise CacheEmpty when nothing was synced."""
    return _current(cache)[1]


def workspace_base(cache: Cache) -> Path:
    """FlashInfer writes generated sources even for modules it finds built, so it gets a place for them."""
    return cache.root / "workspace"


def _current(cache: Cache) -> tuple[str, Bundle]:
    digest = cache.current_digest()
    bundle = cache.bundle(digest) if digest is not None else None
    if digest is None or bundle is None:
        raise CacheEmpty(
            "there is no synced bundle to use", where=str(cache.root), remedy="run kernel-depot sync first"
        )
    return digest, bundle
