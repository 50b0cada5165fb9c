"""The build plan: which modules, from which pinned source, for which GPUs. Plans are data (TOML)."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import rfc8785
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from kernel_depot.builder.errors import BuildError, ModuleUriUnknown, PlanInvalid, PlanUnreadable
from kernel_depot.builder.families import Request, Value, request_family, request_generator, request_uri
from kernel_depot.digest import sha256_bytes
from kernel_depot.pins.pin import IndexOrigin, UrlOrigin
from kernel_depot.platform import CudaTag, PlatformError, Sm
from kernel_depot.shipped import shipped_dir

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Need = Literal["cublas", "curand", "nvrtc"]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Word = Annotated[str, StringConstraints(min_length=1, max_length=255)]


@dataclass(frozen=True, slots=True)
class PinnedWheel:
    """One exact wheel that goes into a build."""

    project: str
    version: str
    filename: str
    sha256: str
    origin: IndexOrigin | UrlOrigin
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What one module may take: bytes of memory, all its processes together, and seconds."""

    memory: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """A build plan. `name` becomes part of the wheel's version."""

    name: str
    source: PinnedWheel
    cuda: CudaTag
    sms: tuple[Sm, ...]
    needs: tuple[Need, ...]
    limits: Limits
    requests: tuple[Request, ...]

    @cached_property
    def digest(self) -> str:
        """The plan's name for provenance: SHA-256 of its canonical JSON, free of comments and limits."""
        return sha256_bytes(rfc8785.dumps(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        """Return the members that decide what comes out."""
        return {
            "name": self.name,
            "source": {
                "project": self.source.project,
                "version": self.source.version,
                "sha256": self.source.sha256,
            },
            "cuda": str(self.cuda),
            "sm": [str(sm) for sm in self.sms],
            "needs": list(self.needs),
            "modules": [request.to_json() for request in self.requests],
        }

    def narrowed(self, *, sms: Sequence[Sm] = ()) -> Plan:
        """Return the plan for other SMs than it names, as another plan; none given: itself."""
        return replace(self, sms=tuple(sorted(set(sms)))) if sms else self


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Source(_Strict):
    project: Word
    version: Word
    filename: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._+-]+\.whl$")]
    sha256: Sha256
    size: int | None = Field(default=None, gt=0)
    index: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,63}$")] | None = None
    url: Word | None = None


class _Limits(_Strict):
    memory_gib: float = Field(default=16.0, gt=0)
    minutes: float = Field(default=60.0, gt=0)


class _Module(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    uri: str | None = None
    family: str | None = None
    generator: str | None = None


class _Document(_Strict):
    name: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9]{0,31}$")]
    cuda: Word
    sm: list[Word] = Field(min_length=1)
    needs: list[Need] = Field(default_factory=list)
    source: _Source
    limits: _Limits = _Limits()
    module: list[_Module] = Field(min_length=1)


def find_plan(name: str) -> Path:
    """Return the path of a plan: a file, or the name of one shipped with the product.

    Raise PlanUnreadable, which lists the shipped ones.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_dir("builds")
    wanted = shipped / f"{path.name.removesuffix('.toml')}.toml"
    if wanted.is_file() and str(path.parent) in (".", "builds"):
        return wanted
    raise PlanUnreadable(
        "there is no such build plan",
        where=name,
        expected="a file, or one of: " + ", ".join(sorted(one.stem for one in shipped.glob("*.toml"))),
    )


def read_plan(path: Path) -> Plan:
    """Read a plan's file. Raise PlanUnreadable, or PlanInvalid with every error found."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanUnreadable(f"the build plan cannot be read: {error}", where=str(path)) from error
    return parse_plan(text, where=str(path))


def parse_plan(text: str, *, where: str) -> Plan:
    """Read a plan's TOML. Raise PlanUnreadable, or PlanInvalid with every error found."""
    try:
        document = _Document.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise PlanUnreadable(f"the build plan is no TOML: {error}", where=where) from error
    except ValidationError as error:
        problems = [
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()
        ]
        raise _invalid(problems, where=where) from error
    problems = []
    cuda, sms = _platform(document, problems)
    source = _source(document.source, problems)
    requests = _requests(document.module, problems)
    if problems or cuda is None or source is None:
        raise _invalid(problems, where=where)
    return Plan(
        name=document.name,
        source=source,
        cuda=cuda,
        sms=sms,
        needs=tuple(sorted(set(document.needs))),
        limits=Limits(int(document.limits.memory_gib * (1 << 30)), document.limits.minutes * 60.0),
        requests=requests,
    )


def _platform(document: _Document, problems: list[str]) -> tuple[CudaTag | None, tuple[Sm, ...]]:
    cuda: CudaTag | None = None
    sms: list[Sm] = []
    try:
        cuda = CudaTag.parse(document.cuda)
    except PlatformError as error:
        problems.append(f"cuda: {error.what}")
    for text in document.sm:
        try:
            sms.append(Sm.parse(text))
        except PlatformError as error:
            problems.append(f"sm: {error.what}")
    return cuda, tuple(sorted(set(sms)))


def _source(source: _Source, problems: list[str]) -> PinnedWheel | None:
    if (source.index is None) == (source.url is None):
        problems.append("source: give either `index` or `url`")
        return None
    origin = IndexOrigin(source.index) if source.index else UrlOrigin(str(source.url))
    start = re.sub(r"[-_.]+", "_", source.project).lower() + f"-{source.version}-"
    if not source.filename.lower().startswith(start):
        problems.append(f"source.filename: expected {start}…whl, found {source.filename}")
    return PinnedWheel(source.project, source.version, source.filename, source.sha256, origin, source.size)


def _requests(modules: Sequence[_Module], problems: list[str]) -> tuple[Request, ...]:
    found: list[Request] = []
    for number, module in enumerate(modules, start=1):
        place = f"module {number}"
        given: dict[str, Value | Sequence[Value]] = dict(module.model_extra or {})
        try:
            if module.family is not None and module.uri is None and module.generator is None:
                found += request_family(module.family, given, where=place)
            elif module.uri is not None and module.generator is not None and module.family is None:
                arguments: Any = given.pop("arguments", {})
                if given or not isinstance(arguments, dict):
                    raise PlanInvalid("only `arguments`, a table, goes with `generator`", found=sorted(given))
                found.append(request_generator(module.uri, module.generator, arguments, where=place))
            elif module.uri is not None and module.family is None:
                if given:
                    raise PlanInvalid("a module by its URI has no parameters", found=sorted(given))
                found.append(request_uri(module.uri))
            else:
                raise PlanInvalid("give `uri`, or `family` and its parameters, or `uri` and `generator`")
        except ModuleUriUnknown as error:
            near = ", ".join(error.data.get("nearest", ()))
            problems.append(f"{place}: {error.what}; nearest: {near}")
        except BuildError as error:
            detail = f" (expected {error.expected}, found {error.found})" if error.expected else ""
            problems.append(f"{place}: {error.what}{detail}")
    seen: set[Request] = set()
    for request in found:
        if request in seen:
            problems.append(f"the module {request} is named twice")
        seen.add(request)
    return tuple(found)


def _invalid(problems: Sequence[str], *, where: str) -> PlanInvalid:
    return PlanInvalid(
        f"{len(problems)} error{'s' if len(problems) != 1 else ''} in the build plan: {problems[0]}",
        where=where,
        problems=list(problems),
        remedy="correct the plan; docs/builder.md describes its members",
    )
