"""A build: from a plan to a wheel, each module compiled at most once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from functools import lru_cache
from pathlib import Path
from threading import Event
from typing import Any

from kernel_depot.builder.cache import BuildCache, BuiltModule
from kernel_depot.builder.compile import Stopped, Workshop, compile_module
from kernel_depot.builder.errors import (
    BuildError,
    MergeRefused,
    ModulesFailed,
    ModuleUriUnknown,
    PlanInvalid,
)
from kernel_depot.builder.plan import PinnedWheel, Plan
from kernel_depot.builder.provenance import read_statement, statement, write_statement
from kernel_depot.builder.recipes import Recipe, known_recipe, make_recipes
from kernel_depot.builder.sharing import SharedModules, Sharing
from kernel_depot.builder.slots import Slots
from kernel_depot.builder.source import Progress, bring, source_tree, unpack_wheel
from kernel_depot.builder.toolchain import Toolchain, check_tvm_ffi, find_ninja, open_toolchain
from kernel_depot.builder.wheel import BuiltWheel, write_wheel
from kernel_depot.bundle import ArtifactKind
from kernel_depot.digest import sha256_file
from kernel_depot.errors import DepotError
from kernel_depot.liveness import process_name
from kernel_depot.pins.pin import UrlOrigin
from kernel_depot.platform import Sm
from kernel_depot.settings import Settings
from kernel_depot.wheels.inspect import inspect


class State(str, Enum):
    """Where a module of a build comes from, or how far it is."""

    CACHED = "cached"
    MERGED = "merged"
    SHARED = "shared"
    PLANNED = "planned"
    COMPILING = "compiling"
    BUILT = "built"
    FAILED = "failed"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class ModuleState:
    """One module of a build. `sources` counts the files that are compiled; 0 for a merged one."""

    uri: str
    state: State
    sources: int
    sms: tuple[str, ...]
    built: BuiltModule | None = None
    problem: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the members; absent ones are left out."""
        members: dict[str, Any] = {
            "module": self.uri,
            "state": str(self.state),
            "sources": self.sources,
            "sm": list(self.sms),
            "problem": self.problem,
        }
        if self.built is not None:
            members |= {
                "sha256": self.built.sha256,
                "size": self.built.size,
                "seconds": self.built.seconds,
                "peak_memory": self.built.peak,
            }
        return {key: value for key, value in members.items() if value is not None}


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What came out of a build. A dry run has no wheel."""

    plan: Plan
    modules: tuple[ModuleState, ...]
    toolchain: Toolchain
    wheel: BuiltWheel | None
    statement: Path | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {
            "plan": {"name": self.plan.name, "digest": self.plan.digest},
            "toolchain": self.toolchain.identity,
            "modules": [module.to_json() for module in self.modules],
            "wheel": {
                "path": str(self.wheel.path),
                "sha256": self.wheel.sha256,
                "size": self.wheel.size,
                "version": self.wheel.version,
            }
            if self.wheel
            else None,
            "statement": str(self.statement) if self.statement else None,
            "seconds": round(self.seconds, 3),
        }


Watch = Callable[[ModuleState], None]
"""Told of each module as its state changes, from any thread."""


@dataclass(frozen=True)
class BuildOptions:
    """How a plan is built. `modules` are URIs or families and `sms` other SMs than the plan's: none, all.

    `roots` are CUDA directories in the order of preference; `source` is the source wheel as a file;
    `merge` are wheels of parts of the plan that were built elsewhere. `shared` has modules that other
    machines built, and gets those of this one. Whoever sets `stop` ends the build with Stopped.
    """

    out: Path
    jobs: int
    roots: Sequence[Path]
    modules: Sequence[str] = ()
    sms: Sequence[Sm] = ()
    source: Path | None = None
    merge: Sequence[Path] = ()
    dry_run: bool = False
    shared: SharedModules | None = None
    stop: Event = field(default_factory=Event)


def build(
    plan: Plan,
    options: BuildOptions,
    *,
    cache: BuildCache,
    settings: Settings,
    watch: Watch,
    progress: Progress,
) -> BuildReport:
    """Build a plan's modules and write their wheel with its statement.

    What is in the cache, in the merged parts or shared is not compiled. When modules fail, the others are
    still compiled and kept, no wheel is written, and the one error or ModulesFailed with all is raised.
    """
    started, clock = datetime.now(timezone.utc), time.monotonic()
    wanted = plan.narrowed(sms=options.sms)
    cache.sweep()

    def fetch(wheel: PinnedWheel) -> Path:
        given = options.source if wheel is wanted.source else None
        return bring(wheel, cache=cache, settings=settings, given=given, progress=progress)

    @lru_cache(maxsize=1)
    def tree() -> Path:
        return source_tree(fetch(wanted.source), wanted.source, cache=cache)

    toolchain = open_toolchain(wanted, cache=cache, roots=options.roots, bring=fetch)
    recipes = _recipes(wanted, toolchain, cache=cache, tree=tree)
    chosen = _chosen(recipes, options.modules, wanted)
    merged = _merged(options.merge, wanted, cache=cache)
    keys = {
        recipe.uri: recipe.key(source=wanted.source.sha256, toolchain=toolchain.digest) for recipe in chosen
    }
    found: dict[str, tuple[BuiltModule, Path]] = {}
    states: dict[str, ModuleState] = {}
    known = {uri: pair for uri, key in keys.items() if (pair := cache.module(key)) is not None}
    sharing = Sharing(options.shared, cache=cache, stop=options.stop)
    sharing.look(list(keys.values()))
    for recipe in chosen:
        state, pair = State.MERGED, merged.get(recipe.uri)
        if pair is None:
            state, pair = State.CACHED, known.get(recipe.uri)
        if pair is None:
            state, pair = State.SHARED, sharing.take(recipe, keys[recipe.uri])
        if pair is None:
            state = State.PLANNED
        states[recipe.uri] = ModuleState(
            recipe.uri, state, recipe.sources, recipe.sms, pair[0] if pair else None
        )
        if pair is not None:
            found[recipe.uri] = pair
        watch(states[recipe.uri])
    missing = [recipe for recipe in chosen if recipe.uri not in found]
    wheel: BuiltWheel | None = None
    path: Path | None = None
    if not options.dry_run:
        for pair in known.values():
            sharing.give(*pair)
        if missing:
            built = _compile_all(
                missing,
                wanted,
                toolchain,
                tree=tree(),
                jobs=options.jobs,
                cache=cache,
                watch=watch,
                sharing=sharing,
                stop=options.stop,
            )
            for recipe in missing:
                found[recipe.uri] = built[recipe.uri]
                states[recipe.uri] = ModuleState(
                    recipe.uri, State.BUILT, recipe.sources, recipe.sms, built[recipe.uri][0]
                )
        modules = [found[recipe.uri] for recipe in chosen]
        complete = len(chosen) == len(recipes) and wanted.sms == plan.sms
        wheel = write_wheel(wanted, modules, arch=toolchain.arch, directory=options.out, complete=complete)
        content = statement(
            wanted,
            wheel,
            [module for module, _ in modules],
            started=started,
            finished=datetime.now(timezone.utc),
        )
        path = write_statement(wheel.path, content)
    return BuildReport(wanted, tuple(states.values()), toolchain, wheel, path, time.monotonic() - clock)


def _recipes(
    plan: Plan, toolchain: Toolchain, *, cache: BuildCache, tree: Callable[[], Path]
) -> list[Recipe]:
    """Return every module's recipe in the plan's order. Raise what keeps one from being compiled."""
    known = {request: known_recipe(request, plan, toolchain, cache=cache) for request in plan.requests}
    new = [request for request, recipe in known.items() if recipe is None]
    refused: list[BuildError] = []
    if new:
        source = tree()
        for metadata in source.glob("*.dist-info/METADATA"):
            check_tvm_ffi(metadata.read_text(encoding="utf-8"), where=plan.source.filename)
        for request, recipe in make_recipes(new, plan, toolchain, source=source, cache=cache).items():
            if isinstance(recipe, BuildError):
                refused.append(recipe)
            else:
                known[request] = recipe
    if refused:
        raise _together(refused, plan)
    recipes = [recipe for recipe in known.values() if recipe is not None]
    uris = [recipe.uri for recipe in recipes]
    if twice := sorted({uri for uri in uris if uris.count(uri) > 1}):
        raise PlanInvalid("the plan names modules twice", where=plan.name, found=twice)
    return recipes


def _chosen(recipes: Sequence[Recipe], names: Sequence[str], plan: Plan) -> list[Recipe]:
    if not names:
        return list(recipes)
    families = dict(
        zip((recipe.uri for recipe in recipes), (one.family for one in plan.requests), strict=True)
    )
    chosen = [recipe for recipe in recipes if recipe.uri in names or families[recipe.uri] in names]
    for name in names:
        if name not in families and name not in families.values():
            import difflib

            known = [*families, *families.values()]
            raise ModuleUriUnknown(
                f"the plan has no module {name!r}",
                where=plan.name,
                found=name,
                nearest=difflib.get_close_matches(name, dict.fromkeys(known), n=3, cutoff=0.0),
                remedy="name modules by their URI or family; --dry-run lists them",
            )
    return chosen


def _merged(wheels: Sequence[Path], plan: Plan, *, cache: BuildCache) -> dict[str, tuple[BuiltModule, Path]]:
    """Return the modules of parts built elsewhere, each checked against its part's statement."""
    merged: dict[str, tuple[BuiltModule, Path]] = {}
    for wheel in wheels:
        if not wheel.is_file():
            raise MergeRefused("there is no such wheel to merge", where=str(wheel))
        sha256 = sha256_file(wheel)
        modules = read_statement(wheel, plan=plan, sha256=sha256)
        pin = PinnedWheel("flashinfer-jit-cache", "", wheel.name, sha256, UrlOrigin(wheel.name))

        def fill(target: Path, wheel: Path = wheel, pin: PinnedWheel = pin) -> None:
            unpack_wheel(wheel, pin, target, keep=lambda path: path if path.endswith(".so") else None)

        tree = cache.make("merged", sha256, fill)
        for module in modules:
            library = tree / "flashinfer_jit_cache/jit_cache" / module.uri / f"{module.uri}.so"
            if not library.is_file() or sha256_file(library) != module.sha256:
                cache.drop("merged", sha256)
                raise MergeRefused(
                    "the part's module is not the one its statement names",
                    where=f"{wheel}: {module.uri}",
                    expected=module.sha256,
                )
            inspection = inspect(library, kind=ArtifactKind.MODULE, arch=None, where=module.uri)
            targets = {sm.target for sm in map(Sm.parse, module.sms)}
            if inspection is None or (inspection.sms and set(inspection.sms) != targets):
                raise MergeRefused(
                    "the part's module has code for other GPUs than its statement says",
                    where=f"{wheel}: {module.uri}",
                    expected=sorted(targets),
                    found=list(inspection.sms) if inspection else None,
                )
            other = merged.get(module.uri)
            if other is not None and other[0].sha256 != module.sha256:
                raise MergeRefused(
                    "two parts hold the same module with different bytes",
                    where=f"{wheel}: {module.uri}",
                    expected=other[0].sha256,
                    found=module.sha256,
                    remedy="merge only one of them, or build both parts with the same toolchain",
                )
            if targets <= {sm.target for sm in plan.sms}:
                merged[module.uri] = (module, library)
    return merged


