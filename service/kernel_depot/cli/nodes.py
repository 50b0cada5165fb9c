"""`kernel-depot nodes`: see the fleet from an admin's desk."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kernel_depot.cli.control import Control, JsonOption, ServerOption, TokenOption
from kernel_depot.cli.render import print_json, size_text

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="See the nodes, which modules work where, who changed what.",
)
LabelOption = Annotated[
    list[str] | None, typer.Option("--label", help="NAME=VALUE: only nodes that have it; may be repeated.")
]


@app.command("ls")
def ls(
    server: ServerOption, label: LabelOption = None, token: TokenOption = None, as_json: JsonOption = False
) -> None:
    """List the nodes with their state and bundle."""
    with Control(server, token=token) as depot:
        answer = depot.get("/v1/nodes", label=label)
    if as_json:
        print_json(answer)
        return
    for node in answer["nodes"]:
        labels = ",".join(f"{name}={value}" for name, value in sorted(node["labels"].items()))
        gpu = node["gpus"][0] if node["gpus"] else "no GPU"
        print(
            f"{node['name']:24} {node['state']:10} {(node['bundle'] or '-')[:12]:12} "
            f"{node['sm'] or '-':6} {gpu}, heard of {node['silent_seconds']:.0f} s ago  {labels}".rstrip()
        )
        if node["problem"] is not None:
            print(f"  {node['problem'].get('detail', '')}")


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="The node's name.")],
    server: ServerOption,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a node: what it is, what it is to have, how its modules did."""
    with Control(server, token=token) as depot:
        answer = depot.get(f"/v1/nodes/{name}")
    if as_json:
        print_json(answer)
        return
    node = answer["node"]
    print(f"{node['name']}: {node['state']}, bundle {node['bundle'] or '-'}")
    print(f"  wanted: {answer['desired']['bundle'] or '-'}")
    for ref in answer["desired"]["pin_sets"]:
        canary = " (canary)" if ref["name"] in answer["desired"]["canary_of"] else ""
        print(f"    {ref['name']} {ref['revision']}{canary}")
    print(f"  fetched {size_text(node['bytes'])} in {node['seconds']:.1f} s for it")
    for result in answer["smoke"]:
        print(f"  {result['outcome']:8} {result['module']}  {_facts(result)}".rstrip())


@app.command()
def matrix(
    server: ServerOption,
    label: LabelOption = None,
    module: Annotated[str | None, typer.Option(help="Only this module.")] = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set the modules against the nodes: how each did where. Exit 1 when one failed."""
    with Control(server, token=token) as depot:
        answer = depot.get("/v1/matrix", label=label, module=module)
    if as_json:
        print_json(answer)
    else:
        by_module: dict[str, dict[str, list[str]]] = {}
        for cell in answer["cells"]:
            by_module.setdefault(cell["module"], {}).setdefault(cell["state"], []).append(cell["node"])
        for name, states in by_module.items():
            said = ", ".join(f"{state} on {_few(nodes)}" for state, nodes in sorted(states.items()))
            print(f"{name}: {said}")
        counts = ", ".join(f"{count} {state}" for state, count in sorted(answer["counts"].items()))
        print(f"{len(answer['nodes'])} nodes, {len(answer['modules'])} modules: {counts or 'nothing smoked'}")
    if answer["counts"].get("fail"):
        raise typer.Exit(1)


@app.command()
def audit(
    server: ServerOption,
    subject: Annotated[str | None, typer.Option(help="Only of this pin set, warmup or node.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 50,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List who changed what, when and why, the newest first."""
    with Control(server, token=token) as depot:
        answer = depot.get("/v1/audit", subject=subject, limit=limit)
    if as_json:
        print_json(answer)
        return
    for entry in answer["entries"]:
        digests = " -> ".join(str(entry[key])[:12] for key in ("before", "after") if entry[key])
        print(f"{entry['at']}  {entry['who']:16} {entry['action']:16} {entry['subject']}  {digests}".rstrip())
        if entry["why"]:
            print(f"  {entry['why']}")


@app.command()
def forget(
    name: Annotated[str, typer.Argument(help="The node's name.")],
    server: ServerOption,
    token: TokenOption = None,
) -> None:
    """Remove a node that is gone for good, with its results (scope admin)."""
    with Control(server, token=token) as depot:
        depot.delete(f"/v1/nodes/{name}")
    print(f"node {name} is forgotten; it comes back if its agent runs")


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _facts(result: dict[str, Any]) -> str:
    facts = [f"expected {result['expected']}" if result["expected"] else ""]
    facts += [f"found {result['found']}" if result["found"] else "", result["why"]]
    return "; ".join(fact for fact in facts if fact)
