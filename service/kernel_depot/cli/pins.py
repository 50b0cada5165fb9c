"""`kernel-depot pins`: look at pin sets before they are used, and let their revisions roll."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kernel_depot.cli.control import Control, JsonOption, ServerOption, TokenOption, WhyOption
from kernel_depot.cli.render import print_json, size_text
from kernel_depot.errors import DepotError

app = typer.Typer(no_args_is_help=True, help="Check pin sets; let their revisions roll through the fleet.")

NameArgument = Annotated[str, typer.Argument(help="A pin set of the depot.")]
CanaryOption = Annotated[
    str | None, typer.Option("--canary", help="LABEL=VALUE: only these nodes get it first.")
]
RequireOption = Annotated[
    int, typer.Option("--require", min=1, help="Canaries that must be ready before all get it.")
]


class PinsNotApplied(DepotError):
    """A pin set that could not be applied; nothing changed for the nodes."""

    slug = "pins-not-applied"
    title = "The pin set is not applied"
    status = 502


@app.callback()
def pins() -> None:
    """Check pin sets; let their revisions roll through the fleet."""


@app.command()
def check(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="TOML pin sets, or a Cargo.toml that carries pins."),
    ],
    allow_file_urls: Annotated[
        bool, typer.Option("--allow-file-urls", help="Accept file: URLs as places of wheels.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON list.")] = False,
) -> None:
    """Report every problem of the given pin sets with file, line and table; exit 1 if one is an error."""
    from kernel_depot.pins.check import check as check_pins
    from kernel_depot.pins.problem import Severity

    problems = check_pins(files, allow_file_urls=allow_file_urls)
    errors = sum(problem.severity is Severity.ERROR for problem in problems)
    if as_json:
        print_json([problem.to_json() for problem in problems])
    else:
        for problem in problems:
            typer.echo(str(problem))
        count = f"{len(files)} pin set{'s' if len(files) != 1 else ''}"
        typer.echo(f"{count}: {errors} errors, {len(problems) - errors} warnings")
    if errors:
        raise typer.Exit(1)


@app.command()
def discover(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="TOML pin sets.", show_default="pins/*.toml"),
    ] = None,
    index: Annotated[
        list[str] | None,
        typer.Option(
            help="A simple-API address, in which {cuda} stands for each CUDA tag of the set, or the name of "
            "an index; may be repeated.",
            show_default="FlashInfer's for each CUDA tag, pypi, and those the pins name",
        ),
    ] = None,
    project: Annotated[
        list[str] | None, typer.Option(help="Change only this project; may be repeated.", show_default="all")
    ] = None,
    nightly: Annotated[
        bool, typer.Option("--nightly", help="Look at FlashInfer's nightly indexes too; implies --pre.")
    ] = False,
    pre: Annotated[bool, typer.Option("--pre", help="Propose pre-releases too.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Change the files.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Look through wheel indexes for newer pins of every platform; print the edit of each file.

    Comments and order stay. FlashInfer's projects must agree on a version and apache-tvm-ffi must be one that
    flashinfer-python asks for: otherwise it says why not. Exit 1 when newer wheels cannot be proposed.
    """
    from kernel_depot.cli.discovering import discover_files

    found = files or sorted(Path("pins").glob("*.toml"))
    if not found:
        raise typer.BadParameter("there is no pins/*.toml here; name the files", param_hint="FILE")
    stuck = discover_files(
        found,
        indexes=index or (),
        projects=project or (),
        nightly=nightly,
        pre=pre or nightly,
        write=write,
        as_json=as_json,
    )
    if stuck:
        raise typer.Exit(1)


@app.command("list")
def list_sets(server: ServerOption, token: TokenOption = None, as_json: JsonOption = False) -> None:
    """List the depot's pin sets with their current revisions."""
    with Control(server, token=token) as depot:
        answer = depot.get("/v1/pins")
    if as_json:
        print_json(answer)
        return
    for row in answer["pin_sets"]:
        typer.echo(f"{row['name']:30}  {row['revision']}  {row['created_at']}  {row['origin']}")


@app.command()
def revisions(
    name: NameArgument, server: ServerOption, token: TokenOption = None, as_json: JsonOption = False
) -> None:
    """List what was recorded under a pin set's name, the newest first, with the state of each."""
    with Control(server, token=token) as depot:
        answer = depot.get(f"/v1/pins/{name}/revisions")
    if as_json:
        print_json(answer)
        return
    for row in answer["revisions"]:
        typer.echo(f"{row['revision']}  {row['state']:12}  {row['created_at']}  {row['origin']}")
        if row["problem"] is not None:
            typer.echo(f"  {row['problem']['detail']}")


