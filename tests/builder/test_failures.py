"""From a compiler's last words to the error that is raised."""

from pathlib import Path

import pytest

from kernel_depot.builder.errors import (
    BuildDiskFull,
    BuildError,
    CompileFailed,
    CompilerOutOfMemory,
    CompileTimeout,
    HeaderMissing,
    LibraryMissing,
    SmUnsupported,
)
from kernel_depot.builder.failures import failure
from kernel_depot.builder.plan import Limits
from kernel_depot.builder.supervised import TAIL_LINES, Outcome

LIMITS = Limits(memory=8 << 30, seconds=600.0)


def outcome(reason: str | None = None) -> Outcome:
    return Outcome(exit=1, reason=reason, peak=3 << 30, seconds=1.0, isolated=True)


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("x.cu:3:10: fatal error: cublas_v2.h: No such file or directory", HeaderMissing, "cublas"),
        ("x.cu:3:10: fatal error: cudnn.h: No such file or directory", HeaderMissing, "install"),
        ("/usr/bin/ld: cannot find -lnvrtc: No such file or directory", LibraryMissing, "nvrtc"),
        ("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", CompilerOutOfMemory, "more memory"),
        ("c++: fatal error: Killed signal terminated program cc1plus", CompilerOutOfMemory, "fewer --jobs"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_121'", SmUnsupported, "another SM"),
        ("fatal error: error writing to /x: No space left on device", BuildDiskFull, "free space"),
        ('x.cu(3): error: identifier "y" is undefined', CompileFailed, "read the log"),
        ("nothing that is known", CompileFailed, "read the log"),
    ],
)
def test_last_words(line: str, kind: type[BuildError], words: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("first\n" * 100 + line + "\nninja: build stopped: subcommand failed.\n")
    error = failure("page", outcome(), LIMITS, log=log)
    assert type(error) is kind
    assert error.data["module"] == "page"
    assert "page" in error.what
    assert str(log) in str(error.where)
    assert words in str(error.remedy)
    assert len(error.data["tail"]) == TAIL_LINES
    assert error.data["tail"][-2] == line


def test_limits(tmp_path: Path) -> None:
    memory = failure("page", outcome("memory"), LIMITS, log=tmp_path / "absent")
    assert type(memory) is CompilerOutOfMemory
    assert memory.expected == "at most 8 GiB"
    assert memory.found == "3.0 GiB seen"
    late = failure("page", outcome("time"), LIMITS, log=tmp_path / "absent")
    assert type(late) is CompileTimeout
    assert late.expected == "at most 10 minutes"
