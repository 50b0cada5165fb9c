"""The store's interface: immutable bytes named by their SHA-256, and the zstd forms beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

PIECE = 1 << 20


class Form(str, Enum):
    """How a blob's bytes are kept, and the parts of uploads, which are no blobs yet.

    All are named by the SHA-256 of the identity bytes.
    """

    IDENTITY = "identity"
    ZSTD = "zstd"
    PART = "part"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class StagedBlob:
    """A whole, verified file under a private name, ready to be published. `size` is in bytes."""

    sha256: str
    size: int
    path: Path


@dataclass(frozen=True, slots=True)
class Recovery:
    """What `recover` found after a crash: private names removed, files re-hashed, torn ones dropped."""

    removed: int = 0
    rehashed: int = 0
    dropped: tuple[str, ...] = ()
    dropped_forms: tuple[str, ...] = ()


class Store(Protocol):
    """The shared cache of blobs. Methods may be called from any thread.

    Callers verify bytes before they stage them; nothing is visible under a digest before it is whole.
    Raise StoreUnreachable when the storage does not answer.
    """

    @property
    def location(self) -> str:
        """The URL or path that `open_store` takes; without secrets."""

    @property
    def publishes_by_rename(self) -> bool:
        """Tell whether publishing moves no bytes, so that a transaction can stay open meanwhile."""

    def staging(self) -> AbstractContextManager[Path]:
        """Give a private directory, on the store's own file system where it has one; removed on exit."""

    def publish(self, staged: StagedBlob, *, form: Form = Form.IDENTITY) -> None:
        """Publish one file and consume it. The size of a zstd form is that of the form."""

    def publish_many(self, staged: Sequence[StagedBlob], *, form: Form = Form.IDENTITY) -> None:
        """Publish many files and consume them; each appears whole or not at all."""

    def has(self, sha256s: Iterable[str], *, form: Form = Form.IDENTITY) -> set[str]:
        """Return those digests whose bytes the store holds."""

    def size(self, sha256: str, *, form: Form = Form.IDENTITY) -> int | None:
        """Return the stored bytes' size, None when the store does not hold them."""

    def path(self, sha256: str, *, form: Form = Form.IDENTITY) -> Path | None:
        """Return where the bytes lie on this machine, None when absent or not on this machine."""

    def read(
        self, sha256: str, *, start: int = 0, end: int | None = None, form: Form = Form.IDENTITY
    ) -> Iterator[bytes]:
        """Yield the bytes from `start` to before `end` in pieces of at most 1 MiB. Raise BlobMissing."""

    def delete(self, sha256: str, *, form: Form = Form.IDENTITY) -> None:
        """Forget the bytes; absent ones are no error."""

    def list(self, *, form: Form = Form.IDENTITY) -> Iterator[str]:
        """Yield every digest the store holds in that form."""

    def presign(self, sha256: str, *, expires: int, form: Form = Form.IDENTITY) -> str | None:
        """Return a URL that reads the bytes for `expires` seconds, None where there is no such thing."""

    def recover(self) -> Recovery:
        """Clean what dead processes left, and check what a machine's crash may have torn."""

    def settle(self, *, older_than: float = 0.0) -> None:
        """Bring published bytes to the disk; `older_than` skips batches younger than so many seconds."""
