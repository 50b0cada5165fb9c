"""The kernel families by name: from a URI or from parameters to the source's generator function.

The generator functions are those of flashinfer-python (flashinfer/jit); URIs are spelled as it spells them.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kernel_depot.builder.errors import ModuleUriUnknown, PlanInvalid
from kernel_depot.kernels import uri as uris

Value = str | int | bool

DTYPES: Final[Mapping[str, str]] = {
    "f16": "float16",
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "i8": "int8",
    "u8": "uint8",
    "i32": "int32",
    "u32": "uint32",
    "i64": "int64",
    "u64": "uint64",
}

_ARGUMENTS: Final[Mapping[str, str]] = {
    "posenc": "pos_encoding_mode",
    "use_swa": "use_sliding_window",
    "use_logits_cap": "use_logits_soft_cap",
    "f16qk": "use_fp16_qk_reduction",
    "profiler": "use_profiler",
    "fast_build": "use_fast_build",
}
"""Parameters that the generator's functions call otherwise than the URI does."""

_SHORTHANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "dtype": ("dtype_q", "dtype_kv", "dtype_o"),
    "head_dim": ("head_dim_qk", "head_dim_vo"),
}


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the source's generator, with arguments; `dtype:float16` stands for a torch dtype."""

    module: str
    function: str
    arguments: tuple[tuple[str, Value], ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One module that is asked for. `uri` is given when the plan spells it, and must then come out."""

    family: str
    parameters: tuple[tuple[str, Value], ...]
    call: Call
    uri: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the canonical members."""
        return {
            "family": self.family,
            "parameters": dict(self.parameters),
            "call": f"{self.call.module}.{self.call.function}",
            "arguments": dict(self.call.arguments),
        }

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.parameters]
        return self.uri or " ".join([self.family, *words])


@dataclass(frozen=True)
class Family:
    """Modules of one generator function. `template` is the URI, each `{parameter}` in its place."""

    name: str
    template: str
    module: str
    function: str
    defaults: Mapping[str, Value] = field(default_factory=dict)
    hidden: Mapping[str, Value] = field(default_factory=dict)
    functions: Mapping[str, str] = field(default_factory=dict)
    suffixes: tuple[str, ...] = ()

    def call(self, parameters: Mapping[str, Value]) -> Call:
        """Return the generator's function and its arguments for full parameters."""
        arguments: dict[str, Value] = {}
        function = self.function
        for name, value in parameters.items():
            if name == "kv_stride":
                function = self.functions[str(value)]
            elif name.startswith("dtype_"):
                arguments[name] = f"dtype:{DTYPES[str(value)]}"
            else:
                arguments[_ARGUMENTS.get(name, name)] = value
        return Call(self.module, function, tuple(sorted(arguments.items())))

    def pattern(self) -> re.Pattern[str]:
        """Return what the family's URIs look like, its parameters as groups."""
        pieces: list[str] = []
        for text, name in re.findall(r"([^{]*)(?:\{(\w+)\})?", self.template):
            pieces.append(re.escape(text))
            if name:
                pieces.append(f"(?P<{name}>{_form(self.defaults[name])})")
        ends = "".join(f"(?P<end{number}>{suffix})?" for number, suffix in enumerate(self.suffixes))
        return re.compile("".join(pieces) + ends)


def _form(value: Value) -> str:
    if isinstance(value, bool):
        return "True|False"
    if isinstance(value, int):
        return r"\d{1,4}"
    return "|".join(DTYPES)


