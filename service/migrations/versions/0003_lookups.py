"""Indexes: jobs that have ended and still have prepared data, which then goes; the usage of a job."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    condition = "finished_at is not null and prepared_prefix is not null"
    op.execute(f"create index jobs_with_data on jobs (finished_at) where {condition}")
    # GET /v1/usage reads all records of the jobs in its window, void ones too, and no other job's.
    op.execute("create index usage_by_job on usage_records (job_id, created_at)")


def downgrade() -> None:
    raise NotImplementedError("Finery expands, then contracts: restore a backup to go back")
