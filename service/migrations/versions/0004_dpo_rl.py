"""DPO and RL: environments and their runs, rollouts, prices, rewards of checkpoints."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    statements = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
    op.get_bind().execution_options(no_parameters=True).exec_driver_sql(statements)


def downgrade() -> None:
    raise NotImplementedError("Finery expands, then contracts: restore a backup to go back")
