"""A job's progress in its row: bytes and members done of all its wheels, and the stage of each."""

from __future__ import annotations

from threading import Lock
from typing import Any

from sqlalchemy import Engine

from kernel_depot.catalog import record
from kernel_depot.catalog.database import writing
from kernel_depot.jobs.progress import Stage, Step


class Board:
    """Adds up the steps of a job's wheels. Bytes are those downloaded and those unpacked, together."""

    def __init__(self, engine: Engine, job_id: str, filenames: list[str]) -> None:
        self._engine = engine
        self._job_id = job_id
        self._lock = Lock()
        self._now: dict[str, dict[str, Any]] = {
            filename: {"filename": filename, "stage": "queued"} for filename in filenames
        }
        self._steps: dict[tuple[str, Stage], Step] = {}

    def report(self, step: Step) -> None:
        """Take in a step and write the sums down."""
        with self._lock:
            if step.stage in (Stage.FETCHING, Stage.EXTRACTING):
                self._steps[step.filename, step.stage] = step
            self._now[step.filename] = {
                "filename": step.filename,
                "stage": step.stage.value,
                "bytes_done": step.bytes_done,
                "bytes_total": step.bytes_total,
                "members_done": step.members_done,
                "members_total": step.members_total,
                "note": step.note,
            }
            self._write()

    def settle(self, filename: str, outcome: dict[str, Any]) -> None:
        """Take in a wheel's outcome and write it down."""
        with self._lock:
            self._now[filename] = outcome
            for stage in (Stage.FETCHING, Stage.EXTRACTING):
                step = self._steps.get((filename, stage))
                if step is not None and outcome["outcome"] != "failed":
                    self._steps[filename, stage] = Step(
                        filename,
                        stage,
                        step.bytes_total or step.bytes_done,
                        step.bytes_total,
                        step.members_total or step.members_done,
                        step.members_total,
                    )
            self._write()

    def _write(self) -> None:
        steps = list(self._steps.values())
        with writing(self._engine) as session:
            record.update_job(
                session,
                self._job_id,
                bytes_done=sum(step.bytes_done for step in steps),
                bytes_total=sum(step.bytes_total or step.bytes_done for step in steps),
                members_done=sum(step.members_done for step in steps),
                members_total=sum(step.members_total or 0 for step in steps),
                wheels=list(self._now.values()),
            )
