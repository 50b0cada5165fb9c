"""Durable jobs on DBOS: a job whose server dies is taken up again by that server's successor, or by another.

A job is a workflow with one child a wheel; what a child has done is not done again. The engine's own tables
lie in `jobs.sqlite`, or in the PostgreSQL database under the schema `dbos`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event, Lock, Semaphore, Thread
from typing import Any
from uuid import uuid4

_dbos_log = logging.getLogger("dbos")
_dbos_log.addHandler(logging.NullHandler())  # keeps DBOS from adding a handler of its own on import

from dbos import DBOS, DBOSConfig, SetWorkflowID, WorkflowHandle  # noqa: E402

from kernel_depot.catalog import bundles, leases, queries, record  # noqa: E402
from kernel_depot.catalog.database import reading, writing  # noqa: E402
from kernel_depot.errors import DepotError  # noqa: E402
from kernel_depot.jobs import scrub  # noqa: E402
from kernel_depot.jobs.board import Board  # noqa: E402
from kernel_depot.jobs.depot import Depot  # noqa: E402
from kernel_depot.jobs.materialize import Failed, WheelOutcome, materialize_wheel, selected  # noqa: E402
from kernel_depot.jobs.progress import Step, Throttled  # noqa: E402
from kernel_depot.jobs.zstd_maker import ZstdMaker  # noqa: E402
from kernel_depot.pins.pin import Pin  # noqa: E402
from kernel_depot.platform import Arch, CudaTag  # noqa: E402

__all__ = ["EngineNotRunning", "JobEngine", "start_engine", "submit_materialize", "submit_scrub"]

_log = logging.getLogger(__name__)

# What a stored workflow needs of the code. Raised when its steps change so that old ones cannot go on.
_WORKFLOW_VERSION = "1"
_MATERIALIZE, _SCRUB = "materialize", "scrub"
_PARALLEL_WHEELS = 4
_REPORT_SECONDS = 1.0
_LEASE_LOST = 75  # EX_TEMPFAIL of sysexits.h


class EngineNotRunning(DepotError):
    """A job was handed in where no engine runs."""

    slug = "jobs-not-running"
    title = "Jobs are not running here"
    status = 503


class BlobsLost(DepotError):
    """Damaged blobs that nothing could replace."""

    slug = "blobs-lost"
    title = "Blobs are lost"


class _Stopping(BaseException):
    """Ends a step without an outcome, so that it is run again by whoever takes the job up."""


@dataclass
class JobEngine:
    """The running engine of this process: there is one at most."""

    depot: Depot
    executor: str
    _resources: ExitStack
    _zstd: ZstdMaker
    _stopping: Event = field(default_factory=Event)

    def lost(self) -> None:
        """Let no step go on: another server may take this one for dead, and do its work."""
        self._stopping.set()

    def stop_if_asked(self) -> None:
        """Raise in a step's thread once the engine is closing, or others may do its work."""
        if self._stopping.is_set():
            raise _Stopping

    def close(self) -> None:
        """Stop; jobs under way go on when an engine starts again."""
        global _running
        self._stopping.set()
        self._resources.close()
        with _lock:
            if _running is self:
                _running = None

    def wake_zstd(self) -> None:
        """Say that there are new blobs."""
        self._zstd.wake()


_lock = Lock()
_running: JobEngine | None = None
_boards: dict[str, Board] = {}
_wheels = Semaphore(_PARALLEL_WHEELS)


def end_process() -> None:
    """End this process at once, unclean, so that what it does cannot go on beside its successor's work."""
    _log.critical("this server's lease is lost: others take it for dead, so it ends; start it again")
    logging.shutdown()
    os._exit(_LEASE_LOST)


def start_engine(depot: Depot, *, on_lost: Callable[[], None] = end_process) -> JobEngine:
    """Start the engine of this process on the depot, and take up the jobs an earlier one left.

    `on_lost` is called when others may take this process for dead while it lives. With an embedded catalog
    silence alone is no loss: its processes share this machine and see each other live.
    Raise EngineNotRunning when one runs already.
    """

    def lost() -> None:
        if _running is not None:
            _running.lost()
        on_lost()

    global _running
    with _lock:
        if _running is not None:
            raise EngineNotRunning("this process runs a job engine already", where=_running.executor)
        with ExitStack() as stack:
            executor = _executor(depot, stack, on_lost=lost)
            zstd = ZstdMaker(depot)
            _running = JobEngine(depot, executor, stack, zstd)
            try:
                DBOS(config=_config(depot, executor))
                stack.callback(DBOS.destroy)
                DBOS.launch()
            except BaseException:
                _running = None
                raise
            zstd.start()
            stack.callback(zstd.close)
            _watch_others(depot, executor, stack)
            _running._resources = stack.pop_all()
            return _running


