"""Environments: what a job's answers are rewarded with. They never change; a job keeps its own copy."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import ColumnElement
from sqlmodel import col
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.environments import Environment, EnvironmentCreate, EnvironmentSpec, PromptsEnvironment
from finery.types.ids import new_id
from finery.types.pages import Page
from finery_service.auth.caller import Member
from finery_service.clock import milliseconds
from finery_service.environments import store
from finery_service.environments.tables import EnvironmentRow
from finery_service.errors import ServiceError, not_found, refusal
from finery_service.files import store as files
from finery_service.files.tables import FileRow
from finery_service.http.paging import is_id, page_of, to_page
from finery_service.tenants import store as tenants

_SPEC: TypeAdapter[EnvironmentSpec] = TypeAdapter(EnvironmentSpec)
_TOLD = 20


async def check(session: AsyncSession, member: Member, spec: EnvironmentSpec, param: str) -> None:
    """The files that an environment names; they stay undeleted until the transaction ends.

    Raises 400 naming the field, below `param`, for a file that is unknown, has errors or does not hold prompts. The
    rest is `checks.check`'s, before the transaction.
    """
    if not isinstance(spec, PromptsEnvironment):
        return
    file = await _prompts(session, member.tenant_id, spec.file, f"{param}.file")
    if spec.held_out_file is None:
        return
    held_out = await _prompts(session, member.tenant_id, spec.held_out_file, f"{param}.held_out_file")
    if held_out.sha256 == file.sha256:
        expected = "other prompts than those of file, which the job trains on"
        raise refusal("held_out_is_trained_on", f"{param}.held_out_file", expected, "the same content")


async def create(session: AsyncSession, member: Member, body: EnvironmentCreate, now: datetime) -> Environment:
    """Raises 400 naming the field that cannot be had."""
    await check(session, member, body.spec, "spec")
    if body.project is not None and not await tenants.project_exists(session, member.tenant_id, body.project):
        raise refusal("project_not_found", "project", "the id of one of your projects", body.project)
    row = EnvironmentRow(
        tenant_id=member.tenant_id,
        id=new_id("env", milliseconds(now)),
        project_id=body.project or member.project_id,
        name=body.name,
        spec=body.spec.model_dump(mode="json"),
        created_at=now,
    )
    session.add(row)
    await session.flush()
    return to_environment(row)


async def get(session: AsyncSession, tenant_id: str, environment_id: str) -> Environment:
    return to_environment(await require(session, tenant_id, environment_id))


async def list_page(
    session: AsyncSession, tenant_id: str, *, project: str | None, after: str | None, limit: int
) -> Page[Environment]:
    """Newest first. Raises 404 for an unknown project."""
    filters: list[ColumnElement[bool]] = [col(EnvironmentRow.deleted_at).is_(None)]
    if project is not None:
        if not (is_id(project) and await tenants.project_exists(session, tenant_id, project)):
            raise not_found("project", project, "project")
        filters.append(col(EnvironmentRow.project_id) == project)
    rows, has_more = await page_of(
        session,
        EnvironmentRow,
        EnvironmentRow.tenant_id == tenant_id,
        after=after,
        limit=limit,
        filters=filters,
        large=col(EnvironmentRow.spec),
    )
    return to_page([to_environment(row) for row in rows], has_more)


async def delete(session: AsyncSession, tenant_id: str, environment_id: str, now: datetime) -> None:
    """The row stays, for the jobs that name it; what they use is a copy, so none of them is disturbed."""
    row = await require(session, tenant_id, environment_id, lock="change")
    row.deleted_at = now
    await session.flush()


async def require(
    session: AsyncSession, tenant_id: str, environment_id: str, *, lock: files.Lock | None = None
) -> EnvironmentRow:
    """The row, or 404, the same for an unknown environment, a deleted one and another tenant's."""
    row = await store.get(session, tenant_id, environment_id, lock=lock) if is_id(environment_id) else None
    if row is None:
        raise not_found("environment", environment_id)
    return row


def spec_of(stored: dict[str, Any]) -> EnvironmentSpec:
    """As in `environments.spec` and `jobs.environment`."""
    return _SPEC.validate_python(stored)


def to_environment(row: EnvironmentRow) -> Environment:
    return Environment(
        id=row.id,
        project=row.project_id,
        name=row.name,
        type=row.spec["type"],
        spec=row.spec,
        created_at=row.created_at,
    )


async def _prompts(session: AsyncSession, tenant_id: str, file_id: str, param: str) -> FileRow:
    file = await files.get(session, tenant_id, file_id, lock="keep")
    if file is None:
        raise refusal("file_not_found", param, "the id of an uploaded file", file_id)
    if file.status != "valid":
        found = f"{file.error_count} in {file.id}"
        message = f"{param}: expected a file without errors, found {found}; see details, mend and upload it again."
        raise ServiceError(400, "invalid_file", message, param=param, details=file.errors[:_TOLD])
    if file.format != "prompts":
        expected = "a file of prompts rows (a prompt, and what its graders need)"
        raise refusal("wrong_task_format", param, expected, f"one of {file.format} rows")
    return file
