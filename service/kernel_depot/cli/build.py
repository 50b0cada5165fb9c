"""`kernel-depot build`: compile the modules of a plan into a wheel, or say what is missing for it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernel_depot.cli.render import print_json, problem_text, size_text

if TYPE_CHECKING:
    from kernel_depot.builder.build import BuildReport, ModuleState
    from kernel_depot.builder.publish import Publication

app = typer.Typer()


def default_cache() -> Path:
    """Return the builder's directory: KERNEL_DEPOT_BUILD_CACHE, else in the user's cache directory."""
    if named := os.environ.get("KERNEL_DEPOT_BUILD_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kernel-depot" / "builder"


@app.command()
def build(
    plan: Annotated[str, typer.Argument(help="A build plan (TOML), or the name of a shipped one: small.")],
    modules: Annotated[
        str | None, typer.Option(help="Only these modules, by URI or family, separated by commas.")
    ] = None,
    sm: Annotated[
        str | None, typer.Option(help="Other SMs than the plan's, separated by commas: sm90a,sm121.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compilers at a time; as many as CPUs by default.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the wheel and its statement go.")] = Path("dist"),
    cache: Annotated[Path | None, typer.Option(help="The builder's directory.")] = None,
    cuda_home: Annotated[
        Path | None, typer.Option(help="A CUDA toolkit to prefer; CUDA_HOME otherwise.")
    ] = None,
    source: Annotated[Path | None, typer.Option(help="The pinned source wheel, as a file.")] = None,
    merge: Annotated[
        list[Path] | None, typer.Option(help="A wheel of some of the plan's modules, built elsewhere.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be compiled.")] = False,
    publish: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Upload the wheel to this depot and propose to pin it (scope admin)."
        ),
    ] = None,
    pins: Annotated[
        str | None, typer.Option(help="The pin set to propose.", show_default="the plan's name")
    ] = None,
    activate: Annotated[
        bool, typer.Option("--activate", help="Make the proposed revision the current one.")
    ] = False,
    shared: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Take modules that this depot has, and give it those built here; --publish implies it.",
        ),
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Build nothing here: queue the plan for this depot's builders."),
    ] = None,
    arch: Annotated[str, typer.Option(help="With --queue: the CPU to build for.")] = "x86_64",
    token: Annotated[
        str | None, typer.Option(envvar="KERNEL_DEPOT_TOKEN", help="A bearer token of the depot.")
    ] = None,
    doctor: Annotated[
        bool, typer.Option("--doctor", help="Say which toolchain, and what is missing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compile the modules that a plan names from its pinned source, and write them as one wheel.

    A module that was compiled before, with the same source, toolchain and flags, is taken from the cache.
    """
    from contextlib import ExitStack

    from kernel_depot.builder.build import BuildOptions
    from kernel_depot.builder.build import build as run
    from kernel_depot.builder.cache import BuildCache
    from kernel_depot.builder.depot import Depot
    from kernel_depot.builder.plan import find_plan, read_plan
    from kernel_depot.builder.publish import publish as publish_wheel
    from kernel_depot.builder.toolchain import candidates, examine
    from kernel_depot.platform import Sm
    from kernel_depot.settings import load_settings

    _check_usage(publish=publish, pins=pins, activate=activate, queue=queue, dry_run=dry_run)
    path = find_plan(plan)
    wanted = read_plan(path)
    sms = [Sm.parse(word) for word in _words(sm)]
    if queue is not None:
        chosen = {
            "modules": _words(modules),
            "sm": [str(one) for one in sms],
            "arch": arch,
            "pins": pins,
            "activate": activate,
        }
        with Depot(queue, token=token) as depot:
            job = depot.queue(path.read_text(encoding="utf-8"), chosen)
        if as_json:
            print_json(job)
        else:
            print(f"queued {wanted.name}: {queue.rstrip('/')}/v1/jobs/{job['id']}")
        return
    roots = candidates(
        wanted.cuda, named=named_roots(cuda_home), search_path=os.environ.get("PATH", os.defpath)
    )
    directory = BuildCache(cache or default_cache())
    if doctor:
        checks = examine(wanted.narrowed(sms=sms), cache=directory, roots=roots)
        if as_json:
            print_json([check.to_json() for check in checks])
        else:
            for check in checks:
                print(f"{'ok     ' if check.ok else 'MISSING'} {check.name}: {check.detail}")
        if not all(check.ok for check in checks):
            raise typer.Exit(1)
        return
    with ExitStack() as stack:
        url = publish or shared
        depot_or_none = stack.enter_context(Depot(url, token=token)) if url is not None else None
        if publish is not None and depot_or_none is not None:
            depot_or_none.require_admin()
        options = BuildOptions(
            out=out,
            jobs=jobs or len(os.sched_getaffinity(0)),
            roots=roots,
            modules=_words(modules),
            sms=sms,
            source=source,
            merge=merge or (),
            dry_run=dry_run,
            shared=depot_or_none,
        )
        transfers = _Transfers()
        report = run(
            wanted, options, cache=directory, settings=load_settings(), watch=_say, progress=transfers
        )
        publication: Publication | None = None
        if publish is not None and depot_or_none is not None:
            publication = publish_wheel(
                report, depot_or_none, pin_set=pins, activate=activate, progress=transfers
            )
    if as_json:
        print_json(report.to_json() | {"publication": publication.to_json() if publication else None})
        return
    _print(report)
    if publication is not None:
        _print_publication(publication, url=publish or "")