def _executor(depot: Depot, stack: ExitStack, *, on_lost: Callable[[], None]) -> str:
    """Take a name that no living engine has: the replica's, else that with a number."""
    number = 1
    while True:
        name = depot.settings.replica + (f"-{number}" if number > 1 else "")
        lease = leases.acquire(depot.engine, f"executor:{name}", seconds=depot.settings.lease_seconds)
        if isinstance(lease, leases.Acquired):
            kept = leases.kept(
                depot.engine,
                lease,
                seconds=depot.settings.lease_seconds,
                on_lost=on_lost,
                on_silence=depot.engine.dialect.name != "sqlite",
            )
            stack.enter_context(kept)
            return name
        number += 1


def _config(depot: Depot, executor: str) -> DBOSConfig:
    url = depot.engine.url
    if url.get_backend_name() == "sqlite":
        system = f"sqlite:///{depot.settings.data_dir.absolute()}/jobs.sqlite"
    else:
        system = url.set(drivername="postgresql").render_as_string(hide_password=False)
    return {
        "name": "kernel-depot",
        "system_database_url": system,
        "executor_id": executor,
        "application_version": _WORKFLOW_VERSION,
        "enable_otlp": False,
        "log_level": "WARNING",
    }


def _watch_others(depot: Depot, executor: str, stack: ExitStack) -> None:
    """Take up, three times a lease period, the workflows of executors whose lease is gone."""
    done = Event()

    def work() -> None:
        while not done.wait(depot.settings.lease_seconds / 3):
            try:
                _adopt(depot, executor)
            except Exception:
                _log.exception("jobs of other servers could not be looked at")

    thread = Thread(target=work, name="jobs of others", daemon=True)
    thread.start()
    stack.callback(thread.join)
    stack.callback(done.set)


def _adopt(depot: Depot, executor: str) -> list[str]:
    """Resume the workflows of dead executors here or wherever there is room; return their ids.

    One server adopts at a time: to resume what another has just resumed would start it twice.
    """
    seconds = depot.settings.lease_seconds
    lease = leases.acquire(depot.engine, "adoption", seconds=seconds)
    if not isinstance(lease, leases.Acquired):
        return []
    with leases.kept(depot.engine, lease, seconds=seconds):
        pending = DBOS.list_workflows(status="PENDING")
        others = {status.executor_id for status in pending} - {executor, None}
        with reading(depot.engine) as session:
            dead = {name for name in others if not leases.is_live(session, f"executor:{name}")}
        orphans = [status.workflow_id for status in pending if status.executor_id in dead]
        for workflow_id in orphans:
            DBOS.resume_workflow(workflow_id)
        _start_forgotten(depot)
    return orphans


def _start_forgotten(depot: Depot) -> list[str]:
    """Start the jobs whose server died between the row and the workflow; return their ids.

    A workflow of that id that is there after all is not started twice.
    """
    before = record.now() - timedelta(seconds=depot.settings.lease_seconds)
    with reading(depot.engine) as session:
        waiting = queries.queued_jobs(session, kinds=[_MATERIALIZE, _SCRUB], before=before)
    if not waiting:
        return []
    ids = [job.id for job in waiting]
    begun = {status.workflow_id for status in DBOS.list_workflows(workflow_ids=ids)}
    forgotten = [job for job in waiting if job.id not in begun]
    for job in forgotten:
        _start(job.id, kind=job.kind, request=job.request)
    return [job.id for job in forgotten]


def _start(job_id: str, *, kind: str, request: dict[str, Any]) -> None:
    with SetWorkflowID(job_id):
        DBOS.start_workflow(_scrub if kind == _SCRUB else _materialize, job_id, request)


