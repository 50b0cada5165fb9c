"""Ask a source's own generator how its modules are compiled: flags, sources, ninja rules.

A program of its own, run by `recipes` as `python -I generate.py ORDER ANSWER` with a clean environment and
no network. flashinfer.jit is imported without the rest of flashinfer. Of torch, whose import costs seconds
and whose wheels gigabytes, the generator needs dtype names and one ABI flag: a stand-in provides these, and
anything else that is asked of it is an AttributeError which the answer reports.
"""

from __future__ import annotations

import importlib
import json
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_DTYPES = (
    *("float16", "bfloat16", "float32", "float64", "bool"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


class Dtype:
    """A torch dtype's name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.itemsize = 1

    def __repr__(self) -> str:
        return f"torch.{self.name}"


def torch_stand_in(cuda: str) -> ModuleType:
    """Return what the generator uses of torch; `cuda` is the toolkit's version, `13.0`.

    The C++ ABI flag is that of every torch built since 2.7 and of every current compiler's default.
    """
    torch = ModuleType("torch")
    for name in _DTYPES:
        setattr(torch, name, Dtype(name))
    torch.__dict__.update(
        dtype=Dtype,
        Tensor=type("Tensor", (), {}),
        device=type("device", (), {}),
        _C=SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True),
        version=SimpleNamespace(cuda=cuda, hip=None),
        cuda=SimpleNamespace(device_count=lambda: 0, is_available=lambda: False),
        __version__="0+stand-in",
    )
    return torch


def answer(order: dict[str, Any]) -> dict[str, Any]:
    """Carry out the order: one result for each request, under its key."""
    # tvm_ffi looks for torch to exchange tensors with it; here it must find none, real or stand-in.
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None
    tvm_ffi = importlib.import_module("tvm_ffi")
    modules["torch"] = torch_stand_in(order["cuda"])
    package = ModuleType("flashinfer")
    package.__path__ = [f"{order['source']}/flashinfer"]
    sys.modules["flashinfer"] = package
    package.__dict__["__version__"] = importlib.import_module("flashinfer.version").__version__
    environment = importlib.import_module("flashinfer.jit.env")
    results = {request["key"]: _generate(request, environment) for request in order["requests"]}
    return {
        "version": package.__dict__["__version__"],
        "generated": str(environment.FLASHINFER_GEN_SRC_DIR),
        "tvm_ffi": str(Path(tvm_ffi.libinfo.find_include_path()).parent),
        "python": sysconfig.get_path("include"),
        "results": results,
    }


def _generate(request: dict[str, Any], environment: Any) -> dict[str, Any]:
    torch = sys.modules["torch"]
    arguments = {
        name: getattr(torch, value[6:]) if isinstance(value, str) and value.startswith("dtype:") else value
        for name, value in request["arguments"].items()
    }
    try:
        function: Any = importlib.import_module(f"flashinfer.jit.{request['module']}")
        for name in request["function"].split("."):
            function = getattr(function, name)
        spec = function(**arguments)
        spec.write_ninja()
    except Exception as error:
        return {
            "error": type(error).__name__,
            "text": str(error).strip(),
            "traceback": traceback.format_exc(limit=-4),
        }
    return {
        "uri": spec.name,
        "ninja": spec.ninja_path.read_text(encoding="utf-8"),
        "build": str(environment.FLASHINFER_JIT_DIR / spec.name),
        "sources": [str(source) for source in spec.sources],
        "includes": [str(directory) for directory in spec.extra_include_dirs or ()],
    }


def main() -> None:
    """Read the order's file, write the answer's."""
    order, reply = (Path(argument) for argument in sys.argv[1:3])
    reply.write_text(json.dumps(answer(json.loads(order.read_text(encoding="utf-8")))), encoding="utf-8")


if __name__ == "__main__":
    main()
