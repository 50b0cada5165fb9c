"""Every way in which a node fails to get or use its kernels."""

from __future__ import annotations

from typing import Any

from kernel_depot.errors import PROBLEM_NAMESPACE, DepotError


class WorkerError(DepotError):
    """Base of the worker's failures."""

    slug = "worker-failed"
    title = "The node could not be served"
    status = 500


class ServerUnreachable(WorkerError):
    """No usable answer came after every retry."""

    slug = "server-unreachable"
    title = "The server cannot be reached"
    status = 503


class ServerRefused(WorkerError):
    """The server answered with a problem; its type travels on unchanged."""

    slug = "server-refused"
    title = "The server refused the request"
    status = 502

    def __init__(self, what: str, *, problem: dict[str, Any], code: int, where: str) -> None:
        known = {"type", "title", "status", "detail", "where", "expected", "found", "remedy"}
        super().__init__(
            what,
            where=problem.get("where") or where,
            expected=problem.get("expected"),
            found=problem.get("found"),
            remedy=problem.get("remedy"),
            **{key: value for key, value in problem.items() if key not in known},
        )
        self.code = code
        self._type = str(problem.get("type") or PROBLEM_NAMESPACE + self.slug)

    @property
    def type(self) -> str:
        """The server's own problem type."""
        return self._type

    def problem(self) -> dict[str, Any]:
        """Return the problem's members with the server's own type and status."""
        return {**super().problem(), "status": self.code}


class ServerProtocol(WorkerError):
    """An answer that no server of this product gives."""

    slug = "server-protocol"
    title = "The server's answer cannot be read"
    status = 502


class BlobMismatch(WorkerError):
    """Bytes that do not have the digest they were asked for by, even on a second try."""

    slug = "blob-mismatch"
    title = "The bytes do not match their digest"
    status = 502


class CacheUnusable(WorkerError):
    """The cache directory cannot be created or written."""

    slug = "cache-unusable"
    title = "The node's cache cannot be written"
    status = 500


class CacheFull(WorkerError):
    """The disk, or a quota on it, is full."""

    slug = "cache-full"
    title = "The node's disk is full"
    status = 507


class CacheEmpty(WorkerError):
    """There is no synced bundle to work from."""

    slug = "cache-empty"
    title = "The node's cache holds no bundle"
    status = 404


class CacheDamaged(WorkerError):
    """Files that the bundle names are gone or have the wrong size, and no server may be asked."""

    slug = "cache-damaged"
    title = "The node's cache is damaged"
    status = 500


class BundleIncomplete(WorkerError):
    """The server does not have every pinned wheel yet."""

    slug = "bundle-incomplete"
    title = "The bundle lacks pinned wheels"
    status = 409


class PlatformUnknown(WorkerError):
    """The host does not tell what it is, so it must be said."""

    slug = "platform-unknown"
    title = "The node's platform cannot be told"
    status = 400


class ViewImpossible(WorkerError):
    """A view that this bundle has no content for, or whose name is unknown."""

    slug = "view-impossible"
    title = "The view cannot be built"
    status = 400


class ProgramNotRun(WorkerError):
    """The program that was to run with the depot's files is not there, or not to be executed."""

    slug = "program-not-run"
    title = "The program cannot be run"
    status = 404

    def __init__(self, detail: str, *, exit_status: int, **facts: Any) -> None:
        super().__init__(detail, **facts)
        self.exit_status = exit_status


class RecorderMissing(WorkerError):
    """The view has nothing that could write down which modules are asked for."""

    slug = "recorder-missing"
    title = "The view cannot record"
    status = 404


class RecordUnreadable(WorkerError):
    """A record of modules that were asked for is not there, or is something else."""

    slug = "record-unreadable"
    title = "The record cannot be read"
    status = 400