def _submit(depot: Depot, *, kind: str, request: dict[str, Any], asked_by: str) -> str:
    """Write down a job and start it; a job that is only written down is started by `_start_forgotten`."""
    job_id = str(uuid4())
    with writing(depot.engine) as session:
        record.create_job(session, job_id, kind=kind, request=request, asked_by=asked_by)
    _start(job_id, kind=kind, request=request)
    return job_id


def submit_scrub(depot: Depot, *, asked_by: str) -> str:
    """Hand in a job that hashes the whole store again and mends it; return its id. Raise EngineNotRunning."""
    _needs_engine(depot)
    return _submit(depot, kind=_SCRUB, request={}, asked_by=asked_by)


def _needs_engine(depot: Depot) -> None:
    with _lock:
        if _running is None or _running.depot is not depot:
            raise EngineNotRunning(
                "no job engine runs in this process", remedy="ask a server started by `kernel-depot serve`"
            )


def submit_materialize(
    depot: Depot,
    *,
    pin_sets: Sequence[str] | None = None,
    revisions: Sequence[str] | None = None,
    cuda: Sequence[CudaTag] | None = None,
    arch: Sequence[Arch] | None = None,
    asked_by: str,
) -> str:
    """Hand in a job that brings in the wheels of pin sets as they are now; return its id.

    `pin_sets` None means all. `revisions` names recorded revisions instead, current or not.
    Raise EngineNotRunning, PinSetUnknown for a name nobody recorded, and RevisionUnknown.
    """
    _needs_engine(depot)
    with reading(depot.engine) as session:
        if revisions is not None:
            sets = bundles.known_revisions(session, revisions)
        else:
            sets = bundles.known_pin_sets(session, pin_sets)
    request = {
        "pin_sets": [{"name": pin_set.name, "revision": pin_set.digest} for pin_set in sets],
        "cuda": [str(tag) for tag in cuda] if cuda is not None else None,
        "arch": [str(word) for word in arch] if arch is not None else None,
    }
    return _submit(depot, kind=_MATERIALIZE, request=request, asked_by=asked_by)


@DBOS.workflow(name="materialize")
def _materialize(job_id: str, request: dict[str, Any]) -> None:
    """Start one child a wheel, wait for all, write down how it ended."""
    pins = _selection(request)
    _begin(job_id, [pin.filename for pin in pins])
    handles: list[WorkflowHandle[dict[str, Any]]] = []
    for pin in pins:
        with SetWorkflowID(f"{job_id}-{pin.sha256}"):
            handles.append(DBOS.start_workflow(_materialize_one, job_id, request, pin.sha256))
    _finish(job_id, [handle.get_result() for handle in handles])


@DBOS.workflow(name="materialize-wheel")
def _materialize_one(job_id: str, request: dict[str, Any], sha256: str) -> dict[str, Any]:
    return _bring(job_id, request, sha256)


@DBOS.step(name="bring-wheel")
def _bring(job_id: str, request: dict[str, Any], sha256: str) -> dict[str, Any]:
    """Bring one wheel in. Run again after a crash, it finds the wheel there or goes on with its download."""
    engine = _engine()
    pin = next(pin for pin in _selection(request) if pin.sha256 == sha256)
    with _wheels:
        board = _board(engine, job_id, request)
        report = Throttled(board.report, seconds=_REPORT_SECONDS)

        def watch(step: Step) -> None:
            engine.stop_if_asked()
            report(step)

        outcome: WheelOutcome
        try:
            outcome = materialize_wheel(engine.depot, pin, progress=watch)
        except Exception as error:
            _log.exception("job %s: %s failed", job_id, pin.filename)
            problem = DepotError(f"{type(error).__name__} while {pin.filename} was brought in").problem()
            outcome = Failed(pin, problem)
        engine.stop_if_asked()
        board.settle(pin.filename, outcome.to_json())
    engine.wake_zstd()
    return outcome.to_json()


@DBOS.step(name="begin")
def _begin(job_id: str, filenames: list[str]) -> None:
    with writing(_engine().depot.engine) as session:
        record.update_job(
            session,
            job_id,
            state="running",
            wheels=[{"filename": filename, "stage": "queued"} for filename in filenames],
        )


