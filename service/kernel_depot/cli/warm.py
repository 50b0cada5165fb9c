"""`kernel-depot warm`: bring pinned bytes to the store and to nodes before traffic."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from kernel_depot.cli.control import Control, JsonOption, ServerOption, TokenOption
from kernel_depot.cli.render import print_json, size_text

app = typer.Typer(add_completion=False)
ENDED = ("succeeded", "failed", "cancelled", "paused")


@app.command()
def warm(
    server: ServerOption,
    pins: Annotated[
        list[str] | None, typer.Option(help="A pin set as it is now; may be repeated; all otherwise.")
    ] = None,
    revision: Annotated[
        list[str] | None, typer.Option(help="A recorded revision instead, current or not; may be repeated.")
    ] = None,
    nodes: Annotated[
        list[str] | None, typer.Option(help="LABEL=VALUE: only nodes that have it; may be repeated.")
    ] = None,
    store_only: Annotated[bool, typer.Option("--store-only", help="Fill the store, reach no node.")] = False,
    max_parallel: Annotated[int, typer.Option(min=1, help="How many nodes fetch at a time.")] = 10,
    deadline: Annotated[str, typer.Option(help="When what is not done has failed: 90s, 15m, 2h.")] = "1h",
    failure_share: Annotated[
        float, typer.Option(min=0, max=1, help="A larger share of failed nodes pauses it.")
    ] = 0.2,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show it until it ends.")] = False,
    again: Annotated[
        str | None, typer.Option("--id", help="Follow this warmup instead of beginning one.")
    ] = None,
    order: Annotated[
        str | None,
        typer.Option("--order", help="With --id: cancel, pause, resume or retry-failed.", show_default=False),
    ] = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fill the store with what is pinned, then let nodes fetch and smoke it in waves (scope admin).

    With --follow exit 1 unless every node is done.
    """
    with Control(server, token=token) as depot:
        if again is None:
            body = {
                "pins": pins,
                "revisions": revision,
                "nodes": _labels(nodes or []),
                "store_only": store_only,
                "max_parallel": max_parallel,
                "deadline_seconds": seconds_of(deadline),
                "failure_share": failure_share,
            }
            answer = depot.post(
                "/v1/warmups", {key: value for key, value in body.items() if value is not None}
            )
            again = str(answer["id"])
        elif order is not None:
            if order not in ("cancel", "pause", "resume", "retry-failed"):
                raise typer.BadParameter(f"{order!r} is no order", param_hint="--order")
            depot.post(f"/v1/warmups/{again}/{order}")
        answer = depot.get(f"/v1/warmups/{again}")
        if follow:
            with depot.events(f"/v1/warmups/{again}/events") as events:
                answer = _follow(events, answer, quiet=as_json)
    if as_json:
        print_json(answer)
    elif follow:
        print("\n".join(table_lines(answer)))
    else:
        print(f"warmup {answer['id']} is {answer['state']}; {len(answer['nodes'])} nodes")
        print(f"  kernel-depot warm --server {server} --id {answer['id']} --follow")
    if follow and answer["state"] != "succeeded":
        raise typer.Exit(1)


def seconds_of(text: str) -> float:
    """Read 90s, 15m, 2h. Raise typer.BadParameter."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd]?)", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a time; write 90s, 15m or 2h", param_hint="--deadline")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def table_lines(answer: dict[str, Any]) -> list[str]:
    """Say how a warmup ended: the nodes done, failed with reasons, never seen."""
    counts = ", ".join(f"{count} {state}" for state, count in sorted(answer["counts"].items()))
    lines = [f"warmup {answer['id']}: {answer['state']}" + (f" ({answer['why']})" if answer["why"] else "")]
    lines.append(f"  {counts or 'no nodes'}; {size_text(answer['bytes'])} fetched by nodes")
    for node in answer["nodes"]:
        smoke = ", ".join(f"{count} {word}" for word, count in sorted((node["smoke"] or {}).items()))
        said = f"{size_text(node['bytes'])} in {node['seconds']:.1f} s" if node["state"] == "done" else ""
        why = (node["problem"] or {}).get("detail", "")
        facts = "; ".join(word for word in (said, smoke, why) if word)
        lines.append(f"  {node['node']:24} {node['state']:8} {facts}".rstrip())
    return lines


def _follow(events: Iterator[dict[str, Any]], answer: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Show bars for the store and the nodes on a terminal, lines elsewhere, until the warmup ends."""
    import sys

    if quiet or not sys.stderr.isatty():
        said = ""
        for answer in events:
            line = _line(answer)
            if not quiet and line != said:
                print(line, file=sys.stderr, flush=True)
                said = line
            if answer["state"] in ENDED:
                break
        return answer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        store = progress.add_task("store", total=None, said="")
        nodes = progress.add_task("nodes", total=None, said="")
        for answer in events:
            job = answer["store"]
            if job is not None:
                done, total = job["progress"]["bytes_done"], job["progress"]["bytes_total"]
                if job["state"] == "succeeded":
                    done = total = max(done, 1)
                progress.update(store, completed=done, total=total, said=job["state"])
            ended = sum(
                count for state, count in answer["counts"].items() if state not in ("waiting", "told")
            )
            progress.update(nodes, completed=ended, total=len(answer["nodes"]) or None, said=_line(answer))
            if answer["state"] in ENDED:
                break
    return answer


def _line(answer: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in sorted(answer["counts"].items()))
    store = f"store {answer['store']['state']}; " if answer["store"] is not None else ""
    return f"{answer['state']}: {store}{counts or 'no nodes'}, {size_text(answer['bytes'])}"


def _labels(words: list[str]) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (equals and name and value):
            raise typer.BadParameter(f"{word!r} is not LABEL=VALUE", param_hint="--nodes")
        found[name] = value
    return found
