"""Uploaded data sets: immutable, checked at upload; files of the same content within a tenant share one object."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime

from fastapi import Request, Response
from sqlalchemy import ColumnElement
from sqlmodel import col
from sqlmodel.ext.asyncio.session import AsyncSession

from finery.types.errors import Problem
from finery.types.files import File
from finery.types.ids import new_id
from finery.types.pages import Page
from finery_service.auth.caller import Member
from finery_service.auth.idempotency import Once, do_once, fingerprint_of, once_of, replay
from finery_service.clock import milliseconds
from finery_service.db.engine import transaction
from finery_service.errors import ServiceError, not_found
from finery_service.files import intake, store
from finery_service.files.form import Form, read_form
from finery_service.files.intake import Received
from finery_service.files.tables import FileRow
from finery_service.http.bodies import limited, refuse_compressed
from finery_service.http.context import Services
from finery_service.http.multipart import Multipart
from finery_service.http.paging import is_id, page_of, to_page
from finery_service.tenants import store as tenants

UPLOADS = "uploads"
"""Prefix of objects that are still coming in."""
_FORM_SLACK = 4 * 2**20  # for the other fields and what lies between the parts


async def upload(services: Services, member: Member, request: Request) -> Response:
    """201 with the file, valid or invalid. Raises 400 and 413; then nothing is left behind."""
    now, limit = services.clock(), services.settings.max_file_bytes
    file_id = new_id("file", milliseconds(now))
    temporary = f"{UPLOADS}/{member.tenant_id}/{file_id}"
    refuse_compressed(request)
    form = Form()
    chunks = limited(request, limit + _FORM_SLACK, lambda _: intake.file_too_large(limit))
    multipart = Multipart(request.headers.get("content-type", ""), chunks)
    try:
        await read_form(
            multipart,
            form,
            lambda data: intake.receive(services.store, temporary, data, limit),
            services.settings.max_body_bytes,
        )
        return await _keep(services, member, request, file_id, form, now)
    finally:
        if form.received is not None:
            await intake.discard(services.store, temporary)


async def _keep(
    services: Services, member: Member, request: Request, file_id: str, form: Form, now: datetime
) -> Response:
    received, project = form.received, form.fields.get("project", member.project_id)
    assert received is not None
    fingerprint = fingerprint_of(form.name, project, received.sha256)
    once = once_of(request, member.tenant_id, fingerprint)
    # Whatever can be refused is refused before the object moves: the move and the row cannot be one transaction.
    async with transaction(services.app_engine, member.tenant_id) as session:
        if not is_id(project) or not await tenants.project_exists(session, member.tenant_id, project):
            message = "project: expected the id of one of your projects, found another one."
            raise ServiceError(400, "project_not_found", message, param="project")
        before = await replay(session, once)
        twin = await store.twin(session, member.tenant_id, received.sha256)
    if before is not None:
        return before
    services.metrics.uploaded_bytes.inc(received.bytes)
    row = _to_row(member, project, file_id, form.name, received, now)
    if twin is not None:
        with suppress(_TwinGoneError):
            async with transaction(services.app_engine, member.tenant_id) as session:
                return await do_once(session, once, lambda: _insert_twin(session, row), now)
    return await _insert_own(services, row, received, once, now)


class _TwinGoneError(Exception):
    """The file whose object was to be shared is deleted by now."""


async def _insert_twin(session: AsyncSession, row: FileRow) -> File:
    """The object of a file with the same content, which cannot be deleted until the new row is there for all to see."""
    twin = await store.twin(session, row.tenant_id, row.sha256, keep=True)
    if twin is None:
        raise _TwinGoneError
    row.object_key = twin.object_key
    return await _insert(session, row)


async def _insert_own(services: Services, row: FileRow, received: Received, once: Once, now: datetime) -> Response:
    row.object_key = f"{row.tenant_id}/files/{row.sha256}-{row.id}"
    await intake.settle(services.store, received, row.object_key)
    try:
        async with transaction(services.app_engine, row.tenant_id) as session:
            return await do_once(session, once, lambda: _insert(session, row), now)
    finally:
        async with transaction(services.app_engine, row.tenant_id) as session:
            is_kept = await store.get(session, row.tenant_id, row.id) is not None
        if not is_kept:  # a twin of the request was faster, or something failed
            await intake.discard(services.store, row.object_key)


async def _insert(session: AsyncSession, row: FileRow) -> File:
    session.add(row)
    await session.flush()
    return to_file(row)


async def get(session: AsyncSession, tenant_id: str, file_id: str) -> File:
    return to_file(await _require(session, tenant_id, file_id))


async def delete(session: AsyncSession, tenant_id: str, file_id: str, now: datetime) -> FileRow:
    """The row stays, for the jobs and bills that name it; its object is the caller's to purge after the commit.

    Raises 409 naming who needs it.
    """
    row = await _require(session, tenant_id, file_id, lock="change")
    users = await store.users(session, row)
    if users:
        kind, advice = "job", "cancel or wait for the end"
        if users[0].startswith("env_"):
            kind, advice = "environment", "delete it first, if no further job is to use it"
        message = f"Expected a file that nothing reads, found that {', '.join(users)} may; {advice}."
        details = [{kind: user} for user in users]
        raise ServiceError(409, "file_in_use", message, details=details, headers={"x-should-retry": "false"})
    row.deleted_at = now
    await session.flush()
    return row


async def _require(session: AsyncSession, tenant_id: str, file_id: str, *, lock: store.Lock | None = None) -> FileRow:
    row = await store.get(session, tenant_id, file_id, lock=lock) if is_id(file_id) else None
    if row is None:
        raise not_found("file", file_id)
    return row


async def list_page(
    session: AsyncSession, tenant_id: str, *, project: str | None = None, after: str | None, limit: int
) -> Page[File]:
    """Raises 404 for an unknown project."""
    filters: list[ColumnElement[bool]] = [col(FileRow.deleted_at).is_(None)]
    if project is not None:
        if not (is_id(project) and await tenants.project_exists(session, tenant_id, project)):
            raise not_found("project", project, "project")
        filters.append(col(FileRow.project_id) == project)
    rows, has_more = await page_of(
        session, FileRow, FileRow.tenant_id == tenant_id, after=after, limit=limit, filters=filters
    )
    return to_page([to_file(row) for row in rows], has_more)


def _to_row(member: Member, project: str, file_id: str, name: str, received: Received, now: datetime) -> FileRow:
    """Its object's key is left open."""
    report = received.report
    return FileRow(
        tenant_id=member.tenant_id,
        id=file_id,
        project_id=project,
        name=name,
        bytes=received.bytes,
        sha256=received.sha256,
        object_key="",
        status=report.status,
        format=report.format,
        encoding=report.encoding,
        rows=report.rows,
        errors=[problem.model_dump(mode="json") for problem in report.problems],
        error_count=report.problem_count,
        created_at=now,
    )


def to_file(row: FileRow) -> File:
    return File(
        id=row.id,
        project=row.project_id,
        name=row.name,
        bytes=row.bytes,
        sha256=row.sha256,
        status=row.status,
        format=row.format,
        encoding=row.encoding,
        rows=row.rows,
        errors=tuple(Problem.model_validate(problem) for problem in row.errors),
        error_count=row.error_count,
        created_at=row.created_at,
    )
