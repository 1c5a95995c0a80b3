"""Foundation: tenants, keys, files, models, jobs, attempts, checkpoints, usage, with row-level security."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    statements = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
    # Without parameters, so that the driver leaves the `%` of format() alone and takes many statements.
    op.get_bind().execution_options(no_parameters=True).exec_driver_sql(statements)


def downgrade() -> None:
    raise NotImplementedError("Finery expands, then contracts: restore a backup to go back before the first schema")
