"""Why the opponent is not called, and what a benchmark refuses."""

from __future__ import annotations

from kernel_depot.errors import DepotError


class OpponentError(DepotError):
    """The base of this room's errors."""

    slug = "opponent-error"
    title = "The opponent cannot be measured"
    status = 409


class OpponentAbsent(OpponentError):
    """The node's bundle does not carry the opponent's group: the first gate."""

    slug = "opponent-absent"
    title = "The opponent is not on this node"


class OpponentOff(OpponentError):
    """The opponent is here and nobody switched it on: the second gate."""

    slug = "opponent-off"
    title = "The opponent is switched off"


class SwitchInvalid(OpponentError):
    """The switch has a value that is neither 0 nor 1."""

    slug = "opponent-switch-invalid"
    title = "The opponent's switch cannot be read"
    status = 400


class ShapesInvalid(OpponentError):
    """A file of benchmark shapes with errors."""

    slug = "benchmark-shapes-invalid"
    title = "The benchmark's shapes cannot be read"
    status = 400


class ChallengerInvalid(OpponentError):
    """A challenger that cannot be imported or called."""

    slug = "challenger-invalid"
    title = "The challenger cannot be called"
    status = 400


class BenchmarkImpossible(OpponentError):
    """A host that cannot run the benchmark."""

    slug = "benchmark-impossible"
    title = "The benchmark cannot run here"


class BenchmarkStopped(OpponentError):
    """A benchmark that could not go on; what it measured before is kept."""

    slug = "benchmark-stopped"
    title = "The benchmark stopped early"


class ReportRefused(OpponentError):
    """A server that did not take a benchmark report, or did not give one."""

    slug = "benchmark-report-refused"
    title = "The server refused the benchmark report"
    status = 502


class ReportInvalid(OpponentError):
    """A benchmark report that cannot be read."""

    slug = "benchmark-report-invalid"
    title = "The benchmark report cannot be read"
    status = 400
