"""The side of a smoke check that may die: reads one case as JSON, loads native code, writes the outcome.

Run as `python -m kernel_depot.smoke.child`. Nothing is imported that a check does not need, since every
check has a process of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

TVM_FFI_ABI = (0, 1)
KIND_INT = 1


class Failed(Exception):
    """A check that ran and found something wrong."""


class Skipped(Exception):
    """A check that this host cannot run."""


class Version(ctypes.Structure):
    """TVMFFIVersion."""

    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("patch", ctypes.c_uint32))


class ByteArray(ctypes.Structure):
    """TVMFFIByteArray."""

    _fields_ = (("data", ctypes.c_char_p), ("size", ctypes.c_size_t))


class Text(ctypes.Structure):
    """TVMFFIByteArray as it is read: bytes at an address, which need not end in a NUL."""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


class ErrorObject(ctypes.Structure):
    """TVMFFIObject's header (24 bytes) and the start of the TVMFFIErrorCell behind it."""

    _fields_ = (
        ("ref_count", ctypes.c_uint64),
        ("type_index", ctypes.c_int32),
        ("padding", ctypes.c_uint32),
        ("deleter", ctypes.c_void_p),
        ("kind", Text),
        ("message", Text),
    )


class AnyValue(ctypes.Structure):
    """TVMFFIAny: a type index and eight bytes."""

    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", ctypes.c_int64))


def load_runtime(path: str) -> ctypes.CDLL:
    """Open libtvm_ffi.so so that kernel modules find its symbols, and check its ABI version."""
    library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    version = Version()
    library.TVMFFIGetVersion(ctypes.byref(version))
    if (version.major, version.minor) != TVM_FFI_ABI:
        raise Failed(f"TVMFFIGetVersion says {version.major}.{version.minor}.{version.patch}, expected 0.1.x")
    return library


def raised(library: ctypes.CDLL) -> tuple[str, str]:
    """Take the error raised last: its kind and its message."""
    handle = ctypes.c_void_p()
    library.TVMFFIErrorMoveFromRaised(ctypes.byref(handle))
    if not handle.value:
        raise Failed("a call failed and raised no error")
    try:
        error = ErrorObject.from_address(handle.value)
        kind, message = (
            ctypes.string_at(part.data or 0, part.size).decode("utf-8", "replace")
            for part in (error.kind, error.message)
        )
    finally:
        library.TVMFFIObjectDecRef(handle)
    return kind, message


def call_global(library: ctypes.CDLL, name: str, *arguments: AnyValue) -> AnyValue:
    """Call one of the runtime's registered functions."""
    text = name.encode()
    function = ctypes.c_void_p()
    wanted = ByteArray(text, len(text))
    if library.TVMFFIFunctionGetGlobal(ctypes.byref(wanted), ctypes.byref(function)) or not function.value:
        raise Failed(f"the runtime has no function {name}")
    packed = (AnyValue * max(1, len(arguments)))(*arguments)
    result = AnyValue()
    try:
        if library.TVMFFIFunctionCall(function, packed, len(arguments), ctypes.byref(result)):
            raise Failed("{}: {}".format(*raised(library)))
    finally:
        library.TVMFFIObjectDecRef(function)
    return result


def check_tvm_ffi(case: dict[str, Any]) -> str:
    """Load the runtime, pass an error through it, and call functions that it offers."""
    library = load_runtime(case["path"])
    library.TVMFFIErrorSetRaisedFromCStr(b"ValueError", b"sent by the smoke test")
    if raised(library) != ("ValueError", "sent by the smoke test"):
        raise Failed("an error did not come back as it was raised")
    array = call_global(library, "ffi.Array", *(AnyValue(KIND_INT, 0, value) for value in (3, 5, 7)))
    try:
        size = call_global(library, "ffi.ArraySize", array).value
        item = call_global(library, "ffi.ArrayGetItem", array, AnyValue(KIND_INT, 0, 2)).value
        if (size, item) != (3, 7):
            raise Failed(f"an array of 3, 5, 7 has size {size} and ends in {item}")
        try:
            call_global(library, "ffi.ArrayGetItem", array, AnyValue(KIND_INT, 0, 99))
        except Failed as error:
            if "IndexError" not in str(error):
                raise
        else:
            raise Failed("an index out of range was accepted")
    finally:
        library.TVMFFIObjectDecRef(ctypes.c_void_p(array.value))
    version = Version()
    library.TVMFFIGetVersion(ctypes.byref(version))
    return f"{version.major}.{version.minor}.{version.patch}; errors and calls pass"