_ATTENTION: Final[dict[str, Value]] = {
    "dtype_q": "f16",
    "dtype_kv": "f16",
    "dtype_o": "f16",
    "head_dim_qk": 128,
    "head_dim_vo": 128,
    "posenc": 0,
    "use_swa": False,
    "use_logits_cap": False,
}
PARAMETRIC: Final[Mapping[str, Family]] = {
    family.name: family
    for family in (
        Family(
            "single_decode",
            uris.SINGLE_DECODE,
            "attention",
            "gen_single_decode_module",
            _ATTENTION,
        ),
        Family(
            "batch_decode",
            uris.BATCH_DECODE,
            "attention",
            "gen_batch_decode_module",
            _ATTENTION | {"dtype_idx": "i32"},
        ),
        Family(
            "single_prefill",
            uris.SINGLE_PREFILL,
            "attention",
            "gen_single_prefill_module",
            _ATTENTION | {"f16qk": False},
            {"backend": "fa2"},
            suffixes=(uris.SM90,),
        ),
        Family(
            "batch_prefill",
            uris.BATCH_PREFILL,
            "attention",
            "gen_batch_prefill_module",
            _ATTENTION | {"dtype_idx": "i32", "f16qk": False},
            {"backend": "fa2", "kv_stride": "any"},
            # From 0.7 on, the module that is asked for first has its own function and name.
            functions={
                "any": "gen_batch_prefill_module",
                "equal": "modules._gen_batch_prefill_primary_module",
            },
            suffixes=(uris.KV_STRIDE_EQUAL, uris.SM90),
        ),
        Family(
            "batch_mla",
            uris.BATCH_MLA,
            "attention",
            "gen_batch_mla_module",
            {
                "dtype_q": "bf16",
                "dtype_kv": "bf16",
                "dtype_o": "bf16",
                "dtype_idx": "i32",
                "head_dim_ckv": 512,
                "head_dim_kpe": 64,
                "profiler": False,
            },
            {"backend": "fa2"},
            suffixes=(uris.PLAN_ABI_2, uris.SM90),
        ),
    )
}

_LITERAL: Final[Mapping[str, Call]] = {
    "norm": Call("norm", "gen_norm_module"),
    "page": Call("page", "gen_page_module"),
    "rope": Call("rope", "gen_rope_module"),
    "sampling": Call("sampling", "gen_sampling_module"),
    "topk": Call("topk", "gen_topk_module"),
    "quantization": Call("quantization", "gen_quantization_module"),
    "cascade": Call("cascade", "gen_cascade_module"),
    "silu_and_mul": Call("activation", "gen_act_and_mul_module", (("act_func_name", "silu"),)),
    "gelu_and_mul": Call("activation", "gen_act_and_mul_module", (("act_func_name", "gelu"),)),
    "gelu_tanh_and_mul": Call("activation", "gen_act_and_mul_module", (("act_func_name", "gelu_tanh"),)),
    "gdn_prefill_sm90": Call("gdn", "gen_gdn_prefill_sm90_module"),
    **{
        f"fused_moe_{sm}": Call("fused_moe", f"gen_cutlass_fused_moe_sm{sm}_module")
        for sm in (89, 90, 100, 103, 120)
    },
}


def request_uri(uri: str) -> Request:
    """Return the request for a module by its URI. Raise ModuleUriUnknown, which names the nearest."""
    if (call := _LITERAL.get(uri)) is not None:
        return Request(uri, (), call, uri)
    for family in PARAMETRIC.values():
        if (match := family.pattern().fullmatch(uri)) is None:
            continue
        parameters: dict[str, Value] = dict(family.hidden)
        ends = {value for name, value in match.groupdict().items() if name.startswith("end")}
        for name, default in family.defaults.items():
            parameters[name] = _read(match[name], default)
        if uris.SM90 in ends:
            parameters["backend"] = "fa3"
        if uris.KV_STRIDE_EQUAL in ends:
            parameters["kv_stride"] = "equal"
        return Request(family.name, tuple(sorted(parameters.items())), family.call(parameters), uri)
    raise ModuleUriUnknown(
        f"no kernel module is called {uri!r}",
        found=uri,
        nearest=nearest(uri),
        remedy="correct the URI, or give `generator` for a module of no known family",
    )


