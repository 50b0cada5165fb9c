"""The agent's loop: ask what this node is to have, bring it, prove it, make it current, report.

Whatever it missed, the next round has all of it. A bundle that fails its smoke never becomes current.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any, Final

from kernel_depot.agent.control import Control, Desired, Prefetch
from kernel_depot.agent.errors import TokenRejected
from kernel_depot.agent.gauges import Gauges
from kernel_depot.agent.memory import Memory, alone, remembered
from kernel_depot.agent.proving import Proof, prove
from kernel_depot.errors import DepotError
from kernel_depot.platform import Platform
from kernel_depot.smoke.cases import Host, Limits
from kernel_depot.worker.cache import Cache, storage_error
from kernel_depot.worker.client import Endpoint
from kernel_depot.worker.collection import collect
from kernel_depot.worker.errors import CacheFull, ServerRefused, ServerUnreachable, WorkerError
from kernel_depot.worker.sync import SyncReport, SyncRequest, sync_bundle

WAIT: Final = (20.0, 30.0)
"""Seconds of a long poll, drawn anew each time so that a fleet does not ask in step."""

HEARTBEAT: Final = 60.0
_PAUSE: Final = (1.0, 60.0)
_REMEDY: Final = "`kernel-depot tokens create --scope node` makes one; start the agent with it"
_log = logging.getLogger(__name__)


class SmokeBad(WorkerError):
    """Modules of the bundle that failed on this node."""

    slug = "smoke-bad"
    title = "Modules failed their smoke"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Who this node is, and how it looks after its cache. `capacity` bounds the blobs, in bytes."""

    name: str
    endpoint: Endpoint
    cache: Cache
    platform: Platform
    facts: dict[str, Any]
    host: Host
    driver: str | None
    request: SyncRequest
    limits: Limits
    capacity: int | None = None
    ready_file: Path | None = None
    metrics_file: Path | None = None
    token: Callable[[], str | None] | None = None
    wait: tuple[float, float] = WAIT
    heartbeat: float = HEARTBEAT
    pause: tuple[float, float] = _PAUSE


