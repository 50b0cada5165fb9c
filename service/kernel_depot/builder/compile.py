"""Compile one module from its recipe in a private directory, and check what came out."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from kernel_depot.builder import supervised
from kernel_depot.builder.cache import BuildCache, BuiltModule, room
from kernel_depot.builder.errors import BuildError, ModuleUnusable, ToolchainMissing
from kernel_depot.builder.failures import failure
from kernel_depot.builder.plan import Limits
from kernel_depot.builder.recipes import Recipe
from kernel_depot.builder.toolchain import HOST_PATH, Toolchain
from kernel_depot.bundle import ArtifactKind
from kernel_depot.digest import sha256_file
from kernel_depot.wheels.inspect import inspect


class Stopped(BuildError):
    """A module that was under way when the build was stopped."""

    slug = "build-stopped"
    title = "The build was stopped"


@dataclass(frozen=True)
class Workshop:
    """What all modules of one build share. `slots` is the named pipe of the job slots (GNU make 4.4)."""

    cache: BuildCache
    toolchain: Toolchain
    source: Path
    source_sha256: str
    limits: Limits
    ninja: Path
    slots: Path
    jobs: int
    stop: Event


def compile_module(recipe: Recipe, shop: Workshop) -> tuple[BuiltModule, Path]:
    """Compile a module and take it into the cache. The caller holds one job slot.

    Raise a CompileFailed, BuildDiskFull, SmUnsupported, ModuleUnusable or Stopped.
    """
    key = recipe.key(source=shop.source_sha256, toolchain=shop.toolchain.digest)
    work = shop.cache.adopt(key)
    log = shop.cache.logs / f"{recipe.uri}.{key[:12]}.log"
    done = False
    try:
        with room(f"{recipe.uri}: {work}"):
            _lay_out(recipe, shop, work)
            log.write_bytes(b"")
        outcome = supervised.run(
            [str(shop.ninja), "-f", "build.ninja", "-v"],
            cwd=work,
            environment=_environment(work, shop),
            log=log,
            memory=shop.limits.memory,
            seconds=shop.limits.seconds,
            stop=shop.stop,
        )
        if outcome.reason == "stopped":
            raise Stopped(
                f"{recipe.uri} was stopped", remedy="build again: it goes on where it was", module=recipe.uri
            )
        if outcome.exit != 0 or outcome.reason is not None:
            raise failure(recipe.uri, outcome, shop.limits, log=log)
        library = work / "out" / f"{recipe.uri}.so"
        built = _examined(recipe, library, key, outcome, shop, work)
        with room(recipe.uri):
            kept = shop.cache.keep(built, library)
        done = True
        return built, kept
    finally:
        if done:
            shutil.rmtree(work, ignore_errors=True)
        elif work.exists():
            shop.cache.release(work)


def _lay_out(recipe: Recipe, shop: Workshop, work: Path) -> None:
    for name in ("out", "tmp", "lib"):
        (work / name).mkdir(exist_ok=True)
    gen = work / "gen"
    if not gen.exists():
        private = work / "gen.part"
        shutil.rmtree(private, ignore_errors=True)
        shutil.copytree(recipe.directory / "gen", private)
        private.rename(gen)
    package = importlib.util.find_spec("tvm_ffi")
    if package is None or not package.submodule_search_locations:
        raise ToolchainMissing(
            "apache-tvm-ffi, whose headers the modules include, is not installed",
            remedy="pip install 'kernel-depot[build]'",
        )
    links = {
        "src": shop.source,
        "cuda": shop.toolchain.root,
        "tvm_ffi": Path(package.submodule_search_locations[0]),
        "python": Path(sysconfig.get_path("include")),
    }
    if shop.toolchain.extra is not None:
        links["extra"] = shop.toolchain.extra
    for name, target in links.items():
        link = work / name
        if link.is_symlink() and link.readlink() == target:
            continue
        link.unlink(missing_ok=True)
        link.symlink_to(target, target_is_directory=True)
    rules = work / "build.ninja"
    if not rules.exists() or rules.read_text(encoding="utf-8") != recipe.ninja:
        rules.write_text(recipe.ninja, encoding="utf-8")
    _stub(shop, work / "lib" / "libcuda.so")


def _stub(shop: Workshop, library: Path) -> None:
    """Make a library of the driver's soname: modules are linked against it, and find the real one later."""
    if library.exists():
        return
    log = library.with_suffix(".log")
    outcome = supervised.run(
        [
            *(str(shop.toolchain.compiler), "-shared", "-Wl,-soname,libcuda.so.1"),
            *("-o", f"{library}.part", "-x", "c++", os.devnull),
        ],
        cwd=library.parent,
        environment={"PATH": HOST_PATH, "TMPDIR": str(library.parent), "LC_ALL": "C"},
        log=log,
        memory=shop.limits.memory,
        seconds=60.0,
    )
    if outcome.exit != 0:
        raise failure("libcuda.so, a stub of the driver's library,", outcome, shop.limits, log=log)
    Path(f"{library}.part").rename(library)


def _environment(work: Path, shop: Workshop) -> dict[str, str]:
    return {
        "PATH": f"{shop.toolchain.compiler.parent}:{HOST_PATH}",
        "HOME": str(work / "tmp"),
        "TMPDIR": str(work / "tmp"),
        "LC_ALL": "C.UTF-8",
        "SOURCE_DATE_EPOCH": "315532800",
        "CPATH": "extra/include",
        "MAKEFLAGS": f" -j{shop.jobs} --jobserver-auth=fifo:{shop.slots}",
    }


def _examined(
    recipe: Recipe, library: Path, key: str, outcome: supervised.Outcome, shop: Workshop, work: Path
) -> BuiltModule:
    """Check that the module is one: its functions, its GPU code, nothing of this machine in it."""
    found = inspect(library, kind=ArtifactKind.MODULE, arch=shop.toolchain.arch, where=recipe.uri)
    if found is None or not found.functions:
        raise ModuleUnusable("the module exports no function", where=recipe.uri, module=recipe.uri)
    wanted = {target.replace("sm", "sm_") for target in recipe.sms}
    if found.sms and set(found.sms) != wanted:
        raise ModuleUnusable(
            "the module has code for other GPUs than its recipe says",
            where=recipe.uri,
            expected=sorted(wanted),
            found=list(found.sms),
            module=recipe.uri,
        )
    content = library.read_bytes()
    for path in (work, shop.cache.root, shop.source, Path.home()):
        if len(path.parts) > 2 and os.fsencode(path) + b"/" in content:
            raise ModuleUnusable(
                "the module holds a path of this machine, so its bytes differ from machine to machine",
                where=recipe.uri,
                found=str(path),
                module=recipe.uri,
            )
    return BuiltModule(
        uri=recipe.uri,
        key=key,
        sha256=sha256_file(library),
        size=len(content),
        sms=recipe.sms,
        glibc=found.glibc,
        glibcxx=found.glibcxx,
        functions=found.functions,
        recipe=recipe.digest,
        toolchain=shop.toolchain.identity,
        seconds=outcome.seconds,
        peak=outcome.peak,
        isolated=outcome.isolated,
    )
