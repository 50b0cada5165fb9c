"""What an agent remembers over its own death: which bytes were smoked under which driver, what was ready."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_depot.agent.errors import AgentRunning
from kernel_depot.worker.cache import storage_error


@dataclass
class Memory:
    """`smoked` holds outcomes by `sha256/driver`; `ready` is the bundle last synced and passed.

    `untold` are the keys of outcomes that the server may not have.
    """

    path: Path
    ready: str | None = None
    smoked: dict[str, dict[str, Any]] = field(default_factory=dict)
    untold: set[str] = field(default_factory=set)

    def outcome(self, sha256: str, driver: str | None) -> dict[str, Any] | None:
        """Return how these bytes did under this driver, None when they were not smoked."""
        return self.smoked.get(f"{sha256}/{driver or ''}")

    def keep(self, sha256: str, driver: str | None, outcome: dict[str, Any]) -> None:
        """Remember how these bytes did."""
        self.smoked[f"{sha256}/{driver or ''}"] = outcome
        self.untold.add(f"{sha256}/{driver or ''}")

    def to_tell(self, hashes: Iterable[str], driver: str | None) -> dict[str, dict[str, Any]]:
        """Return, by key, the outcomes of these bytes under this driver that the server may not have."""
        keys = [f"{sha256}/{driver or ''}" for sha256 in sorted(set(hashes))]
        return {key: self.smoked[key] for key in keys if key in self.untold and key in self.smoked}

    def told(self, keys: Iterable[str]) -> None:
        """Take note that the server has these outcomes."""
        self.untold.difference_update(keys)

    def tell_again(self) -> None:
        """Take it that the server may have none of the outcomes."""
        self.untold = set(self.smoked)

    def save(self, *, held: set[str]) -> None:
        """Write it down atomically, without what is about bytes that are not `held`. Raise CacheFull."""
        self.smoked = {key: value for key, value in self.smoked.items() if key.partition("/")[0] in held}
        self.untold &= self.smoked.keys()
        staged = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with staged.open("w", encoding="utf-8") as file:
                members = {"ready": self.ready, "smoked": self.smoked, "untold": sorted(self.untold)}
                json.dump(members, file)
                file.flush()
                os.fsync(file.fileno())
            staged.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                staged.unlink(missing_ok=True)
            raise storage_error(error, where=self.path) from error


def remembered(path: Path) -> Memory:
    """Read what was written down; what is absent or torn is taken for nothing: all is proved again."""
    try:
        members = json.loads(path.read_text(encoding="utf-8"))
        ready, smoked, untold = members["ready"], members["smoked"], members["untold"]
        if not isinstance(smoked, dict) or not (ready is None or isinstance(ready, str)):
            raise ValueError(members)
        return Memory(path, ready, smoked, set(untold))
    except (OSError, ValueError, KeyError, TypeError):
        return Memory(path)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Be the only agent of a cache while the block runs. Raise AgentRunning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise storage_error(error, where=path) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AgentRunning(
                "another agent looks after this cache",
                where=str(path),
                remedy="stop it, or give this one another --cache",
            ) from error
        yield
    finally:
        os.close(descriptor)
