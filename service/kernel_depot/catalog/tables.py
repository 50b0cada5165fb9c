"""The catalog's tables. Alembic migrations follow this module; `alembic check` guards that they agree."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Connection,
    DateTime,
    Dialect,
    Index,
    Table,
    Text,
    TypeDecorator,
    event,
    text,
)
from sqlmodel import Field, SQLModel


class Moment(TypeDecorator[datetime]):
    """A moment with its zone on every database: SQLite keeps UTC without saying so."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """Store UTC."""
        return value.astimezone(timezone.utc) if value is not None else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """Return UTC with its zone."""
        if value is None:
            return None
        return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value.astimezone(timezone.utc)


def _moment(*, nullable: bool = False, index: bool = False) -> Any:
    """A UTC moment."""
    return Field(default=None, sa_column=Column(Moment(), nullable=nullable, index=index))


def _size(*, nullable: bool = False) -> Any:
    """A byte count; wheels pass 2 GiB, so 64 bits on every database."""
    return Field(default=None, sa_column=Column(BigInteger, nullable=nullable))


# A wheel has thousands of members, few of them modules. PostgreSQL's tables are made by the migrations, which
# say the same there; said here it would import that dialect in every process, a tenth of the catalog's time.
_MODULE_KNOWN = text("module IS NOT NULL")
# Rows with a long key lie in the key's own tree, not in a second one beside it (SQLite: WITHOUT ROWID).
_KEYED = {"sqlite_with_rowid": False}


class PinSetRevision(SQLModel, table=True):
    """One immutable text of a pin set, named by the SHA-256 of its canonical form."""

    __tablename__ = "pin_set_revision"

    digest: str = Field(primary_key=True, max_length=64)
    name: str = Field(index=True)
    text: str = Field(sa_column=Column(Text, nullable=False))
    origin: str  # the file or the caller it came from
    groups: list[dict[str, Any]] = Field(
        default_factory=list, sa_column=Column(JSON, nullable=False, server_default="[]")
    )
    created_at: datetime = _moment()


class PinSet(SQLModel, table=True):
    """A pin set's name and the revision it now means."""

    __tablename__ = "pin_set"

    name: str = Field(primary_key=True)
    revision: str = Field(foreign_key="pin_set_revision.digest")
    updated_at: datetime = _moment()


class PinRow(SQLModel, table=True):
    """One pin of a revision, as `pins.pin.Pin` reads it."""

    __tablename__ = "pin"

    id: int | None = Field(default=None, primary_key=True)
    revision: str = Field(foreign_key="pin_set_revision.digest", index=True)
    project: str
    version: str
    filename: str
    sha256: str = Field(index=True, max_length=64)
    cuda: str
    arch: str
    sm: str | None = None
    url: str | None = None
    index_name: str | None = None
    size: int | None = _size(nullable=True)
    record_sha256: str | None = None


class Wheel(SQLModel, table=True):
    """A wheel that was verified, extracted and published whole. The row is written after the bytes."""

    __tablename__ = "wheel"

    sha256: str = Field(primary_key=True, max_length=64)
    filename: str
    project: str = Field(index=True)
    version: str
    arch: str | None = None  # None for wheels of any architecture
    size: int = _size()
    unpacked_size: int = _size()
    member_count: int
    kept: bool = True  # the wheel's own bytes are a blob too
    ingested_at: datetime = _moment()


class Member(SQLModel, table=True):
    """One file of a wheel. `kind` is an ArtifactKind for artifacts, None for what is only recorded."""

    __tablename__ = "member"
    __table_args__ = (
        Index("ix_member_module", "module", sqlite_where=_MODULE_KNOWN),
        _KEYED,
    )

    wheel: str = Field(primary_key=True, foreign_key="wheel.sha256", max_length=64)
    path: str = Field(primary_key=True)
    sha256: str = Field(max_length=64)
    size: int = _size()
    kind: str | None = None
    module: str | None = None


