"""Benchmark reports"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "benchmark",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("benchmark", sa.String(), nullable=False),
        sa.Column("gpu", sa.String(), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.Column("posted_by", sa.String(), nullable=False),
        sa.Column("posted_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )
    op.create_index("ix_benchmark_benchmark", "benchmark", ["benchmark"], unique=False)
    op.create_index("ix_benchmark_posted_at", "benchmark", ["posted_at"], unique=False)


def downgrade() -> None:
    op.drop_index("ix_benchmark_posted_at", table_name="benchmark")
    op.drop_index("ix_benchmark_benchmark", table_name="benchmark")
    op.drop_table("benchmark")
