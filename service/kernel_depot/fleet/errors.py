"""What can go wrong with the fleet's orders and reports."""

from __future__ import annotations

from kernel_depot.errors import DepotError


class FleetError(DepotError):
    """The root of what the fleet's rooms refuse."""

    slug = "fleet-refused"
    title = "The fleet cannot do this"
    status = 409


class NodeUnknown(FleetError):
    """A name under which no node has registered."""

    slug = "node-unknown"
    title = "No such node"
    status = 404


class RevisionNotReady(FleetError):
    """A revision whose wheels are not all in the store."""

    slug = "revision-not-materialized"
    title = "The revision is not materialized"


class RevisionMoved(FleetError):
    """A pin set that means another revision than the caller expected."""

    slug = "revision-moved"
    title = "The pin set was changed meanwhile"


class RollbackImpossible(FleetError):
    """A pin set without an earlier revision to go back to."""

    slug = "rollback-impossible"
    title = "There is no earlier revision"


class CanaryImpossible(FleetError):
    """A canary that cannot be begun, or one that there is not."""

    slug = "canary-impossible"
    title = "The canary cannot be done"


class WarmupUnknown(FleetError):
    """An id that names no warmup."""

    slug = "warmup-unknown"
    title = "No such warmup"
    status = 404


class WarmupEnded(FleetError):
    """An order that a warmup in its state cannot follow."""

    slug = "warmup-state"
    title = "The warmup is not in a state for this"


class WarmupEmpty(FleetError):
    """A warmup that would reach no node and fill nothing."""

    slug = "warmup-empty"
    title = "Nothing to warm"


class SmokeFailed(FleetError):
    """A canary on which a module failed its smoke."""

    slug = "canary-smoke-failed"
    title = "A canary failed its smoke"


class LabelInvalid(FleetError):
    """A label selector that cannot be read."""

    slug = "label-invalid"
    title = "Not a label"
    status = 400
