"""The two gates before the opponent: the bundle must carry its group, and the process must opt in.

The group's entry in the bundle's manifest is the first gate. That the same module lies in the default set for
other callers does not open it. The second is read at each call, so that nothing is left on by an earlier one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kernel_depot.kernels.errors import GroupMissing
from kernel_depot.kernels.runtime import Runtime
from kernel_depot.opponent.errors import OpponentAbsent, OpponentOff, SwitchInvalid
from kernel_depot.worker.cache import Cache
from kernel_depot.worker.errors import CacheEmpty
from kernel_depot.worker.location import default_cache

GROUP: Final = "opponent"
SWITCH: Final = "KERNEL_DEPOT_FLASHINFER_PREFILL"
_SYNC: Final = f"sync it with: kernel-depot sync --group {GROUP}"


def available(cache: Path | None = None) -> bool:
    """Tell whether the node's current bundle carries the opponent's group, and its files are here."""
    held = Cache(cache if cache is not None else default_cache())
    digest = held.current_digest()
    bundle = held.bundle(digest) if digest is not None else None
    if bundle is None:
        return False
    modules = {module for group in bundle.groups if group.name == GROUP for module in group.modules}
    files = [artifact for artifact in bundle.artifacts if artifact.module in modules]
    return bool(files) and all(held.blob_path(artifact.sha256).is_file() for artifact in files)


_opened: dict[tuple[Path, str], Runtime] = {}


def require_artifact(cache: Path | None = None) -> Runtime:
    """Return the group's modules of the node's current bundle, and no other, opened once.

    Raise OpponentAbsent, RuntimeIncompatible.
    """
    held = Cache(cache if cache is not None else default_cache())
    digest = held.current_digest()
    if digest is None:
        return _open(cache)
    key = (held.root, digest)
    if key not in _opened:
        _opened.setdefault(key, _open(cache))
    return _opened[key]


def _open(cache: Path | None) -> Runtime:
    where = str(cache if cache is not None else default_cache())
    try:
        runtime = Runtime.open(cache, group=GROUP)
    except GroupMissing as error:
        raise OpponentAbsent(
            "this node's bundle does not carry the opponent",
            where=error.where,
            expected=f"the module group {GROUP}",
            found=error.found,
            remedy=_SYNC,
        ) from error
    except CacheEmpty as error:
        raise OpponentAbsent(
            "this node has no bundle, so it has no opponent either", where=where, remedy=_SYNC
        ) from error
    gone = [file.uri for file in runtime.files.values() if not file.path.is_file()]
    if gone or not runtime.files:
        raise OpponentAbsent(
            "the opponent's files are not in this node's cache",
            where=where,
            expected=", ".join(gone) or "a module",
            remedy=_SYNC,
        )
    return runtime


def require_switch(value: str | None = None) -> None:
    """Refuse unless the process opted in; `value` stands for the variable's.

    Raise OpponentOff, SwitchInvalid.
    """
    given = value if value is not None else os.environ.get(SWITCH)
    if given == "1":
        return
    if given in (None, "0"):
        raise OpponentOff(
            "the opponent is here, and this process has not opted in",
            where=SWITCH,
            expected="1",
            found=given if given is not None else "unset",
            remedy=f"set {SWITCH}=1 for the benchmark; nothing else is called instead",
        )
    raise SwitchInvalid(
        f"{SWITCH} has a value that means nothing", where=SWITCH, expected="0 or 1", found=repr(given)
    )
