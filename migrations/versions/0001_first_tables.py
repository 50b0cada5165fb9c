"""The catalog's first tables"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "blob",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("zstd_state", sa.String(), nullable=False),
        sa.Column("zstd_size", sa.BigInteger(), nullable=True),
        sa.Column("zstd_sha256", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("sha256"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_blob_zstd_state", "blob", ["zstd_state"], unique=False)

    op.create_table(
        "bundle",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("manifest", sa.Text(), nullable=False),
        sa.Column("artifact_count", sa.Integer(), nullable=False),
        sa.Column("total_size", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )
    op.create_table(
        "inspection",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("format", sa.String(), nullable=False),
        sa.Column("machine", sa.String(), nullable=True),
        sa.Column("soname", sa.String(), nullable=True),
        sa.Column("needed", sa.JSON(), nullable=False),
        sa.Column("glibc", sa.String(), nullable=True),
        sa.Column("glibcxx", sa.String(), nullable=True),
        sa.Column("functions", sa.JSON(), nullable=False),
        sa.Column("sms", sa.JSON(), nullable=False),
        sa.Column("ptx", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("sha256"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "job",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("asked_by", sa.String(), nullable=False),
        sa.Column("bytes_done", sa.BigInteger(), nullable=False),
        sa.Column("bytes_total", sa.BigInteger(), nullable=True),
        sa.Column("members_done", sa.Integer(), nullable=False),
        sa.Column("members_total", sa.Integer(), nullable=True),
        sa.Column("wheels", sa.JSON(), nullable=False),
        sa.Column("problem", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_job_state", "job", ["state"], unique=False)

    op.create_table(
        "lease",
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_table(
        "pin_set_revision",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("origin", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )
    op.create_index("ix_pin_set_revision_name", "pin_set_revision", ["name"], unique=False)

    op.create_table(
        "token",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("secret_sha256", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("secret_sha256"),
    )
    op.create_table(
        "wheel",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("filename", sa.String(), nullable=False),
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("arch", sa.String(), nullable=True),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("unpacked_size", sa.BigInteger(), nullable=False),
        sa.Column("member_count", sa.Integer(), nullable=False),
        sa.Column("kept", sa.Boolean(), nullable=False),
        sa.Column("ingested_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("sha256"),
    )
    op.create_index("ix_wheel_project", "wheel", ["project"], unique=False)

    op.create_table(
        "wheel_failure",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("filename", sa.String(), nullable=False),
        sa.Column("problem", sa.JSON(), nullable=False),
        sa.Column("failed_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("sha256"),
    )
    op.create_table(
        "bundle_answer",
        sa.Column("question", sa.String(length=64), nullable=False),
        sa.Column("bundle", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["bundle"],
            ["bundle.digest"],
        ),
        sa.PrimaryKeyConstraint("question"),
    )
    op.create_table(
        "member",
        sa.Column("wheel", sa.String(length=64), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(), nullable=True),
        sa.Column("module", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(
            ["wheel"],
            ["wheel.sha256"],
        ),
        sa.PrimaryKeyConstraint("wheel", "path"),
        sqlite_with_rowid=False,
    )
    op.create_index(
        "ix_member_module",
        "member",
        ["module"],
        unique=False,
        sqlite_where=sa.text("module IS NOT NULL"),
        postgresql_where=sa.text("module IS NOT NULL"),
    )

    op.create_table(
        "pin",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("revision", sa.String(), nullable=False),
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("filename", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("cuda", sa.String(), nullable=False),
        sa.Column("arch", sa.String(), nullable=False),
        sa.Column("sm", sa.String(), nullable=True),
        sa.Column("url", sa.String(), nullable=True),
        sa.Column("index_name", sa.String(), nullable=True),
        sa.Column("size", sa.BigInteger(), nullable=True),
        sa.Column("record_sha256", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(
            ["revision"],
            ["pin_set_revision.digest"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_pin_revision", "pin", ["revision"], unique=False)
    op.create_index("ix_pin_sha256", "pin", ["sha256"], unique=False)

    op.create_table(
        "pin_set",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("revision", sa.String(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["revision"],
            ["pin_set_revision.digest"],
        ),
        sa.PrimaryKeyConstraint("name"),
    )


def downgrade() -> None:
    op.drop_table("pin_set")
    op.drop_index("ix_pin_sha256", table_name="pin")
    op.drop_index("ix_pin_revision", table_name="pin")

    op.drop_table("pin")
    op.drop_index("ix_member_module", table_name="member")

    op.drop_table("member")
    op.drop_table("bundle_answer")
    op.drop_table("wheel_failure")
    op.drop_index("ix_wheel_project", table_name="wheel")

    op.drop_table("wheel")
    op.drop_table("token")
    op.drop_index("ix_pin_set_revision_name", table_name="pin_set_revision")

    op.drop_table("pin_set_revision")
    op.drop_table("lease")
    op.drop_index("ix_job_state", table_name="job")

    op.drop_table("job")
    op.drop_table("inspection")
    op.drop_table("bundle")
    op.drop_index("ix_blob_zstd_state", table_name="blob")

    op.drop_table("blob")
