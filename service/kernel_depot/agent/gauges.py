"""The agent's figures as a Prometheus text file, for node_exporter's textfile collector."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_PREFIX = "kernel_depot_agent_"


@dataclass
class Gauges:
    """Figures since the agent began; moments are seconds since the epoch, sizes bytes."""

    node: str
    ready: bool = False
    state: str = "starting"
    bundle: str = ""
    contact: float = 0.0
    syncs: int = 0
    failures: int = 0
    fetched_bytes: int = 0
    sync_seconds: float = 0.0
    cache_bytes: int = 0
    modules: Counter[str] = field(default_factory=Counter)

    def text(self) -> str:
        """Return the exposition format (Prometheus, version 0.0.4)."""
        node = f'node="{self.node}"'
        lines: list[str] = []

        def add(name: str, kind: str, text: str, value: float, labels: str = node) -> None:
            if not any(line.startswith(f"# TYPE {_PREFIX}{name} ") for line in lines):
                lines.append(f"# HELP {_PREFIX}{name} {text}")
                lines.append(f"# TYPE {_PREFIX}{name} {kind}")
            lines.append(f"{_PREFIX}{name}{{{labels}}} {value:g}")

        add("ready", "gauge", "1 when the desired bundle is synced and smoked.", float(self.ready))
        add(
            "info",
            "gauge",
            "The state and the bundle.",
            1.0,
            f'{node},state="{self.state}",bundle="{self.bundle}"',
        )
        lines.append(f"# HELP {_PREFIX}contact_timestamp_seconds When the server last answered.")
        lines.append(f"# TYPE {_PREFIX}contact_timestamp_seconds gauge")
        lines.append(f"{_PREFIX}contact_timestamp_seconds{{{node}}} {self.contact:.3f}")
        add("syncs_total", "counter", "Bundles brought in.", float(self.syncs))
        add("failures_total", "counter", "Rounds that failed.", float(self.failures))
        lines.append(f"# HELP {_PREFIX}fetched_bytes_total Bytes fetched and verified.")
        lines.append(f"# TYPE {_PREFIX}fetched_bytes_total counter")
        lines.append(f"{_PREFIX}fetched_bytes_total{{{node}}} {self.fetched_bytes}")
        add("sync_seconds", "gauge", "How long the last sync took.", self.sync_seconds)
        for outcome, count in sorted(self.modules.items()):
            add(
                "modules", "gauge", "Modules smoked, by outcome.", float(count), f'{node},outcome="{outcome}"'
            )
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        """Write the file, atomically as the collector wants it."""
        staged = path.with_name(path.name + ".new")
        staged.write_text(self.text(), encoding="utf-8")
        staged.replace(path)
