"""What test_drop_in_flashinfer runs: FlashInfer's own search for modules, without a GPU and without torch.

`python flashinfer_program.py`: flashinfer.jit is imported as it is; of torch it gets a stand-in with names of
dtypes. Prints JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib import metadata
from types import ModuleType
from typing import Any

from kernel_depot.builder.generate import torch_stand_in


def main() -> None:
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None  # apache-tvm-ffi looks for it, and must find none
    importlib.import_module("tvm_ffi")
    modules["torch"] = torch_stand_in("13.0")
    package = ModuleType("flashinfer")
    package.__path__ = [str(metadata.distribution("flashinfer-python").locate_file("flashinfer"))]
    sys.modules["flashinfer"] = package
    version = importlib.import_module("flashinfer.version").__version__
    package.__dict__["__version__"] = version
    environment = importlib.import_module("flashinfer.jit.env")
    norm = importlib.import_module("flashinfer.jit.norm").gen_norm_module()
    page = importlib.import_module("flashinfer.jit.page").gen_page_module()
    answer: dict[str, Any] = {
        "flashinfer": version,
        "installed": metadata.version("flashinfer-jit-cache"),
        "norm": [norm.is_aot, str(norm.get_library_path())],
        "page": [page.is_aot],
        "providers": [
            [one.provider_id, one.version, sorted(one.cuda_architectures), sorted(one.modules)]
            for one in getattr(environment, "FLASHINFER_AOT_PROVIDERS", ())
        ],
    }
    for name, spec in (("norm", norm), ("page", page)):
        try:
            answer[f"{name} loads"] = spec.build_and_load() is not None
        except RuntimeError as error:
            answer[f"{name} loads"] = type(error).__name__
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
