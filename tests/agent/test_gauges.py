"""The agent's figures in the text format that node_exporter's collector reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kernel_depot.agent.gauges import Gauges


def test_the_figures_are_read_back_by_a_prometheus_parser(tmp_path: Path) -> None:
    gauges = Gauges("gpu-1", ready=True, state="ready", bundle="ab", fetched_bytes=12_345_678_901, syncs=2)
    gauges.modules = Counter({"pass": 3, "fail": 1})
    path = tmp_path / "agent.prom"
    gauges.write(path)
    samples = {
        (sample.name, sample.labels.get("outcome")): sample.value
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
    }
    assert samples["kernel_depot_agent_ready", None] == 1
    assert samples["kernel_depot_agent_fetched_bytes_total", None] == 12_345_678_901
    assert samples["kernel_depot_agent_modules", "pass"] == 3
    assert samples["kernel_depot_agent_modules", "fail"] == 1
    assert list(tmp_path.iterdir()) == [path]
