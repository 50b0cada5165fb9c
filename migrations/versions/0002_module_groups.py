"""Module groups of a pin set's revision"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("pin_set_revision", sa.Column("groups", sa.JSON(), nullable=False, server_default="[]"))


def downgrade() -> None:
    op.drop_column("pin_set_revision", "groups")