def check_library(case: dict[str, Any]) -> str:
    """Find and open a library that modules need, the way a process that loads them would."""
    soname = str(case["soname"])
    known = case.get("pathfinder")
    if known:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

        try:
            path = str(load_nvidia_dynamic_lib(known).abs_path)
        except (DynamicLibNotFoundError, RuntimeError) as error:
            raise Failed(f"{soname} not found") from error
        if not Path(path).resolve().name.startswith(soname):
            raise Failed(f"{soname} not found, but {path}")
        return path
    try:
        ctypes.CDLL(soname)
    except OSError as error:
        raise Failed(f"{soname} not found: {error}") from error
    return soname


def check_module(case: dict[str, Any]) -> str:
    """Load a kernel module and ask one of its functions for its signature, which touches no GPU."""
    library = load_runtime(case["libtvm_ffi"])
    for path in case["preload"]:
        ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    try:
        module = ctypes.CDLL(case["path"], mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise Failed(str(error)) from error
    probe = case.get("probe")
    if not probe:
        return "loads"
    function = getattr(module, "__tvm_ffi_" + probe)
    result = AnyValue()
    if function(None, None, 0, ctypes.byref(result)) == 0:
        raise Failed(f"{probe} accepts a call without arguments")
    kind, message = raised(library)
    if kind != "TypeError":
        raise Failed(f"{probe} without arguments raises {kind}: {message}")
    return "loads; " + message.splitlines()[0]


def check_cubins(case: dict[str, Any]) -> str:
    """Load cubins through the driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Skipped("no GPU") from error

    def ask(name: str, *arguments: Any) -> None:
        status = getattr(driver, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            driver.cuGetErrorName(status, ctypes.byref(text))
            raise Failed(f"{name}: {(text.value or b'?').decode()}")

    ask("cuInit", 0)
    device = ctypes.c_int()
    ask("cuDeviceGet", ctypes.byref(device), int(case["device"]))
    context = ctypes.c_void_p()
    ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    ask("cuCtxSetCurrent", context)
    for path in case["paths"]:
        image = Path(path).read_bytes()
        module = ctypes.c_void_p()
        try:
            ask("cuModuleLoadData", ctypes.byref(module), image)
        except Failed as error:
            raise Failed(f"{path}: {error}") from error
        ask("cuModuleUnload", module)
    ask("cuDevicePrimaryCtxRelease_v2", device)
    return f"{len(case['paths'])} load"


CHECKS = {
    "tvm_ffi": check_tvm_ffi,
    "library": check_library,
    "module": check_module,
    "cubins": check_cubins,
}


def main() -> None:
    """Run the case on standard input; the outcome is the only line on what was standard output."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # native code may print
    case = json.load(sys.stdin)
    try:
        outcome = {"status": "pass", "detail": CHECKS[case["check"]](case)}
    except Skipped as error:
        outcome = {"status": "skipped", "detail": str(error)}
    except Failed as error:
        outcome = {"status": "fail", "detail": str(error)}
    except OSError as error:
        outcome = {"status": "refused", "detail": str(error)}
    except Exception as error:
        outcome = {"status": "fail", "detail": f"{type(error).__name__}: {error}"}
    json.dump(outcome, answer)
    answer.flush()
    # Native libraries may crash in their finalizers; the check is over.
    os._exit(0)


if __name__ == "__main__":
    main()
