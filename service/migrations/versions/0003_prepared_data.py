"""Prepared data goes when its job has ended: an index of the jobs that still have some."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    condition = "finished_at is not null and prepared_prefix is not null"
    op.execute(f"create index jobs_with_data on jobs (finished_at) where {condition}")


def downgrade() -> None:
    raise NotImplementedError("Finery expands, then contracts: restore a backup to go back")
