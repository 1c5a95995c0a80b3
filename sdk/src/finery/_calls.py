"""Every call of the API, declared once for both clients. Pure: nothing here sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal
from urllib.parse import quote

from finery._call import Call, Nothing, any_of, given, id_of, query, segment, time_text, to_body
from finery._multipart import Multipart, Upload
from finery.types.checkpoints import Checkpoint
from finery.types.environments import Environment, EnvironmentRun
from finery.types.files import File
from finery.types.jobs import Event, Job
from finery.types.methods import JobCreate
from finery.types.models import Model, ModelCreate
from finery.types.pages import Page
from finery.types.previews import Preview
from finery.types.rollouts import Rollout
from finery.types.tenants import Key, KeyCreate, Tenant, TenantCreate
from finery.types.usage import GroupBy, UsageRow

# -- files, models ----------------------------------------------------------------------------------------------------


def upload_file(upload: Upload, project: str | None, key: str) -> Call[File]:
    body = Multipart(upload, f"finery-{key}", project)
    return Call("POST", "/v1/files", File, file=body, idempotency_key=key)


def list_files(project: str | None, limit: int | None) -> Call[Page[File]]:
    return Call("GET", "/v1/files", Page[File], query(project=project, limit=limit))


def retrieve_file(file: File | str) -> Call[File]:
    return Call("GET", f"/v1/files/{segment(file, 'file')}", File)


def delete_file(file: File | str) -> Call[Nothing]:
    return Call("DELETE", f"/v1/files/{segment(file, 'file')}", Nothing)


def create_preview(file: File | str, fields: Mapping[str, Any], key: str) -> Call[Preview]:
    path = f"/v1/files/{segment(file, 'file')}/previews"
    return Call("POST", path, Preview, json=to_body(given(fields)), idempotency_key=key)


def retrieve_preview(preview: Preview) -> Call[Preview]:
    path = f"/v1/files/{segment(preview.file, 'file')}/previews/{segment(preview.id, 'preview')}"
    return Call("GET", path, Preview)


def list_models(limit: int | None) -> Call[Page[Model]]:
    return Call("GET", "/v1/models", Page[Model], query(limit=limit))


def retrieve_model(model: Model | str) -> Call[Model]:
    return Call("GET", f"/v1/models/{segment(model, 'model')}", Model)


def create_model(body: ModelCreate | Mapping[str, Any], key: str) -> Call[Model]:
    return Call("POST", "/v1/models", Model, json=to_body(body), idempotency_key=key)


# -- jobs -------------------------------------------------------------------------------------------------------------


def create_job(body: JobCreate | Mapping[str, Any], key: str) -> Call[Job]:
    return Call("POST", "/v1/jobs", Job, json=to_body(body), idempotency_key=key)


def list_jobs(
    *,
    state: str | Sequence[str] | None = None,
    method: str | Sequence[str] | None = None,
    project: str | None = None,
    created_after: datetime | None = None,
    created_before: datetime | None = None,
    limit: int | None = None,
) -> Call[Page[Job]]:
    params = query(
        project=project,
        created_after=time_text("created_after", created_after),
        created_before=time_text("created_before", created_before),
        limit=limit,
    )
    return Call("GET", "/v1/jobs", Page[Job], any_of("state", state) + any_of("method", method) + params)


def retrieve_job(job: Job | str) -> Call[Job]:
    return Call("GET", f"/v1/jobs/{segment(job, 'job')}", Job)


def update_job(job: Job | str, changes: Mapping[str, Any]) -> Call[Job]:
    return Call("PATCH", f"/v1/jobs/{segment(job, 'job')}", Job, json=to_body(changes))


def turn_job(job: Job | str, verb: Literal["cancel", "pause", "resume"], key: str) -> Call[Job]:
    return Call("POST", f"/v1/jobs/{segment(job, 'job')}/{verb}", Job, idempotency_key=key)


def list_events(job: Job | str, after: int) -> Call[Page[Event]]:
    return Call("GET", f"/v1/jobs/{segment(job, 'job')}/events", Page[Event], query(after=after, limit=100))


def stream_events(job: Job | str, after: int) -> Call[Event]:
    """A stream of `Event`; goes on behind the last seq that was seen."""
    headers = (("Accept", "text/event-stream"), ("Cache-Control", "no-store"), ("Last-Event-ID", str(after)))
    return Call("GET", f"/v1/jobs/{segment(job, 'job')}/events", Event, headers=headers)


def list_rollouts(job: Job | str, step: int | None, kind: str | None, limit: int) -> Call[Page[Rollout]]:
    path = f"/v1/jobs/{segment(job, 'job')}/rollouts"
    return Call("GET", path, Page[Rollout], query(step=step, kind=kind, limit=limit))


# -- environments -----------------------------------------------------------------------------------------------------


def create_environment(body: Mapping[str, Any], key: str) -> Call[Environment]:
    return Call("POST", "/v1/environments", Environment, json=to_body(body), idempotency_key=key)


def list_environments(project: str | None, limit: int | None) -> Call[Page[Environment]]:
    return Call("GET", "/v1/environments", Page[Environment], query(project=project, limit=limit))


def retrieve_environment(environment: Environment | str) -> Call[Environment]:
    return Call("GET", f"/v1/environments/{segment(environment, 'environment')}", Environment)


def delete_environment(environment: Environment | str) -> Call[Nothing]:
    return Call("DELETE", f"/v1/environments/{segment(environment, 'environment')}", Nothing)


def create_run(environment: Environment | str, body: Mapping[str, Any], key: str) -> Call[EnvironmentRun]:
    path = f"/v1/environments/{segment(environment, 'environment')}/runs"
    return Call("POST", path, EnvironmentRun, json=to_body(body), idempotency_key=key)


def retrieve_run(run: EnvironmentRun) -> Call[EnvironmentRun]:
    path = f"/v1/environments/{segment(run.environment, 'environment')}/runs/{segment(run.id, 'run')}"
    return Call("GET", path, EnvironmentRun)


# -- checkpoints, usage -----------------------------------------------------------------------------------------------


def list_checkpoints(job: Job | str | None, limit: int | None) -> Call[Page[Checkpoint]]:
    params = query(job=None if job is None else id_of(job, "job"), limit=limit)
    return Call("GET", "/v1/checkpoints", Page[Checkpoint], params)


def retrieve_checkpoint(checkpoint: Checkpoint | str) -> Call[Checkpoint]:
    return Call("GET", f"/v1/checkpoints/{segment(checkpoint, 'checkpoint')}", Checkpoint)


def delete_checkpoint(checkpoint: Checkpoint | str) -> Call[Nothing]:
    return Call("DELETE", f"/v1/checkpoints/{segment(checkpoint, 'checkpoint')}", Nothing)


def download_file(checkpoint: str, path: str, start: int, end: int | None = None) -> Call[bytes]:
    """The file's bytes from `start` on, up to but not with `end`."""
    headers = (("Range", f"bytes={start}-{'' if end is None else end - 1}"),) if start or end is not None else ()
    url = f"/v1/checkpoints/{segment(checkpoint, 'checkpoint')}/files/{quote(path, safe='/')}"
    return Call("GET", url, bytes, headers=headers)


