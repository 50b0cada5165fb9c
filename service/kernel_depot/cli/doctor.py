"""`kernel-depot doctor`: say what this node has, what is missing, and how to get it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from kernel_depot.cli.sync import CacheOption, JsonOption, ServerOption, TokenOption
from kernel_depot.worker.location import default_cache

if TYPE_CHECKING:
    from kernel_depot.worker.cache import Cache
    from kernel_depot.worker.client import Endpoint
    from kernel_depot.worker.facts import HostFacts

app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    server: ServerOption = None,
    token: TokenOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the host's facts, the state of the cache and whether the server answers.

    Exit 1 when a server was named and does not answer; what the host lacks is only said.
    """
    from kernel_depot.worker.cache import Cache
    from kernel_depot.worker.client import Endpoint
    from kernel_depot.worker.facts import gather_facts

    facts = gather_facts()
    state = cache_state(Cache(cache or default_cache()))
    reach = server_state(Endpoint(server, token=token)) if server else None
    if as_json:
        from kernel_depot.cli.render import print_json

        print_json({"host": facts.to_json(), "cache": state, "server": reach})
    else:
        print("\n".join(_text(facts, state, reach)))
    if reach is not None and not reach["ready"]:
        raise typer.Exit(1)


def cache_state(cache: Cache) -> dict[str, Any]:
    """Tell what the node's cache holds and whether it is whole, by names and sizes alone."""
    digest = cache.current_digest()
    bundle = cache.bundle(digest) if digest is not None else None
    if bundle is None:
        return {"path": str(cache.root), "bundle": None, "remedy": "run kernel-depot sync"}
    absent = cache.missing({artifact.sha256: artifact.size for artifact in bundle.artifacts})
    return {
        "path": str(cache.root),
        "bundle": digest,
        "platform": str(bundle.platform),
        "artifacts": len(bundle.artifacts),
        "total_size": bundle.total_size,
        "absent_blobs": len(absent),
        "views": sorted(path.name for path in cache.current.iterdir()) if cache.current.is_dir() else [],
        "missing_wheels": [wheel.filename for wheel in bundle.missing],
        "remedy": "run kernel-depot sync" if absent else None,
    }


def server_state(endpoint: Endpoint) -> dict[str, Any]:
    """Ask the server whether it is ready; a failure is told as its problem."""
    from kernel_depot.worker.client import Client
    from kernel_depot.worker.errors import WorkerError

    client = Client(endpoint)
    try:
        return {"url": endpoint.url, "ready": True, "answer": client.ready()}
    except WorkerError as error:
        return {"url": endpoint.url, "ready": False, "problem": error.problem()}
    finally:
        client.close()


def _text(facts: HostFacts, state: dict[str, Any], reach: dict[str, Any] | None) -> list[str]:
    from kernel_depot.cli.render import size_text

    lines = [
        f"cpu        {facts.machine}",
        f"glibc      {facts.glibc or 'none'}",
        f"python     {facts.python}",
        f"driver     {facts.driver or 'none'}" + (f", runs CUDA up to {facts.cuda}" if facts.cuda else ""),
    ]
    lines += [
        f"gpu {gpu.index}      {gpu.name}, {gpu.sm}, {size_text(gpu.memory)}" for gpu in facts.gpus
    ] or ["gpu        none"]
    found = facts.cudart
    lines.append(
        f"libcudart  {found.version or 'version unknown'} at {found.path} ({found.found_via})"
        if found
        else "libcudart  none"
    )
    if state["bundle"]:
        lines.append(
            f"cache      {state['path']}: bundle {state['bundle'][:12]} for {state['platform']}, "
            f"{state['artifacts']} files, {size_text(state['total_size'])}"
        )
        if state["absent_blobs"]:
            lines.append(f"           {state['absent_blobs']} blobs are gone or torn: {state['remedy']}")
    else:
        lines.append(f"cache      {state['path']}: nothing synced; {state['remedy']}")
    if reach is not None:
        problem = reach.get("problem", {})
        lines.append(
            f"server     {reach['url']}: "
            + ("ready" if reach["ready"] else f"{problem.get('detail')} ({problem.get('type')})")
        )
    for lack in facts.lacks:
        lines.append(f"missing    {lack.what}; needed for {lack.needed_for}: {lack.remedy}")
    return lines
