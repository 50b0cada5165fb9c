"""Canaries, the audit log, nodes, smoke results, warmups"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_GUARDS = {
    "sqlite": (
        "CREATE TRIGGER audit_entry_no_update BEFORE UPDATE ON audit_entry "
        "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END",
        "CREATE TRIGGER audit_entry_no_delete BEFORE DELETE ON audit_entry "
        "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END",
    ),
    "postgresql": (
        "CREATE FUNCTION audit_entry_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$",
        "CREATE TRIGGER audit_entry_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_entry "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_entry_append_only()",
    ),
}


def upgrade() -> None:
    op.create_table(
        "canary",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("revision", sa.String(length=64), nullable=False),
        sa.Column("label", sa.String(), nullable=False),
        sa.Column("value", sa.String(), nullable=False),
        sa.Column("require", sa.Integer(), nullable=False),
        sa.Column("begun_by", sa.String(), nullable=False),
        sa.Column("begun_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["name"], ["pin_set.name"]),
        sa.ForeignKeyConstraint(["revision"], ["pin_set_revision.digest"]),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "revision_failure",
        sa.Column("revision", sa.String(length=64), nullable=False),
        sa.Column("problem", sa.JSON(), nullable=False),
        sa.Column("failed_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["revision"], ["pin_set_revision.digest"]),
        sa.PrimaryKeyConstraint("revision"),
    )
    op.create_table(
        "audit_entry",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("who", sa.String(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("before", sa.String(), nullable=True),
        sa.Column("after", sa.String(), nullable=True),
        sa.Column("why", sa.Text(), nullable=True),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_audit_entry_at", "audit_entry", ["at"], unique=False)
    op.create_index("ix_audit_entry_action", "audit_entry", ["action"], unique=False)
    op.create_index("ix_audit_entry_subject", "audit_entry", ["subject"], unique=False)
    for statement in _GUARDS[op.get_bind().dialect.name]:
        op.execute(statement)
    op.create_table(
        "fleet_version",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "node",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("cuda", sa.String(), nullable=False),
        sa.Column("arch", sa.String(), nullable=False),
        sa.Column("sm", sa.String(), nullable=True),
        sa.Column("gpus", sa.JSON(), nullable=False),
        sa.Column("driver", sa.String(), nullable=True),
        sa.Column("glibc", sa.String(), nullable=True),
        sa.Column("capacity_bytes", sa.BigInteger(), nullable=True),
        sa.Column("product", sa.String(), nullable=False),
        sa.Column("modules", sa.JSON(), nullable=True),
        sa.Column("groups", sa.JSON(), nullable=False),
        sa.Column("registered_by", sa.String(), nullable=False),
        sa.Column("registered_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("heard_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("bundle", sa.String(length=64), nullable=True),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("problem", sa.JSON(), nullable=True),
        sa.Column("reported_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_index("ix_node_heard_at", "node", ["heard_at"], unique=False)
    op.create_table(
        "smoke_result",
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("driver", sa.String(), nullable=False),
        sa.Column("module", sa.String(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("expected", sa.Text(), nullable=True),
        sa.Column("found", sa.Text(), nullable=True),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("gpu", sa.String(), nullable=True),
        sa.Column("bundle", sa.String(length=64), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["node"], ["node.name"]),
        sa.PrimaryKeyConstraint("node", "sha256", "driver"),
    )
    op.create_index("ix_smoke_result_module", "smoke_result", ["module"], unique=False)
    op.create_table(
        "warmup",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("revisions", sa.JSON(), nullable=False),
        sa.Column("job", sa.String(), nullable=True),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("max_parallel", sa.Integer(), nullable=False),
        sa.Column("failure_share", sa.Float(), nullable=False),
        sa.Column("deadline", sa.DateTime(timezone=True), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("why", sa.Text(), nullable=True),
        sa.Column("asked_by", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_warmup_state", "warmup", ["state"], unique=False)
    op.create_index("ix_warmup_created_at", "warmup", ["created_at"], unique=False)
    op.create_table(
        "warmup_node",
        sa.Column("warmup", sa.String(), nullable=False),
        sa.Column("node", sa.String(), nullable=False),
        sa.Column("bundle", sa.String(length=64), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("smoke", sa.JSON(), nullable=True),
        sa.Column("problem", sa.JSON(), nullable=True),
        sa.Column("told_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["node"], ["node.name"]),
        sa.ForeignKeyConstraint(["warmup"], ["warmup.id"]),
        sa.PrimaryKeyConstraint("warmup", "node"),
    )


def downgrade() -> None:
    for table in (
        "warmup_node",
        "warmup",
        "smoke_result",
        "node",
        "fleet_version",
        "audit_entry",
        "revision_failure",
        "canary",
    ):
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION audit_entry_append_only()")
