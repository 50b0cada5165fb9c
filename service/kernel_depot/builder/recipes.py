"""Recipes: how each module is compiled, as the source's generator says, moved to relative paths.

Every path in a recipe is relative to the module's working directory, where `compile` puts links to the
source, the toolchain and the headers. So the compiler never sees a path of the machine it runs on.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rfc8785

from kernel_depot.builder import supervised
from kernel_depot.builder.cache import BuildCache
from kernel_depot.builder.errors import (
    BuildError,
    GeneratorFailed,
    ModuleNameDiffers,
    ModuleUriUnknown,
    RecipeUnusable,
    SmUnsupported,
)
from kernel_depot.builder.families import Request, nearest
from kernel_depot.builder.plan import Plan
from kernel_depot.builder.toolchain import HOST_PATH, Toolchain
from kernel_depot.digest import sha256_bytes, sha256_file
from kernel_depot.liveness import process_name
from kernel_depot.platform import Sm

FORMAT = 1  # part of every key: raise it when this product compiles otherwise than before
_LINK = "-shared -Wl,--build-id=none -Wl,--strip-all -Wl,--no-as-needed -Llib -Lextra/lib"
_GENCODE = re.compile(r"-gencode=arch=compute_(\w+),code=sm_(\w+)")
_ABSOLUTE = re.compile(r"(?:^|[\s=:]|-I|-L)(/[^\s:,]+)", re.M)
_SECONDS = 300.0
_MEMORY = 4 << 30


@dataclass(frozen=True)
class Recipe:
    """How one module is compiled; `directory` holds the generated sources, `gen/`."""

    uri: str
    ninja: str
    digest: str
    sms: tuple[str, ...]
    sources: int
    directory: Path

    def key(self, *, source: str, toolchain: str) -> str:
        """Return the name of the module that comes out: of everything that decides its bytes."""
        return sha256_bytes(
            rfc8785.dumps(
                {
                    "format": FORMAT,
                    "source": source,
                    "uri": self.uri,
                    "sm": list(self.sms),
                    "toolchain": toolchain,
                    "recipe": self.digest,
                }
            )
        )


def recipe_name(request: Request, plan: Plan, toolchain: Toolchain) -> str:
    """Return the name under which the cache keeps a request's recipe."""
    return sha256_bytes(
        rfc8785.dumps(
            {
                "format": FORMAT,
                "source": plan.source.sha256,
                "request": request.to_json(),
                "sm": [str(sm) for sm in plan.sms],
                "toolchain": toolchain.digest,
            }
        )
    )


def known_recipe(request: Request, plan: Plan, toolchain: Toolchain, *, cache: BuildCache) -> Recipe | None:
    """Return a request's recipe if the cache has it whole; a damaged one is dropped."""
    name = recipe_name(request, plan, toolchain)
    directory = cache.directory("recipes", name)
    try:
        data = json.loads((directory / "recipe.json").read_text(encoding="utf-8"))
        files = _files(directory / "gen")
        if _digest(data["ninja"], files) == data["digest"]:
            return Recipe(
                uri=data["uri"],
                ninja=data["ninja"],
                digest=data["digest"],
                sms=tuple(data["sms"]),
                sources=data["sources"],
                directory=directory,
            )
    except FileNotFoundError:
        if not directory.exists():
            return None
    except (ValueError, KeyError):
        pass
    cache.drop("recipes", name)
    return None