class WheelFailure(SQLModel, table=True):
    """Why a pinned wheel is not in the store: the problem of the last attempt. Cleared by success."""

    __tablename__ = "wheel_failure"

    sha256: str = Field(primary_key=True, max_length=64)
    filename: str
    problem: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    failed_at: datetime = _moment()


class Blob(SQLModel, table=True):
    """Bytes the store holds. `zstd_size` is set once the compressed form lies beside them."""

    __tablename__ = "blob"
    __table_args__ = _KEYED

    sha256: str = Field(primary_key=True, max_length=64)
    size: int = _size()
    zstd_state: str = Field(default="pending", index=True)  # pending, made, not_worth
    zstd_size: int | None = _size(nullable=True)
    zstd_sha256: str | None = None


class Inspection(SQLModel, table=True):
    """What was read out of a module, library or cubin. Facts of the bytes, so keyed by their digest."""

    __tablename__ = "inspection"
    __table_args__ = _KEYED

    sha256: str = Field(primary_key=True, max_length=64)
    format: str  # elf, cubin
    machine: str | None = None  # x86_64, aarch64, cuda
    soname: str | None = None
    needed: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    glibc: str | None = None
    glibcxx: str | None = None
    functions: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    sms: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    ptx: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))


class BundleRow(SQLModel, table=True):
    """A bundle's canonical bytes under its digest."""

    __tablename__ = "bundle"

    digest: str = Field(primary_key=True, max_length=64)
    manifest: str = Field(sa_column=Column(Text, nullable=False))
    artifact_count: int
    total_size: int = _size()
    created_at: datetime = _moment()


class BundleAnswer(SQLModel, table=True):
    """Which bundle answers a question: pin-set revisions, platform, modules and the wheels there are."""

    __tablename__ = "bundle_answer"

    question: str = Field(primary_key=True, max_length=64)  # SHA-256 of the question's canonical JSON
    bundle: str = Field(foreign_key="bundle.digest", max_length=64)


class Lease(SQLModel, table=True):
    """The right to do one thing (fetch a wheel), held for a short time and renewed while alive."""

    __tablename__ = "lease"

    key: str = Field(primary_key=True)
    owner: str  # unique per holder
    holder: str  # host and pid, for people
    expires_at: datetime = _moment()


class Token(SQLModel, table=True):
    """A bearer token, kept as the SHA-256 of its secret."""

    __tablename__ = "token"

    id: str = Field(primary_key=True)
    name: str
    secret_sha256: str = Field(unique=True, max_length=64)
    scopes: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    created_at: datetime = _moment()
    expires_at: datetime | None = _moment(nullable=True)
    revoked_at: datetime | None = _moment(nullable=True)
    last_used_at: datetime | None = _moment(nullable=True)


class Job(SQLModel, table=True):
    """A durable job as people see it: what was asked, how far it is, how it ended."""

    __tablename__ = "job"

    id: str = Field(primary_key=True)  # the engine's workflow id
    kind: str
    state: str = Field(index=True)  # queued, running, succeeded, failed
    request: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    asked_by: str
    bytes_done: int = _size()
    bytes_total: int | None = _size(nullable=True)
    members_done: int = 0
    members_total: int | None = None
    wheels: list[dict[str, Any]] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    modules: list[dict[str, Any]] = Field(
        default_factory=list, sa_column=Column(JSON, nullable=False, server_default="[]")
    )
    problem: dict[str, Any] | None = Field(default=None, sa_column=Column(JSON, nullable=True))
    created_at: datetime = _moment()
    updated_at: datetime = _moment()
    finished_at: datetime | None = _moment(nullable=True)


class Benchmark(SQLModel, table=True):
    """A benchmark report that a node posted, under the SHA-256 of its canonical JSON."""

    __tablename__ = "benchmark"

    digest: str = Field(primary_key=True, max_length=64)
    benchmark: str = Field(index=True)
    gpu: str
    report: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    posted_by: str
    posted_at: datetime = _moment(index=True)