def _compile_all(
    recipes: Sequence[Recipe],
    plan: Plan,
    toolchain: Toolchain,
    *,
    tree: Path,
    jobs: int,
    cache: BuildCache,
    watch: Watch,
    sharing: Sharing,
    stop: Event,
) -> dict[str, tuple[BuiltModule, Path]]:
    ninja = find_ninja()
    done: dict[str, tuple[BuiltModule, Path]] = {}
    refused: list[BuildError] = []
    # Those with the most files first: the small ones fill the gaps at the end.
    ordered = sorted(recipes, key=lambda recipe: -recipe.sources)
    with Slots(cache.work / f"slots.{process_name()}", jobs) as slots:
        shop = Workshop(
            cache=cache,
            toolchain=toolchain,
            source=tree,
            source_sha256=plan.source.sha256,
            limits=plan.limits,
            ninja=ninja,
            slots=slots.path,
            jobs=jobs,
            stop=stop,
        )

        def work(recipe: Recipe) -> tuple[BuiltModule, Path]:
            if not slots.take(stop):
                raise Stopped(f"{recipe.uri} was not begun", module=recipe.uri)
            try:
                watch(ModuleState(recipe.uri, State.COMPILING, recipe.sources, recipe.sms))
                built, library = compile_module(recipe, shop)
            except Stopped:
                watch(ModuleState(recipe.uri, State.PLANNED, recipe.sources, recipe.sms))
                raise
            except BuildError as error:
                problem = error.problem()
                watch(ModuleState(recipe.uri, State.FAILED, recipe.sources, recipe.sms, problem=problem))
                raise
            finally:
                slots.give()
            watch(ModuleState(recipe.uri, State.BUILT, recipe.sources, recipe.sms, built))
            sharing.give(built, library)
            return built, library

        with ThreadPoolExecutor(jobs, thread_name_prefix="module") as pool:
            try:
                tasks: list[tuple[Recipe, Future[tuple[BuiltModule, Path]]]] = [
                    (recipe, pool.submit(work, recipe)) for recipe in ordered
                ]
                for recipe, task in tasks:
                    try:
                        done[recipe.uri] = task.result()
                    except BuildError as error:
                        refused.append(error)
            except BaseException:
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    if refused:
        raise _together(refused, plan, finished=len(done))
    return done


def _together(errors: Sequence[BuildError], plan: Plan, finished: int | None = None) -> DepotError:
    if len(errors) == 1:
        return errors[0]
    kept = f"; the other {finished} are kept" if finished else ""
    return ModulesFailed(
        f"{len(errors)} modules of the plan {plan.name} failed{kept}",
        where=plan.name,
        remedy="see each problem; what is finished is not compiled again",
        problems=[error.problem() for error in errors],
    )