def make_recipes(
    requests: Sequence[Request], plan: Plan, toolchain: Toolchain, *, source: Path, cache: BuildCache
) -> dict[Request, Recipe | BuildError]:
    """Run the source's generator for the requests, in a child of its own, and keep the recipes.

    A request that it refuses gets its error; the others their recipes. Raise GeneratorFailed when the
    generator does not run at all.
    """
    private = cache.work / f"generator.{process_name()}"
    private.mkdir()
    try:
        answer = _ask(requests, plan, toolchain, source=source, private=private)
        found: dict[Request, Recipe | BuildError] = {}
        for number, request in enumerate(requests):
            try:
                found[request] = _kept(
                    request, plan, toolchain, answer, answer["results"][str(number)], source, cache
                )
            except BuildError as error:
                found[request] = error
        return found
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _ask(
    requests: Sequence[Request], plan: Plan, toolchain: Toolchain, *, source: Path, private: Path
) -> dict[str, Any]:
    order = {
        "cuda": f"{plan.cuda.major}.{plan.cuda.minor}",
        "source": str(source),
        "requests": [
            {
                "key": str(number),
                "module": request.call.module,
                "function": request.call.function,
                "arguments": dict(request.call.arguments),
            }
            for number, request in enumerate(requests)
        ],
    }
    (private / "order.json").write_text(json.dumps(order), encoding="utf-8")
    log = private / "generator.log"
    script = Path(__file__).with_name("generate.py")
    done = supervised.run(
        [sys.executable, "-I", "-B", str(script), str(private / "order.json"), str(private / "answer.json")],
        cwd=private,
        environment={
            "PATH": HOST_PATH,
            "HOME": str(private),
            "TMPDIR": str(private),
            "LC_ALL": "C.UTF-8",
            "CUDA_HOME": str(toolchain.root),
            "FLASHINFER_WORKSPACE_BASE": str(private),
            "FLASHINFER_CUDA_ARCH_LIST": " ".join(f"{sm.major}.{sm.minor}{sm.suffix}" for sm in plan.sms),
            "FLASHINFER_CUBIN_DIR": str(private / "cubins"),
            "FLASHINFER_DISABLE_VERSION_CHECK": "1",
            "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
        },
        log=log,
        memory=_MEMORY,
        seconds=_SECONDS,
    )
    try:
        answer: dict[str, Any] = json.loads((private / "answer.json").read_text(encoding="utf-8"))
        return answer
    except (FileNotFoundError, ValueError):
        tail = supervised.tail(log)
        raise GeneratorFailed(
            "the source's generator ended without an answer",
            where=f"{plan.source.project} {plan.source.version}",
            found=done.reason or f"exit {done.exit}",
            remedy="install what it lacks (pip install 'kernel-depot[build]'), or report the log's tail",
            tail=tail,
        ) from None


def _kept(
    request: Request,
    plan: Plan,
    toolchain: Toolchain,
    answer: dict[str, Any],
    result: dict[str, Any],
    source: Path,
    cache: BuildCache,
) -> Recipe:
    where = f"{plan.source.project} {plan.source.version}"
    if "error" in result:
        raise _refusal(request, plan, result, where=where)
    uri = result["uri"]
    if request.uri is not None and request.uri != uri:
        raise ModuleNameDiffers(
            f"this source calls the module {uri}",
            where=where,
            expected=request.uri,
            found=uri,
            remedy="use that name in the plan",
        )
    generated = Path(answer["generated"])
    prefixes = {
        result["build"]: "out",
        str(generated): "gen",
        str(source): "src",
        str(toolchain.root): "cuda",
        answer["tvm_ffi"]: "tvm_ffi",
        answer["python"]: "python",
    }
    ninja = _relative(result["ninja"], prefixes, where=f"{where}: {uri}")
    sms = _targets(ninja, request, plan, where=where)
    folders = {
        Path(path).relative_to(generated)
        for path in [*(str(Path(one).parent) for one in result["sources"]), *result["includes"]]
        if Path(path).is_relative_to(generated)
    }

    def fill(private: Path) -> None:
        gen = private / "gen"
        gen.mkdir()
        for folder in sorted(folders):
            shutil.copytree(generated / folder, gen / folder, dirs_exist_ok=True)
        data = {
            "uri": uri,
            "ninja": ninja,
            "digest": _digest(ninja, _files(gen)),
            "sms": sms,
            "sources": len(result["sources"]),
        }
        (private / "recipe.json").write_text(json.dumps(data, indent=1), encoding="utf-8")

    cache.make("recipes", recipe_name(request, plan, toolchain), fill)
    recipe = known_recipe(request, plan, toolchain, cache=cache)
    if recipe is None:
        raise RecipeUnusable("the recipe was damaged as it was written", where=f"{where}: {uri}")
    return recipe


