"""What Prometheus scrapes: requests by route, bytes sent, jobs by state."""

from __future__ import annotations

import time
from collections.abc import Iterator

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from sqlalchemy import Engine
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kernel_depot.catalog import queries
from kernel_depot.catalog.database import reading

_UNROUTED = "unrouted"  # one label for all unknown paths: a scanner must not grow the metrics
_METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"}


class Instruments:
    """The metrics of one application, in a registry of their own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kernel_depot_requests",
            "Requests answered.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "kernel_depot_request_seconds",
            "Time until the last byte of an answer was handed to the socket.",
            ["method", "route"],
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60),
            registry=self.registry,
        )
        self.sent = Counter("kernel_depot_sent_bytes", "Body bytes sent.", ["route"], registry=self.registry)
        self.registry.register(_Jobs(engine))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)


class _Jobs(Collector):
    """Counts jobs by state when scraped, so that every replica tells the same."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        """Name the metric without asking the database."""
        yield GaugeMetricFamily("kernel_depot_jobs", "Jobs by state.", labels=["state"])

    def collect(self) -> Iterator[Metric]:
        """Ask the database."""
        family = GaugeMetricFamily("kernel_depot_jobs", "Jobs by state.", labels=["state"])
        with reading(self._engine) as session:
            for state, count in sorted(queries.job_counts(session).items()):
                family.add_metric([state], count)
        yield family


class Measured:
    """Counts and times every request under the template of its route."""

    def __init__(self, app: ASGIApp, *, instruments: Instruments) -> None:
        self.app = app
        self.instruments = instruments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        status, sent = 500, 0

        async def counted(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                sent += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, counted)
        finally:
            route = getattr(scope.get("route"), "path", _UNROUTED)
            method = scope["method"] if scope["method"] in _METHODS else "OTHER"
            self.instruments.requests.labels(method, route, str(status)).inc()
            self.instruments.seconds.labels(method, route).observe(time.perf_counter() - began)
            if method != "HEAD":
                self.instruments.sent.labels(route).inc(sent)


router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"example": 'kernel_depot_jobs{state="succeeded"} 3.0\n'}}}},
)
def metrics(request: Request) -> Response:
    """Requests, latencies and bytes by route, jobs by state, and facts of the process. Needs no token."""
    instruments: Instruments = request.app.state.instruments
    return Response(generate_latest(instruments.registry), media_type=CONTENT_TYPE_LATEST)