def list_usage(
    job: Job | str | None, start: datetime | None, end: datetime | None, group_by: Sequence[GroupBy]
) -> Call[Page[UsageRow]]:
    if isinstance(group_by, str):
        raise TypeError(f"expected group_by as a list such as ['sku'], found the text {group_by!r}")
    params = query(
        job=None if job is None else id_of(job, "job"), start=time_text("start", start), end=time_text("end", end)
    ) + tuple(("group_by", name) for name in group_by)
    return Call("GET", "/v1/usage", Page[UsageRow], params)


# -- operators --------------------------------------------------------------------------------------------------------


def create_tenant(body: TenantCreate | Mapping[str, Any], key: str) -> Call[Tenant]:
    return Call("POST", "/v1/tenants", Tenant, json=to_body(body), idempotency_key=key)


def list_tenants(limit: int | None) -> Call[Page[Tenant]]:
    return Call("GET", "/v1/tenants", Page[Tenant], query(limit=limit))


def create_key(tenant: Tenant | str, body: KeyCreate | Mapping[str, Any], key: str) -> Call[Key]:
    path = f"/v1/tenants/{segment(tenant, 'tenant')}/keys"
    return Call("POST", path, Key, json=to_body(body), idempotency_key=key)


def list_keys(tenant: Tenant | str, limit: int | None) -> Call[Page[Key]]:
    return Call("GET", f"/v1/tenants/{segment(tenant, 'tenant')}/keys", Page[Key], query(limit=limit))


def revoke_key(tenant: Tenant | str, key: Key | str) -> Call[Key]:
    return Call("DELETE", f"/v1/tenants/{segment(tenant, 'tenant')}/keys/{segment(key, 'key')}", Key)