@app.command()
def plan(
    name: NameArgument,
    server: ServerOption,
    revision: Annotated[str | None, typer.Argument(help="A recorded revision.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option(help="A TOML pin set to record and compare.")] = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what a revision would change: wheels, modules by digest, bytes each node will fetch.

    A file is recorded as a proposal first (scope admin), which changes nothing that nodes get.
    """
    if (revision is None) == (file is None):
        raise typer.BadParameter("give a revision or --file")
    with Control(server, token=token) as depot:
        if file is not None:
            revision = depot.post_toml("/v1/pins", _text(file), name=name, propose="true")["revision"]
        answer = depot.get(f"/v1/pins/{name}/plan", revision=revision)
    if as_json:
        print_json(answer)
    else:
        typer.echo("\n".join(plan_lines(answer)))


@app.command()
def apply(
    name: NameArgument,
    file: Annotated[Path, typer.Argument(help="The TOML pin set.")],
    server: ServerOption,
    canary: CanaryOption = None,
    require: RequireOption = 1,
    why: WhyOption = None,
    token: TokenOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask after the plan.")] = False,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that bringing the wheels in may take.")
    ] = 3600,
    as_json: JsonOption = False,
) -> None:
    """Record a pin set, bring its wheels in, print the plan, activate it; with --canary on some nodes."""
    with Control(server, token=token) as depot:
        applied = _apply(
            depot,
            name,
            _text(file),
            order=_order(canary, require),
            why=why,
            confirm=not (yes or as_json),
            timeout=timeout,
            quiet=as_json,
            again=True,
        )
    if as_json:
        print_json(applied)


@app.command()
def activate(
    name: NameArgument,
    revision: Annotated[str, typer.Argument(help="The revision that the name is to mean.")],
    server: ServerOption,
    canary: CanaryOption = None,
    require: RequireOption = 1,
    expected: Annotated[
        str | None, typer.Option(help="Refuse unless the name means this revision now.")
    ] = None,
    why: WhyOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a pin set's name mean a recorded revision whose wheels are in the store (scope admin).

    With --canary the nodes with that label get it first: once --require of them are ready with it, all get
    it; the first that fails its smoke ends it.
    """
    body = {"revision": revision, "expected": expected, "why": why, "canary": _order(canary, require)}
    with Control(server, token=token) as depot:
        answer = depot.post(f"/v1/pins/{name}/activate", body)
    if as_json:
        print_json(answer)
    elif canary is None:
        typer.echo(f"pin set {name}: revision {answer['revision']} is current")
    else:
        typer.echo(f"pin set {name}: revision {revision} is a canary on {canary}; {require} must be ready")


@app.command()
def rollback(
    name: NameArgument,
    server: ServerOption,
    expected: Annotated[
        str | None, typer.Option(help="Refuse unless the name means this revision now.")
    ] = None,
    why: WhyOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a pin set's name mean what it meant before, and end a canary under way (scope admin)."""
    with Control(server, token=token) as depot:
        answer = depot.post(f"/v1/pins/{name}/rollback", {"expected": expected, "why": why})
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"pin set {name}: back from {answer['before']} to {answer['after']}")


@app.command("end-canary")
def end_canary(
    name: NameArgument, server: ServerOption, why: WhyOption = None, token: TokenOption = None
) -> None:
    """Give up a canary: its nodes go back to the current revision (scope admin)."""
    with Control(server, token=token) as depot:
        depot.delete(f"/v1/pins/{name}/canary", why=why)
    typer.echo(f"pin set {name}: the canary is ended")


@app.command()
def sync(
    directory: Annotated[Path, typer.Argument(help="A directory of pin sets, NAME.toml each.")],
    server: ServerOption,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, change nothing.")] = False,
    canary: CanaryOption = None,
    require: RequireOption = 1,
    why: WhyOption = None,
    token: TokenOption = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that bringing wheels in may take.")] = 3600,
    as_json: JsonOption = False,
) -> None:
    """Make a directory that git keeps the truth: each NAME.toml becomes that pin set's current revision.

    Prints the plan of each set first. Does nothing for sets that are as the directory says. Pin sets that the
    directory does not have are named and left alone, as is a revision that failed as a canary: exit 1 then.
    """
    files = sorted(directory.glob("*.toml"))
    if not files:
        raise typer.BadParameter(f"{directory} holds no *.toml", param_hint="DIRECTORY")
    texts = {file.stem: _text(file) for file in files}
    done: list[dict[str, object]] = []
    with Control(server, token=token) as depot:
        known = {row["name"]: row["revision"] for row in depot.get("/v1/pins")["pin_sets"]}
        for name, text in texts.items():
            if dry_run:
                revision = depot.post_toml("/v1/pins", text, name=name, propose="true")["revision"]
                answer = depot.get(f"/v1/pins/{name}/plan", revision=revision)
                done.append(answer)
                if not as_json:
                    typer.echo("\n".join(plan_lines(answer)))
                continue
            done.append(
                _apply(
                    depot,
                    name,
                    text,
                    order=_order(canary, require) if name in known else None,
                    why=why or f"pins sync {directory.name}",
                    confirm=False,
                    timeout=timeout,
                    quiet=as_json,
                    again=False,
                )
            )
    others = sorted(set(known) - set(texts))
    if as_json:
        print_json({"pin_sets": done, "not_in_directory": others})
    elif others:
        typer.echo(f"not in {directory}, left alone: {', '.join(others)}")
    if any(row.get("state") == "failed" for row in done):
        raise typer.Exit(1)


def plan_lines(answer: dict[str, Any]) -> list[str]:
    """Say in lines what a plan changes."""
    before = answer["before"] or "nothing"
    lines = [f"pin set {answer['name']}: {before} -> {answer['after']} ({answer['state']})"]
    if answer["before"] == answer["after"]:
        return [*lines, "  no change"]
    for sign, key in (("+", "wheels_added"), ("-", "wheels_removed")):
        lines += [f"  {sign} {wheel['filename']} ({wheel['cuda']}, {wheel['arch']})" for wheel in answer[key]]
    for change in answer["modules"]:
        sign = "+" if change["before"] is None else "-" if change["after"] is None else "~"
        digests = " -> ".join(str(change[key] or "")[:12] for key in ("before", "after") if change[key])
        lines.append(f"  {sign} module {change['module']}  {digests}")
    for node in answer["nodes"]:
        said = (
            f"fetches {size_text(node['bytes'])}"
            if node["after"]
            else f"fits nothing: {node['problem']['detail']}"
        )
        said = "as it is" if node["before"] == node["after"] else said
        said += "" if node["complete"] or node["after"] is None else ", once all wheels are in the store"
        lines.append(f"  node {node['node']}: {said}")
        if node["without_code"]:
            lines.append(f"    no code for its SM: {', '.join(node['without_code'])}")
    reached = sum(node["before"] != node["after"] for node in answer["nodes"])
    return [
        *lines,
        f"  reaches {reached} of {len(answer['nodes'])} nodes, {size_text(answer['bytes'])} in all",
    ]


def _apply(
    depot: Control,
    name: str,
    text: str,
    *,
    order: dict[str, object] | None,
    why: str | None,
    confirm: bool,
    timeout: float,
    quiet: bool,
    again: bool,
) -> dict[str, object]:
    """Record, bring in, show the plan, activate; a revision that failed as a canary only when `again`.

    Raise PinsNotApplied when wheels cannot be brought in.
    """
    revision = str(depot.post_toml("/v1/pins", text, name=name, propose="true", why=why)["revision"])
    rows = depot.get(f"/v1/pins/{name}/revisions", limit=1000)["revisions"]
    state = next(row for row in rows if row["revision"] == revision)["state"]
    if state == "active" or (order is not None and state == "canary"):
        if not quiet:
            word = "current" if state == "active" else "a canary"
            typer.echo(f"pin set {name}: revision {revision} is {word} already")
        return {"name": name, "revision": revision, "state": state, "changed": False}
    if state == "failed" and not again:
        if not quiet:
            typer.echo(f"pin set {name}: revision {revision} failed as a canary and is left alone")
        return {"name": name, "revision": revision, "state": state, "changed": False}
    job = depot.post("/v1/materialize", {"revisions": [revision]})
    until = time.monotonic() + timeout
    while job["state"] not in ("succeeded", "failed"):
        if time.monotonic() > until:
            raise PinsNotApplied(
                "the wheels are not in the store yet",
                where=f"GET /v1/jobs/{job['id']}",
                remedy="wait for the job, then: kernel-depot pins activate",
            )
        time.sleep(0.5)
        job = depot.get(f"/v1/jobs/{job['id']}")
    if job["state"] == "failed":
        raise PinsNotApplied(
            f"the wheels of revision {revision} cannot be brought in: {job['problem']['detail']}",
            where=f"GET /v1/jobs/{job['id']}",
            expected=job["problem"].get("expected"),
            found=job["problem"].get("found"),
            remedy="mend that, then apply again; nothing changed for the nodes",
        )
    plan = depot.get(f"/v1/pins/{name}/plan", revision=revision)
    if not quiet:
        typer.echo("\n".join(plan_lines(plan)))
    if confirm:
        typer.confirm("activate it?", abort=True)
    body = {"revision": revision, "expected": plan["before"], "why": why, "canary": order}
    depot.post(f"/v1/pins/{name}/activate", body)
    if not quiet:
        state = "current" if order is None else f"a canary on {order['label']}={order['value']}"
        typer.echo(f"pin set {name}: revision {revision} is {state}")
    state = "active" if order is None else "canary"
    return {"name": name, "revision": revision, "state": state, "changed": True, "plan": plan}


def _order(canary: str | None, require: int) -> dict[str, object] | None:
    if canary is None:
        return None
    label, equals, value = canary.partition("=")
    if not (label and equals and value):
        raise typer.BadParameter(f"{canary!r} is not LABEL=VALUE", param_hint="--canary")
    return {"label": label, "value": value, "require": require}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}") from error