def _refusal(request: Request, plan: Plan, result: dict[str, Any], *, where: str) -> BuildError:
    """Turn the generator's exception into the error that says what to do."""
    text = f"{result['error']}: {result['text']}"
    sms = ", ".join(str(sm) for sm in plan.sms)
    if "No supported CUDA architectures" in text or "requires GPUs with sm" in text:
        majors = re.search(r"\[([\d, ]+)\]", text)
        return SmUnsupported(
            f"the module {request} has no code for {sms}",
            where=where,
            expected=f"an SM of major version {majors[1]}" if majors else text,
            found=sms,
            remedy="leave the module out, or build it for an SM it is made for",
        )
    gone = result["error"] == "ModuleNotFoundError" and "flashinfer.jit" in text
    if gone or (result["error"] == "AttributeError" and request.call.function.rpartition(".")[2] in text):
        return ModuleUriUnknown(
            f"this source has no module {request}",
            where=where,
            found=str(request),
            nearest=nearest(request.uri or request.family),
            remedy="choose a source version that has it, or leave it out",
        )
    return GeneratorFailed(
        f"the source's generator refuses {request}: {text.splitlines()[0]}",
        where=where,
        tail=result["traceback"].splitlines()[-8:],
    )


def _targets(ninja: str, request: Request, plan: Plan, *, where: str) -> list[str]:
    """Return the SMs the recipe compiles for. Raise SmUnsupported when they are not the plan's."""
    targets = sorted({Sm.parse(match[2]) for match in _GENCODE.finditer(ninja)})
    wanted = set(plan.sms)
    if not set(targets) <= wanted:
        raise SmUnsupported(
            f"the module {request} is compiled for {', '.join(map(str, targets))} whatever is asked for",
            where=where,
            expected=", ".join(map(str, targets)),
            found=", ".join(map(str, plan.sms)),
            remedy="leave the module out, or add that SM to the plan",
        )
    return [str(sm) for sm in targets] or [str(sm) for sm in plan.sms]


def _relative(ninja: str, prefixes: dict[str, str], *, where: str) -> str:
    """Replace the machine's paths, order what the generator lists by chance, and set the linker's flags."""
    for prefix in sorted(prefixes, key=len, reverse=True):
        ninja = ninja.replace(prefix, prefixes[prefix])
    head, blocks = _blocks(ninja)
    if head.count("ldflags = -shared") != 1:
        raise RecipeUnusable("the generated rules have no `ldflags = -shared`", where=where)
    head = head.replace("ldflags = -shared", f"ldflags = {_LINK}")
    compiles: list[str] = []
    rest: list[str] = []
    for block in blocks:
        (rest if re.match(r"build \S+\.so: ", block) or block.startswith("default ") else compiles).append(
            block
        )
    ordered = [_sorted_objects(block) for block in rest]
    text = "\n".join([head.rstrip(), "", *sorted(compiles), "", *ordered, ""])
    if found := sorted({match[1] for match in _ABSOLUTE.finditer(text)}):
        raise RecipeUnusable(
            "the generated rules name paths of this machine that no link stands for",
            where=where,
            found=found[:5],
        )
    return text


def _blocks(ninja: str) -> tuple[str, list[str]]:
    lines = ninja.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith("build ")), len(lines))
    blocks: list[str] = []
    for line in lines[start:]:
        if line.startswith((" ", "\t")) and blocks:
            blocks[-1] += "\n" + line
        elif line.strip():
            blocks.append(line)
    return "\n".join(lines[:start]), blocks


def _sorted_objects(block: str) -> str:
    match = re.match(r"(build \S+\.so: \S+) (.+)", block)
    if match is None:
        return block
    return f"{match[1]} {' '.join(sorted(match[2].split()))}"


def _files(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): sha256_file(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def _digest(ninja: str, files: dict[str, str]) -> str:
    return sha256_bytes(rfc8785.dumps({"ninja": ninja, "files": files}))
