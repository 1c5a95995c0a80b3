"""All tables, so that one import fills the metadata."""

from __future__ import annotations

from sqlmodel import SQLModel

from finery_service.auth.tables import IdempotencyRow
from finery_service.checkpoints.tables import CheckpointRow
from finery_service.environments.tables import EnvironmentRow
from finery_service.files.tables import FileRow
from finery_service.jobs.tables import AttemptRow, EventRow, JobHeadRow, JobRow
from finery_service.keys.tables import ApiKeyRow, OperatorKeyRow
from finery_service.models.tables import ModelRow
from finery_service.reconcile.tables import LeaseRow
from finery_service.rollouts.tables import RolloutFileRow
from finery_service.tenants.tables import ProjectRow, TenantRow
from finery_service.usage.tables import PriceBookRow, UsageRecordRow

metadata = SQLModel.metadata

__all__ = [
    "ApiKeyRow",
    "AttemptRow",
    "CheckpointRow",
    "EnvironmentRow",
    "EventRow",
    "FileRow",
    "IdempotencyRow",
    "JobHeadRow",
    "JobRow",
    "LeaseRow",
    "ModelRow",
    "OperatorKeyRow",
    "PriceBookRow",
    "ProjectRow",
    "RolloutFileRow",
    "TenantRow",
    "UsageRecordRow",
    "metadata",
]