class Build(SQLModel, table=True):
    """A plan that waits for a builder, or that one has claimed; `id` is the job's.

    A claim is a lease: whoever does not renew it before `claimed_until` loses the build to the next.
    """

    __tablename__ = "build"

    id: str = Field(primary_key=True, foreign_key="job.id")
    plan: str = Field(sa_column=Column(Text, nullable=False))
    cuda: str
    arch: str
    options: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    state: str = Field(index=True)  # queued, claimed, ended
    claim: str | None = None  # a new word for each claim
    builder: str | None = None
    claimed_until: datetime | None = _moment(nullable=True)
    losses: int = 0  # how often a builder that had claimed it was not heard of again
    queued_at: datetime = _moment(index=True)


class BuiltModule(SQLModel, table=True):
    """A compiled module by its key, the digest of all that decides its bytes. `record`: how it was made."""

    __tablename__ = "built_module"

    key: str = Field(primary_key=True, max_length=64)
    uri: str = Field(index=True)
    sha256: str = Field(max_length=64)
    size: int = _size()
    record: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    posted_by: str
    posted_at: datetime = _moment()


class Provenance(SQLModel, table=True):
    """How a wheel came about: its in-toto statement, as whoever uploaded it says."""

    __tablename__ = "provenance"

    wheel: str = Field(primary_key=True, max_length=64)
    statement: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    posted_by: str
    posted_at: datetime = _moment()


class Upload(SQLModel, table=True):
    """Bytes on their way into the store, in parts that any server takes. Gone once they are a blob."""

    __tablename__ = "upload"

    sha256: str = Field(primary_key=True, max_length=64)
    size: int = _size()
    begun_by: str
    begun_at: datetime = _moment()
    touched_at: datetime = _moment()


class UploadPart(SQLModel, table=True):
    """A part that the store holds, by its number from 0."""

    __tablename__ = "upload_part"

    upload: str = Field(primary_key=True, foreign_key="upload.sha256", max_length=64)
    number: int = Field(primary_key=True)
    sha256: str = Field(max_length=64, index=True)


class Canary(SQLModel, table=True):
    """A revision that the nodes with a label get before the pin set's name means it.

    It becomes current once `require` of them are ready with it; one that fails its smoke ends it.
    """

    __tablename__ = "canary"

    name: str = Field(primary_key=True, foreign_key="pin_set.name")
    revision: str = Field(foreign_key="pin_set_revision.digest", max_length=64)
    label: str
    value: str
    require: int
    begun_by: str
    begun_at: datetime = _moment()


class RevisionFailure(SQLModel, table=True):
    """Why a revision was given up as a canary. Cleared when an administrator tries it again."""

    __tablename__ = "revision_failure"

    revision: str = Field(primary_key=True, foreign_key="pin_set_revision.digest", max_length=64)
    problem: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    failed_at: datetime = _moment()


class AuditEntry(SQLModel, table=True):
    """One change that somebody made, and why. Rows are only ever added; the database refuses the rest."""

    __tablename__ = "audit_entry"

    id: int | None = Field(default=None, primary_key=True)
    at: datetime = _moment(index=True)
    who: str
    action: str = Field(index=True)
    subject: str = Field(index=True)
    before: str | None = None
    after: str | None = None
    why: str | None = Field(default=None, sa_column=Column(Text, nullable=True))
    facts: dict[str, Any] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))


class FleetVersion(SQLModel, table=True):
    """A number that grows whenever what nodes are to have may have changed. One row."""

    __tablename__ = "fleet_version"

    id: int = Field(primary_key=True)
    number: int = _size()