def request_family(name: str, given: Mapping[str, Value | Sequence[Value]], *, where: str) -> list[Request]:
    """Return the requests for a family with parameters; a list means one module for each of its values.

    Raise PlanInvalid for a parameter that the family has not, or a value of the wrong kind.
    """
    if name in _LITERAL:
        fast = {"fast_build": False} if name.startswith("fused_moe_") else {}
        _check_names(name, given, fast, where=where)
        if not given:
            return [request_uri(name)]
        call = _LITERAL[name]
        value = given["fast_build"]
        if not isinstance(value, bool):
            raise _wrong(name, "fast_build", value, "true or false", where=where)
        return [
            Request(
                name,
                (("fast_build", value),),
                Call(call.module, call.function, (("use_fast_build", value),)),
                name,
            )
        ]
    family = PARAMETRIC.get(name)
    if family is None:
        names = [*PARAMETRIC, *_LITERAL]
        raise ModuleUriUnknown(
            f"no kernel family is called {name!r}",
            where=where,
            found=name,
            nearest=difflib.get_close_matches(name, names, n=3, cutoff=0.0),
        )
    known = {**family.defaults, **family.hidden}
    _check_names(name, given, {**known, **dict.fromkeys(_SHORTHANDS, 0)}, where=where)
    choices: dict[str, Sequence[Value]] = {key: [value] for key, value in known.items()}
    for key, value in given.items():
        values: Sequence[Value] = value if isinstance(value, list | tuple) else [_single(value)]
        targets = [target for target in _SHORTHANDS.get(key, (key,)) if target in known]
        for target in targets:
            for one in values:
                _check_value(name, target, one, known[target], where=where)
        if len(targets) > 1:
            choices[key] = values
            for target in targets:
                choices.pop(target, None)
        elif targets:
            choices[targets[0]] = values
    return [
        _expanded(family, dict(zip(choices, row, strict=True)))
        for row in itertools.product(*choices.values())
    ]


def request_generator(uri: str, generator: str, arguments: Mapping[str, Value], *, where: str) -> Request:
    """Return the request for a module of no known family: a function of flashinfer.jit and its arguments."""
    module, dot, function = generator.rpartition(".")
    if not dot or not re.fullmatch(r"\w+(\.\w+)*", module) or not re.fullmatch(r"_?gen_\w+", function):
        raise PlanInvalid(
            "`generator` is not a function of the source's generator",
            where=where,
            expected="module.gen_function, such as comm.gen_vllm_comm_module",
            found=generator,
        )
    return Request(
        "other",
        tuple(sorted(arguments.items())),
        Call(module, function, tuple(sorted(arguments.items()))),
        uri,
    )


def nearest(uri: str) -> list[str]:
    """Return the known URIs most like `uri`."""
    return difflib.get_close_matches(uri, list(_examples()), n=3, cutoff=0.0)


def _examples() -> Iterator[str]:
    yield from _LITERAL
    for family in PARAMETRIC.values():
        dims = (64, 128, 256) if "head_dim_qk" in family.defaults else (0,)
        for dtype, dim in itertools.product(("f16", "bf16"), dims):
            values = dict(family.defaults)
            for key in values:
                if key in _SHORTHANDS["dtype"]:
                    values[key] = dtype
                elif key in _SHORTHANDS["head_dim"]:
                    values[key] = dim
            yield family.template.format_map(values)


def _expanded(family: Family, chosen: Mapping[str, Value]) -> Request:
    parameters: dict[str, Value] = {}
    for key, value in chosen.items():
        for target in _SHORTHANDS.get(key, (key,)):
            parameters[target] = value
    parameters = {key: parameters[key] for key in {**family.defaults, **family.hidden}}
    return Request(family.name, tuple(sorted(parameters.items())), family.call(parameters))


def _single(value: Value | Sequence[Value]) -> Value:
    return value if isinstance(value, str | int) else str(value)


def _read(text: str, default: Value) -> Value:
    if isinstance(default, bool):
        return text == "True"
    return int(text) if isinstance(default, int) else text


def _check_names(
    family: str, given: Mapping[str, object], known: Mapping[str, object], *, where: str
) -> None:
    for key in given:
        if key not in known:
            raise PlanInvalid(
                f"the family {family} has no parameter {key!r}",
                where=where,
                expected=", ".join(sorted(known)) or "no parameters",
                found=key,
            )


def _check_value(family: str, key: str, value: object, default: Value, *, where: str) -> None:
    if isinstance(default, bool):
        fits, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        fits, wanted = isinstance(value, int) and not isinstance(value, bool), "a number"
    elif key == "backend":
        fits, wanted = value in ("fa2", "fa3"), "fa2 or fa3"
    elif key == "kv_stride":
        fits, wanted = value in ("any", "equal"), "any or equal"
    else:
        fits, wanted = value in DTYPES, ", ".join(DTYPES)
    if not fits:
        raise _wrong(family, key, value, wanted, where=where)


def _wrong(family: str, key: str, value: object, wanted: str, *, where: str) -> PlanInvalid:
    return PlanInvalid(
        f"{key} of the family {family} has a value it cannot have", where=where, expected=wanted, found=value
    )
