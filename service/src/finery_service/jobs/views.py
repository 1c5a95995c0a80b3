"""Rows of jobs and events as tenants see them. Pure."""

from __future__ import annotations

from typing import Any

from finery.types.data import DataReport
from finery.types.errors import ErrorDetail
from finery.types.jobs import Event, Job, JobState, Progress
from finery.types.reasons import RULES, JobReason
from finery_service.jobs.queries import Facts
from finery_service.jobs.tables import EventRow, JobRow
from finery_service.usage.prices import cost_usd


def to_job(row: JobRow, facts: Facts) -> Job:
    trained = sum(units for sku, units in row.usage.items() if sku.startswith("train."))
    return Job(
        id=row.id,
        project=row.project_id,
        method=row.method,
        model=facts.model,
        from_checkpoint=row.from_checkpoint_id,
        training_file=row.training_file_id,
        validation_file=row.validation_file_id,
        environment=row.environment,
        environment_id=row.environment_id,
        name=row.name,
        metadata=row.spec["metadata"] if row.customer_metadata is None else row.customer_metadata,
        priority=row.priority,
        state=row.state,
        reason=row.reason,
        message=_sentence(row),
        position=row.queue_position if row.state == JobState.QUEUED else None,
        intent=row.intent,
        progress=Progress(step=row.step, total_steps=row.total_steps, trained_tokens=trained),
        data=DataReport.model_validate(row.data) if row.data else None,
        best_checkpoint=facts.best_checkpoint,
        usage=row.usage,
        cost=cost_usd(row.usage, facts.prices),
        error=ErrorDetail.model_validate(row.error) if row.error else None,
        attempts=facts.attempts,
        created_at=row.created_at,
        queued_at=row.queued_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        **_as_asked(row.spec),
    )


def _as_asked(spec: dict[str, Any]) -> dict[str, Any]:
    """Fields that are shown as the spec has them; some of them are younger than some jobs."""
    return {
        "seed": spec["seed"],
        "adapter": spec["adapter"],
        "hyperparameters": spec["hyperparameters"],
        "resources": spec["resources"],
        "limits": spec["limits"],
        "merge_checkpoint": spec.get("merge_checkpoint", False),
        "added_tokens": tuple(spec.get("added_tokens", ())),
        "export_merged": spec.get("export_merged", False),
    }


def to_event(row: EventRow) -> Event:
    return Event(job=row.job_id, seq=row.seq, type=row.type, data=row.data, created_at=row.created_at)


def _sentence(row: JobRow) -> str | None:
    if row.reason == JobReason.EXCEEDS_POOL and row.accelerator_type is not None:
        number = f"{row.accelerators} accelerator{'s' if row.accelerators > 1 else ''}"
        wanted = f"{number} of the type {row.accelerator_type!r} (resources.accelerator_type)"
        return f"The pool does not have {wanted}; the job starts when it does."
    return RULES[JobReason(row.reason)].sentence if row.reason in frozenset(JobReason) else None