def named_roots(cuda_home: Path | None) -> list[Path]:
    """Return the CUDA directories that the command line and the environment name, in that order."""
    named = [cuda_home] if cuda_home else []
    return named + [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]


def _check_usage(
    *, publish: str | None, pins: str | None, activate: bool, queue: str | None, dry_run: bool
) -> None:
    """Refuse options that do not go together, by name."""
    if publish is not None and queue is not None:
        raise typer.BadParameter("builders publish what they build", param_hint="--publish with --queue")
    if publish is not None and dry_run:
        raise typer.BadParameter("a dry run has no wheel", param_hint="--publish with --dry-run")
    if (pins is not None or activate) and publish is None and queue is None:
        raise typer.BadParameter("needs --publish or --queue", param_hint="--pins, --activate")


class _Transfers:
    """Prints a line for each download or upload of more than a moment, at most every 64 MiB."""

    def __init__(self) -> None:
        self._said: dict[str, int] = {}

    def __call__(self, name: str, done: int, total: int | None) -> None:
        if done - self._said.get(name, 0) >= 64 << 20:
            self._said[name] = done
            of = f" of {size_text(total)}" if total else ""
            print(f"{name}: {size_text(done)}{of}", file=sys.stderr)


def _say(state: ModuleState) -> None:
    from kernel_depot.builder.build import State

    if state.state is State.COMPILING:
        line = f"compiling {state.sources} files"
    elif state.state is State.FAILED and state.problem is not None:
        print(problem_text(state.problem, debug_hint=False), file=sys.stderr)
        return
    elif state.state is State.BUILT and state.built is not None:
        line = f"built in {state.built.seconds:.0f} s, {size_text(state.built.size)}"
    else:
        return
    print(f"{state.uri}: {line}", file=sys.stderr)


def _print(report: BuildReport) -> None:
    for module in report.modules:
        size = f", {size_text(module.built.size)}" if module.built else ""
        print(f"{module.state:9} {module.uri} ({' '.join(module.sms)}, {module.sources} files{size})")
    if report.wheel is not None:
        print(f"{report.wheel.path}: {size_text(report.wheel.size)}, sha256 {report.wheel.sha256}")
        print(f"{report.statement}")


def _print_publication(publication: Publication, *, url: str) -> None:
    state = "current" if publication.active else "proposed"
    print(f"pin set {publication.pin_set}: revision {publication.revision} is {state}")
    for filename in publication.replaced:
        print(f"  in place of {filename}")
    if not publication.active:
        print(f"  kernel-depot pins activate {publication.pin_set} {publication.revision} --server {url}")


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]
