"""A machine that builds for a depot: claims builds, renews its claims, publishes, tells how it ended."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from kernel_depot.builder.build import BuildOptions, ModuleState, build
from kernel_depot.builder.cache import BuildCache
from kernel_depot.builder.compile import Stopped
from kernel_depot.builder.depot import Claim, Depot
from kernel_depot.builder.errors import DepotRefused, DepotUnreachable
from kernel_depot.builder.plan import parse_plan
from kernel_depot.builder.publish import Publication, publish
from kernel_depot.errors import DepotError
from kernel_depot.liveness import process_name
from kernel_depot.platform import Arch, CudaTag, Sm
from kernel_depot.settings import Settings

_log = logging.getLogger(__name__)

_GLANCE = 0.2  # seconds between looks at whether there is something to tell
_NEWS = 1.0  # seconds between two tellings of changes
_LOST = ("build-claim-lost", "build-ended", "build-unknown")


@dataclass(frozen=True)
class Station:
    """A machine that builds. `roots` returns CUDA directories for a version, in the order of preference."""

    name: str
    arch: Arch
    cuda: Sequence[CudaTag]
    jobs: int
    cache: BuildCache
    settings: Settings
    roots: Callable[[CudaTag], Sequence[Path]]


def work(station: Station, depot: Depot, *, stop: Event, poll: float, once: bool = False) -> int:
    """Claim and carry out builds until `stop` is set; return how many.

    With `once`, end when none waits. A depot that does not answer is asked again after `poll` seconds; one
    that refuses this builder, DepotRefused, ends it.
    """
    carried = 0
    while not stop.is_set():
        try:
            claim = depot.claim(builder=station.name, arch=station.arch, cuda=station.cuda)
        except DepotUnreachable as error:
            if once:
                raise
            _log.warning("%s", error.what)
            claim = None
        if claim is not None:
            carry_out(claim, station, depot, stop=stop)
            carried += 1
        elif once:
            break
        else:
            stop.wait(poll)
    return carried


def carry_out(claim: Claim, station: Station, depot: Depot, *, stop: Event) -> None:
    """Build what was claimed and publish it, renewing the claim meanwhile; tell the depot how it ended.

    A build that is no longer held is dropped without a word. When `stop` is set it is given back.
    """
    _log.info("build %s is claimed", claim.id)
    with Pulse(claim, depot, stop=stop) as pulse:
        problem: dict[str, Any] | None = None
        publication: Publication | None = None
        try:
            publication = _build(claim, station, depot, pulse)
        except DepotError as error:
            problem = error.problem()
        except Exception as error:
            _log.exception("build %s failed", claim.id)
            problem = DepotError(f"{type(error).__name__} in the builder {station.name}: {error}").problem()
        except BaseException:
            stop.set()
            raise
        finally:
            pulse.end()
            if pulse.lost:
                _log.warning("build %s is no longer held by this builder; dropped", claim.id)
            elif publication is None and stop.is_set():
                _tell(lambda: depot.release(claim, pulse.modules), claim, "given back")
            else:
                wheels = [publication.to_json()] if publication is not None else []
                _tell(
                    lambda: depot.finish(claim, pulse.modules, wheels=wheels, problem=problem),
                    claim,
                    f"failed: {problem['detail']}" if problem is not None else "published",
                )


def _build(claim: Claim, station: Station, depot: Depot, pulse: Pulse) -> Publication:
    plan = parse_plan(claim.plan, where=f"build {claim.id}")
    with tempfile.TemporaryDirectory(dir=station.cache.work, prefix=f"out.{process_name()}") as out:
        report = build(
            plan,
            BuildOptions(
                out=Path(out),
                jobs=station.jobs,
                roots=station.roots(plan.cuda),
                modules=claim.options["modules"],
                sms=[Sm.parse(word) for word in claim.options["sm"]],
                shared=depot,
                stop=pulse.halt,
            ),
            cache=station.cache,
            settings=station.settings,
            watch=pulse.watch,
            progress=pulse.check,
        )
        return publish(
            report,
            depot,
            pin_set=claim.options["pins"],
            activate=claim.options["activate"],
            progress=pulse.check,
            stop=pulse.halt,
        )


def _tell(call: Callable[[], None], claim: Claim, outcome: str) -> None:
    """Tell the depot the last word on a build; one that cannot be told is left to the lease."""
    try:
        call()
    except (DepotUnreachable, DepotRefused) as error:
        _log.warning("build %s: that it is %s could not be told: %s", claim.id, outcome, error.what)
    else:
        _log.info("build %s is %s", claim.id, outcome)


class Pulse:
    """Renews a claim in a thread and tells the modules' progress with it.

    `halt` is set when the build is to end: the claim is lost, or the station stops.
    """

    def __init__(self, claim: Claim, depot: Depot, *, stop: Event) -> None:
        self.halt = Event()
        self.lost = False
        self._claim = claim
        self._depot = depot
        self._stop = stop
        self._done = Event()
        self._lock = Lock()
        self._states: dict[str, ModuleState] = {}
        self._changed = False
        self._thread = Thread(target=self._run, name=f"pulse {claim.id}", daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Renew no more."""
        self._done.set()
        self._thread.join()

    @property
    def modules(self) -> list[dict[str, Any]]:
        """How far each module is."""
        with self._lock:
            return [state.to_json() for state in self._states.values()]

    def watch(self, state: ModuleState) -> None:
        """Take note of a module's state."""
        with self._lock:
            self._states[state.uri] = state
            self._changed = True

    def check(self, name: str, done: int, total: int | None) -> None:
        """End a download or upload, of which this is told, when the build is to end. Raise Stopped."""
        del done, total
        if self.halt.is_set():
            raise Stopped(f"stopped at {name}")

    def _run(self) -> None:
        renewed = told = time.monotonic()
        while not self._done.wait(_GLANCE):
            if self._stop.is_set():
                self.halt.set()
            now = time.monotonic()
            news = self._changed and now - told > _NEWS
            if not news and now - told < self._claim.lease / 3:
                continue
            told = now
            with self._lock:
                self._changed = False
            try:
                self._depot.renew(self._claim, self.modules)
                renewed = now
            except DepotRefused as error:
                if error.says(*_LOST):
                    return self._drop()
                _log.warning("build %s: %s", self._claim.id, error.what)
            except DepotUnreachable as error:
                _log.warning("build %s: %s", self._claim.id, error.what)
            if now - renewed > self._claim.lease:  # by now another builder may have it
                return self._drop()
        return None

    def _drop(self) -> None:
        self.lost = True
        self.halt.set()
