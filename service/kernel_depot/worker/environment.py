"""The variables that make programs on this node use the synced files, and what they do not do."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from kernel_depot.bundle import ArtifactKind
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.errors import CacheEmpty
from kernel_depot.worker.views import View, rs_complete

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


def environment(cache: Cache) -> Environment:
    """Tell the environment for the current bundle. Raise CacheEmpty when nothing was synced.

    Paths name the bundle's own views, not `current`: a program keeps its bundle through later syncs.
    """
    digest = cache.current_digest()
    bundle = cache.bundle(digest) if digest is not None else None
    if digest is None or bundle is None:
        raise CacheEmpty(
            "there is no synced bundle to use", where=str(cache.root), remedy="run kernel-depot sync first"
        )
    base = cache.view_dir(digest)
    variables: dict[str, str] = {}
    python_path: tuple[str, ...] = ()
    notes: list[str] = []
    flashinfer = base / View.FLASHINFER.value
    if flashinfer.is_dir():
        python_path = (str(flashinfer),)
        variables["FLASHINFER_DISABLE_JIT"] = "1"
        variables["FLASHINFER_USE_CUDA_NORM"] = "1"
        variables["FLASHINFER_WORKSPACE_BASE"] = str(_workspace(cache))
        notes.append(CUTE_DSL)
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


def _workspace(cache: Cache) -> Path:
    """FlashInfer writes generated sources even for modules it finds built, so it gets a place for them."""
    return cache.root / "workspace"