@dataclass
class Agent:
    """One run of the loop. Stop it from any thread with `stop`.

    `waiting` is true while it only waits for the server's answer: to break off then loses nothing.
    """

    config: Config
    stop: Event = field(default_factory=Event)
    gauges: Gauges = field(init=False)
    _endpoint: Endpoint = field(init=False)
    _memory: Memory = field(init=False)
    _failures: int = 0
    _told: float = 0.0
    _etag: str | None = None
    _desired: Desired | None = None
    _registered: bool = False
    _said: dict[str, Any] = field(default_factory=dict)
    waiting: bool = False
    _settled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.gauges = Gauges(self.config.name)
        self._endpoint = self.config.endpoint
        self._memory = remembered(self.config.cache.root / "agent" / "memory.json")

    def run(self, *, once: bool = False) -> None:
        """Go round until stopped; with `once`, until the node is as desired.

        A server that does not answer is asked again with growing, jittered pauses, while the node goes on
        with what it has. A token that is refused ends the loop, unless another one can be had.
        Raise TokenRejected, AgentRunning.
        """
        config = self.config
        with ExitStack() as stack:
            while not self._opened(stack, once=once):
                if self.stop.is_set():
                    return
            self._recall()
            while not self.stop.is_set():
                control = Control(self._endpoint, node=config.name, longest_wait=config.wait[1])
                try:
                    self._rounds(control, once=once)
                    return
                except TokenRejected:
                    self._endpoint = replace(self._endpoint, token=self._another(self._endpoint.token))
                finally:
                    control.close()

    def _opened(self, stack: ExitStack, *, once: bool) -> bool:
        """Take the cache for this agent alone; False after a pause when the disk is too full for that."""
        cache = self.config.cache
        try:
            cache.prepare()
            stack.enter_context(alone(cache.root / "agent" / "lock"))
        except CacheFull as failure:
            if once:
                raise
            _log.warning("%s", failure.what)
            self._pause(failure)
            return False
        return True

    def _rounds(self, control: Control, *, once: bool) -> None:
        while not self.stop.is_set():
            try:
                self._round(control)
            except (ServerUnreachable, ServerRefused, WorkerError) as failure:
                self._missed(failure)
                continue
            if self._failures == 0 and once and self._desired is not None:
                return

    def _round(self, control: Control) -> None:
        """Hear what is wanted, and do it. Raise what kept the server from answering, and TokenRejected."""
        try:
            self.waiting = True
            if not self._registered:
                control.register(self.config.facts)
                desired = control.desired(etag=None, wait=0.0, fresh=True)
                self._memory.tell_again()
                self._registered = True
            else:
                desired = control.desired(etag=self._etag, wait=self._poll())
        except ServerRefused as refusal:
            if refusal.code in (401, 403):
                self._not_ready("token-refused")
                raise TokenRejected(
                    f"the depot does not take this agent's token: {refusal.what}",
                    where=self.config.endpoint.url,
                    remedy=_REMEDY,
                ) from refusal
            if refusal.code == 404:
                self._registered = False
            raise
        finally:
            self.waiting = False
        self.gauges.contact = time.time()
        if desired is not None:
            self._desired, self._etag = desired, desired.etag
            if desired.spread:
                self.stop.wait(random.uniform(0.0, desired.spread))  # noqa: S311
        if self._desired is None:
            return
        if desired is not None or self._failures:
            self._reconcile(control, self._desired)
        elif time.monotonic() - self._told > self.config.heartbeat:
            self._report(control, **self._said)

    def _poll(self) -> float:
        """How long to wait for something new: not at all after a failure, whose pause is over."""
        return 0.0 if self._failures else random.uniform(*self.config.wait)  # noqa: S311

    def _reconcile(self, control: Control, desired: Desired) -> None:
        """Bring the node to what is desired, then what warmups want beside it; report each."""
        try:
            if desired.bundle is None:
                self._not_ready("failed")
                self._report(control, state="failed", bundle=None, problem=desired.problem)
            else:
                self._bring(control, desired.bundle)
            self._failures = 0
        except (ServerUnreachable, TokenRejected):
            raise
        except (DepotError, OSError) as caught:
            failure = _named(caught, self.config.cache)
            self._not_ready("failed")
            self._report(control, state="failed", bundle=desired.bundle, problem=failure.problem())
            self._pause(failure)
        for prefetch in desired.prefetch:
            self._prefetch(control, prefetch)
        self._write()

    def _bring(self, control: Control, digest: str) -> None:
        if self._memory.ready != digest or self.config.cache.current_digest() != digest:
            self._not_ready("syncing", digest)
            self._report(control, state="syncing", bundle=digest)
        report = self._sync(digest, current=False)
        self.gauges.state = "smoking"
        proof = self._prove(digest, control)
        if proof.bad:
            raise self._bad(proof)
        self._sync(digest, current=True)
        self._memory.ready = digest
        self._remember()
        self.gauges.ready, self.gauges.state, self.gauges.bundle = True, "ready", digest
        self._mark()
        self._report(
            control,
            state="ready",
            bundle=digest,
            bytes=report.fetched_bytes,
            seconds=round(report.seconds, 3),
        )

    def _sync(self, digest: str, *, current: bool) -> SyncReport:
        """Sync; on a full disk once more after old bundles were removed."""
        config = self.config
        wanted = {digest, *(item.bundle for item in (self._desired.prefetch if self._desired else ()))}

        def bring() -> SyncReport:
            return sync_bundle(
                config.request,
                digest=digest,
                endpoint=self._endpoint,
                cache=config.cache,
                current=current,
            )

        try:
            report = bring()
        except CacheFull:
            freed = collect(config.cache, limit=0, keep=wanted)
            if not freed.removed_blobs:
                raise
            _log.warning("the disk was full; %d old bundles were removed", len(freed.removed))
            report = bring()
        if report.fetched_blobs:
            self.gauges.syncs += 1
            self.gauges.fetched_bytes += report.fetched_bytes
            self.gauges.sync_seconds = report.seconds
        if config.capacity is not None and report.changed:
            collect(config.cache, limit=config.capacity, keep=wanted)
        return report

    def _prove(self, digest: str, control: Control) -> Proof:
        config = self.config
        bundle = config.cache.bundle(digest)
        assert bundle is not None  # synced just now
        proof = prove(
            config.cache,
            digest,
            bundle,
            host=config.host,
            driver=config.driver,
            memory=self._memory,
            limits=config.limits,
        )
        if proof.fresh:
            self._remember()
        hashes = [artifact.sha256 for artifact in bundle.artifacts]
        untold = self._memory.to_tell(hashes, config.driver)
        if untold:
            results = list(untold.values())
            control.smoke(bundle=digest, gpu=config.host.gpu, driver=config.driver, results=results)
            self._memory.told(untold)
            self._remember()
        outcomes = Counter(outcome["outcome"] for outcome in self._memory.smoked.values())
        self.gauges.modules = outcomes
        return proof

    def _prefetch(self, control: Control, prefetch: Prefetch) -> None:
        """Bring a warmup's bundle beside the current one, smoke it, report to the warmup. Once each."""
        key = f"{prefetch.warmup}/{prefetch.bundle}"
        if key in self._settled:
            return
        started = time.monotonic()
        members: dict[str, Any] = {"bundle": prefetch.bundle, "warmup": prefetch.warmup}
        try:
            report = self._sync(prefetch.bundle, current=False)
            proof = self._prove(prefetch.bundle, control)
            if proof.bad:
                raise self._bad(proof)
            members |= {"state": "ready", "bytes": report.fetched_bytes}
        except ServerUnreachable:
            raise
        except (DepotError, OSError) as caught:
            members |= {"state": "failed", "problem": _named(caught, self.config.cache).problem()}
        try:
            control.report(**members, seconds=round(time.monotonic() - started, 3))
        except ServerRefused as refusal:
            if refusal.code != 404:
                raise
        self._settled.add(key)

    @staticmethod
    def _bad(proof: Proof) -> SmokeBad:
        first = proof.bad[0]
        return SmokeBad(
            f"{len(proof.bad)} modules failed on this node, first {first['module']}: {first['outcome']}",
            where=first["module"],
            expected=first["expected"],
            found=first["found"] or first["why"] or first["outcome"],
            remedy="look at `kernel-depot smoke` here; the admin sees it in GET /v1/matrix",
            modules=[outcome["module"] for outcome in proof.bad],
        )

    def _report(self, control: Control, **members: Any) -> None:
        self.gauges.state = members["state"]
        self._said = members
        control.report(**members)
        self._told = time.monotonic()
        self._write()

    def _missed(self, failure: DepotError) -> None:
        """Go on with what is here, and try again later."""
        _log.warning("%s", failure.what)
        self._etag = None
        self._pause(failure)

    def _pause(self, failure: DepotError) -> None:
        self._failures += 1
        self.gauges.failures += 1
        self._write()
        first, longest = self.config.pause
        pause = min(longest, first * 2.0 ** min(self._failures - 1, 20)) * random.uniform(0.5, 1.0)  # noqa: S311
        _log.info("trying again in %.1f s: %s", pause, failure.type)
        self.stop.wait(pause)

    def _recall(self) -> None:
        """Be ready at once with what was ready before, server or not."""
        digest = self._memory.ready
        if digest is not None and self.config.cache.current_digest() == digest:
            self.gauges.ready, self.gauges.state, self.gauges.bundle = True, "ready", digest
            self._mark()
        else:
            self._not_ready("starting")
        self._write()

    def _not_ready(self, state: str, bundle: str = "") -> None:
        self.gauges.ready, self.gauges.state = False, state
        self.gauges.bundle = bundle or self.gauges.bundle
        if self.config.ready_file is not None:
            try:
                self.config.ready_file.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("%s cannot be removed: %s", self.config.ready_file, error)
        self._write()

    def _mark(self) -> None:
        """Make the file that says so. On a disk too full for the digest in it, an empty one says it too."""
        if self.config.ready_file is not None:
            try:
                self.config.ready_file.parent.mkdir(parents=True, exist_ok=True)
                self.config.ready_file.write_text(f"{self.gauges.bundle}\n", encoding="utf-8")
            except OSError as error:
                _log.warning("%s cannot be written: %s", self.config.ready_file, error)

    def _remember(self) -> None:
        cache = self.config.cache
        held: set[str] = set()
        for path in cache.bundles.glob("*.json"):
            bundle = cache.bundle(path.stem)
            held |= {artifact.sha256 for artifact in bundle.artifacts} if bundle is not None else set()
        self._memory.save(held=held)

    def _write(self) -> None:
        if self.config.metrics_file is not None:
            try:
                self.gauges.write(self.config.metrics_file)
            except OSError as error:
                _log.warning("%s cannot be written: %s", self.config.metrics_file, error)

    def _another(self, refused: str | None) -> str | None:
        """Wait, without asking the server, for another token. Raise TokenRejected when none can come."""
        if self.config.token is None:
            raise TokenRejected(
                "the depot does not take this agent's token; it asks no more",
                where=self.config.endpoint.url,
                remedy=_REMEDY,
            )
        _log.error("the depot does not take this agent's token; waiting for another in the token's file")
        while not self.stop.wait(2.0):
            token = self.config.token()
            if token is not None and token != refused:
                _log.info("there is another token")
                return token
        return refused


def _named(failure: DepotError | OSError, cache: Cache) -> DepotError:
    """Return a failure that can be told; what the operating system refused is the cache's."""
    return failure if isinstance(failure, DepotError) else storage_error(failure, where=cache.root)