@DBOS.step(name="finish")
def _finish(job_id: str, outcomes: list[dict[str, Any]]) -> None:
    failed = [outcome for outcome in outcomes if outcome["outcome"] == "failed"]
    problem = None
    if failed:
        first = failed[0]["problem"]
        problem = first if len(failed) == 1 else {**first, "also": [f["filename"] for f in failed[1:]]}
    with writing(_engine().depot.engine) as session:
        record.update_job(
            session,
            job_id,
            state="failed" if failed else "succeeded",
            problem=problem,
            wheels=outcomes,
        )
    _boards.pop(job_id, None)


@DBOS.workflow(name="scrub")
def _scrub(job_id: str, request: dict[str, Any]) -> None:  # noqa: ARG001  the request is empty so far
    """Hash part after part, then bring what was damaged once more."""
    _begin(job_id, [])
    blobs = size = 0
    damaged: list[dict[str, Any]] = []
    for prefix in scrub.PARTS:
        part = _scrub_part(job_id, prefix, blobs, size, damaged)
        blobs, size = blobs + part["blobs"], size + part["bytes"]
        damaged += part["damaged"]
    _finish_scrub(job_id, damaged, _mend(job_id, damaged) if damaged else [])


@DBOS.step(name="scrub-part")
def _scrub_part(
    job_id: str, prefix: str, blobs: int, size: int, damaged: list[dict[str, Any]]
) -> dict[str, Any]:
    """Hash one part, and write down how far the job is; the other numbers are those of the parts before."""
    engine = _engine()
    engine.stop_if_asked()
    part = scrub.scrub_part(engine.depot, prefix, check=engine.stop_if_asked)
    with writing(engine.depot.engine) as session:
        record.update_job(
            session,
            job_id,
            bytes_done=size + part.bytes,
            members_done=blobs + part.blobs,
            members_total=queries.totals(session)["blobs"],
            modules=[*damaged, *part.damaged],
        )
    return {"blobs": part.blobs, "bytes": part.bytes, "damaged": list(part.damaged)}


@DBOS.step(name="mend")
def _mend(job_id: str, damaged: list[dict[str, Any]]) -> list[dict[str, Any]]:  # noqa: ARG001
    engine = _engine()
    return scrub.mend(engine.depot, [blob["sha256"] for blob in damaged], check=engine.stop_if_asked)


@DBOS.step(name="finish-scrub")
def _finish_scrub(job_id: str, damaged: list[dict[str, Any]], ended: list[dict[str, Any]]) -> None:
    lost = [blob for blob in ended if blob["state"] == "lost"]
    problem = None
    if lost:
        problem = BlobsLost(
            f"{len(lost)} blobs are damaged and could not be brought again",
            where="the store",
            found=", ".join(blob["sha256"] for blob in lost[:10]),
            remedy="publish the wheels that hold them again, or unpin them",
        ).problem()
    found = {blob["sha256"]: blob["found"] for blob in damaged}
    with writing(_engine().depot.engine) as session:
        record.update_job(
            session,
            job_id,
            state="failed" if lost else "succeeded",
            problem=problem,
            modules=[{**blob, "found": found[blob["sha256"]]} for blob in ended],
        )


def _board(engine: JobEngine, job_id: str, request: dict[str, Any]) -> Board:
    with _lock:
        if job_id not in _boards:
            _boards[job_id] = Board(
                engine.depot.engine, job_id, [pin.filename for pin in _selection(request)]
            )
        return _boards[job_id]


def _engine() -> JobEngine:
    if _running is None:
        raise EngineNotRunning("the job engine is stopping")
    return _running


def _selection(request: dict[str, Any]) -> list[Pin]:
    """Return the wheels a request names; revisions are immutable, so this is the same whenever asked."""
    cuda = {CudaTag.parse(tag) for tag in request["cuda"]} if request["cuda"] is not None else None
    arch = {Arch.parse(word) for word in request["arch"]} if request["arch"] is not None else None
    found: dict[str, Pin] = {}
    with reading(_engine().depot.engine) as session:
        for ref in request["pin_sets"]:
            pin_set = queries.pin_set_revision(session, ref["revision"])
            for pin in selected(pin_set, cuda=cuda, arch=arch) if pin_set is not None else ():
                found.setdefault(pin.sha256, pin)
    return list(found.values())