class Node(SQLModel, table=True):
    """A machine that runs the agent: what it said of itself, and what it last told of its state."""

    __tablename__ = "node"

    name: str = Field(primary_key=True)
    labels: dict[str, str] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    cuda: str
    arch: str
    sm: str | None = None
    gpus: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    driver: str | None = None
    glibc: str | None = None
    capacity_bytes: int | None = _size(nullable=True)
    product: str
    modules: list[str] | None = Field(default=None, sa_column=Column(JSON, nullable=True))
    groups: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    registered_by: str
    registered_at: datetime = _moment()
    heard_at: datetime = _moment(index=True)
    state: str = "registered"
    bundle: str | None = Field(default=None, max_length=64)  # what it has synced and smoked
    bytes: int = _size()
    seconds: float = 0.0
    problem: dict[str, Any] | None = Field(default=None, sa_column=Column(JSON, nullable=True))
    reported_at: datetime | None = _moment(nullable=True)


class SmokeResult(SQLModel, table=True):
    """How a module did on a node under a driver, the last time it was tried there."""

    __tablename__ = "smoke_result"

    node: str = Field(primary_key=True, foreign_key="node.name")
    sha256: str = Field(primary_key=True, max_length=64)
    driver: str = Field(primary_key=True)
    module: str = Field(index=True)
    outcome: str
    why: str = Field(default="", sa_column=Column(Text, nullable=False))
    expected: str | None = Field(default=None, sa_column=Column(Text, nullable=True))
    found: str | None = Field(default=None, sa_column=Column(Text, nullable=True))
    seconds: float = 0.0
    gpu: str | None = None
    bundle: str = Field(max_length=64)
    at: datetime = _moment()


class Warmup(SQLModel, table=True):
    """An order to bring pinned bytes to the store, then to nodes in waves. `id` is that of its job.

    `revisions` are the digests to warm; `state`: filling, warming, paused, cancelled, succeeded, failed.
    """

    __tablename__ = "warmup"

    id: str = Field(primary_key=True)
    revisions: list[str] = Field(default_factory=list, sa_column=Column(JSON, nullable=False))
    job: str | None = None  # the materialize job
    labels: dict[str, str] = Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
    max_parallel: int
    failure_share: float
    deadline: datetime | None = _moment(nullable=True)
    state: str = Field(index=True)
    why: str | None = Field(default=None, sa_column=Column(Text, nullable=True))
    asked_by: str
    created_at: datetime = _moment(index=True)
    updated_at: datetime = _moment()
    finished_at: datetime | None = _moment(nullable=True)


class WarmupNode(SQLModel, table=True):
    """A node of a warmup: waiting, told, done, failed or unseen; `bytes` fetched in `seconds`."""

    __tablename__ = "warmup_node"

    warmup: str = Field(primary_key=True, foreign_key="warmup.id")
    node: str = Field(primary_key=True, foreign_key="node.name")
    bundle: str | None = Field(default=None, max_length=64)
    state: str = "waiting"
    bytes: int = _size()
    seconds: float = 0.0
    smoke: dict[str, int] | None = Field(default=None, sa_column=Column(JSON, nullable=True))
    problem: dict[str, Any] | None = Field(default=None, sa_column=Column(JSON, nullable=True))
    told_at: datetime | None = _moment(nullable=True)
    ended_at: datetime | None = _moment(nullable=True)


AUDIT_GUARDS: dict[str, tuple[str, ...]] = {
    "sqlite": tuple(
        f"CREATE TRIGGER audit_entry_no_{event_name.lower()} BEFORE {event_name} ON audit_entry "
        "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
        for event_name in ("UPDATE", "DELETE")
    ),
    "postgresql": (
        "CREATE FUNCTION audit_entry_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$",
        "CREATE TRIGGER audit_entry_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_entry "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_entry_append_only()",
    ),
}
"""What makes each database refuse a change of the audit log; the migrations do the same."""


def _guard_audit(_table: Table, connection: Connection, **_: Any) -> None:
    for statement in AUDIT_GUARDS[connection.dialect.name]:
        connection.exec_driver_sql(statement)


event.listen(SQLModel.metadata.tables["audit_entry"], "after_create", _guard_audit)
