"""A build plan for modules that a workload lacks. It runs on nodes: standard library only."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kernel_depot.builder.errors import ModuleUriUnknown
from kernel_depot.builder.families import request_uri
from kernel_depot.platform import CudaTag, Sm
from kernel_depot.shipped import shipped_dir

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def lacking_plan(modules: Sequence[str], *, version: str | None, cuda: CudaTag, sm: Sm | None) -> str:
    """Return TOML for `kernel-depot build`: the modules by URI, those of no known family as comments.

    It is a whole plan when a shipped one pins the source of `version` (flashinfer-python) and the GPU is
    known; otherwise its head is left to the reader, and says so.
    """
    known = [uri for uri in modules if _is_known(uri)]
    unknown = [uri for uri in modules if uri not in known]
    lines: list[str] = []
    source = _source(version)
    if known and source is not None and sm is not None:
        lines += ['name = "coverage"', f'cuda = "{cuda}"', f'sm = ["{sm}"]', "", "[source]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in source.items()]
    elif known:
        lines += [
            f"# Put this behind the head (name, cuda, sm, source) of a plan for flashinfer-python {version},",
            "# whose source no shipped plan pins, or a GPU that this bundle does not name.",
        ]
    for uri in known:
        lines += ["", "[[module]]", f"uri = {json.dumps(uri)}"]
    if unknown:
        lines += ["", "# Of no family that plans know; give each a `generator`, or leave it to FlashInfer:"]
        lines += [f"#   {json.dumps(uri)}" for uri in unknown]
    if not modules:
        lines.append("# Nothing was asked for that the bundle lacks.")
    return "\n".join(lines).strip() + "\n"


def _is_known(uri: str) -> bool:
    try:
        request_uri(uri)
    except ModuleUriUnknown:
        return False
    return True


def _source(version: str | None) -> Mapping[str, Any] | None:
    for path in sorted(shipped_dir("builds").glob("*.toml")):
        source: Mapping[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["source"]
        if source["version"] == version:
            return source
    return None
