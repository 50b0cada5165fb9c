"""Builds, built modules, provenance and uploads"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("modules", sa.JSON(), nullable=False, server_default="[]"))
    op.create_table(
        "build",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.Column("cuda", sa.String(), nullable=False),
        sa.Column("arch", sa.String(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("claim", sa.String(), nullable=True),
        sa.Column("builder", sa.String(), nullable=True),
        sa.Column("claimed_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("losses", sa.Integer(), nullable=False),
        sa.Column("queued_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["id"], ["job.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_build_state", "build", ["state"], unique=False)
    op.create_index("ix_build_queued_at", "build", ["queued_at"], unique=False)
    op.create_table(
        "built_module",
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("uri", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("record", sa.JSON(), nullable=False),
        sa.Column("posted_by", sa.String(), nullable=False),
        sa.Column("posted_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_index("ix_built_module_uri", "built_module", ["uri"], unique=False)
    op.create_table(
        "provenance",
        sa.Column("wheel", sa.String(length=64), nullable=False),
        sa.Column("statement", sa.JSON(), nullable=False),
        sa.Column("posted_by", sa.String(), nullable=False),
        sa.Column("posted_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("wheel"),
    )
    op.create_table(
        "upload",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("begun_by", sa.String(), nullable=False),
        sa.Column("begun_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("touched_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("sha256"),
    )
    op.create_table(
        "upload_part",
        sa.Column("upload", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["upload"], ["upload.sha256"]),
        sa.PrimaryKeyConstraint("upload", "number"),
    )
    op.create_index("ix_upload_part_sha256", "upload_part", ["sha256"], unique=False)


def downgrade() -> None:
    op.drop_table("upload_part")
    op.drop_table("upload")
    op.drop_table("provenance")
    op.drop_table("built_module")
    op.drop_table("build")
    op.drop_column("job", "modules")
