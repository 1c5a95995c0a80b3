"""Every call of the API, declared once for both clients. Pure: nothing here sends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from finery._multipart import Multipart, Upload
from finery.data.strict_json import dotted, flaws
from finery.errors import InvalidArgumentError
from finery.types.base import Resource
from finery.types.checkpoints import Checkpoint
from finery.types.files import File
from finery.types.jobs import Event, Job
from finery.types.methods import SftJobCreate
from finery.types.models import Model, ModelCreate
from finery.types.pages import Page
from finery.types.previews import Preview
from finery.types.tenants import Key, KeyCreate, Tenant, TenantCreate
from finery.types.usage import GroupBy, UsageRow

T = TypeVar("T")


class Nothing(Resource):
    """The answer to a deletion: whatever the server says, nothing is left to hand out."""


M = TypeVar("M", bound=BaseModel)
Params = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request and the class of its answer; the same bytes on every attempt."""

    method: Literal["GET", "POST", "PATCH", "DELETE"]
    path: str
    expect: type[T]
    params: Params = ()
    json: Any = None
    file: Multipart | None = None
    headers: tuple[tuple[str, str], ...] = ()
    idempotency_key: str | None = None

    def body(self) -> bytes | None:
        """UTF-8 JSON, or None if the call has none."""
        if self.json is None:
            return None
        try:
            return json.dumps(self.json, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except ValueError:
            flaw = next(flaws(self.json), None)
            what = f"{dotted(flaw.path)}: {flaw.message}" if flaw else "expected JSON, found what JSON does not have"
            raise InvalidArgumentError(f"{self.path}: {what}") from None

    def with_params(self, **changes: str | int | None) -> Call[T]:
        kept = tuple(item for item in self.params if item[0] not in changes)
        return replace(self, params=kept + _params(**changes))


# -- files, models ----------------------------------------------------------------------------------------------------


def upload_file(upload: Upload, project: str | None, key: str) -> Call[File]:
    body = Multipart(upload, f"finery-{key}", project)
    return Call("POST", "/v1/files", File, file=body, idempotency_key=key)


def list_files(project: str | None, limit: int | None) -> Call[Page[File]]:
    return Call("GET", "/v1/files", Page[File], _params(project=project, limit=limit))


def retrieve_file(file: File | str) -> Call[File]:
    return Call("GET", f"/v1/files/{_segment(file, 'file')}", File)


def delete_file(file: File | str) -> Call[Nothing]:
    return Call("DELETE", f"/v1/files/{_segment(file, 'file')}", Nothing)


def create_preview(file: File | str, fields: Mapping[str, Any], key: str) -> Call[Preview]:
    path = f"/v1/files/{_segment(file, 'file')}/previews"
    return Call("POST", path, Preview, json=to_body(given(fields)), idempotency_key=key)


def retrieve_preview(preview: Preview) -> Call[Preview]:
    path = f"/v1/files/{_segment(preview.file, 'file')}/previews/{_segment(preview.id, 'preview')}"
    return Call("GET", path, Preview)


def list_models(limit: int | None) -> Call[Page[Model]]:
    return Call("GET", "/v1/models", Page[Model], _params(limit=limit))


def retrieve_model(model: Model | str) -> Call[Model]:
    return Call("GET", f"/v1/models/{_segment(model, 'model')}", Model)


def create_model(body: ModelCreate | Mapping[str, Any], key: str) -> Call[Model]:
    return Call("POST", "/v1/models", Model, json=to_body(body), idempotency_key=key)


# -- jobs -------------------------------------------------------------------------------------------------------------


def create_job(body: SftJobCreate | Mapping[str, Any], key: str) -> Call[Job]:
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
    params = _params(
        project=project,
        created_after=_time("created_after", created_after),
        created_before=_time("created_before", created_before),
        limit=limit,
    )
    return Call("GET", "/v1/jobs", Page[Job], _any_of("state", state) + _any_of("method", method) + params)


def retrieve_job(job: Job | str) -> Call[Job]:
    return Call("GET", f"/v1/jobs/{_segment(job, 'job')}", Job)


def update_job(job: Job | str, changes: Mapping[str, Any]) -> Call[Job]:
    return Call("PATCH", f"/v1/jobs/{_segment(job, 'job')}", Job, json=to_body(changes))


def turn_job(job: Job | str, verb: Literal["cancel", "pause", "resume"], key: str) -> Call[Job]:
    return Call("POST", f"/v1/jobs/{_segment(job, 'job')}/{verb}", Job, idempotency_key=key)


def list_events(job: Job | str, after: int) -> Call[Page[Event]]:
    return Call("GET", f"/v1/jobs/{_segment(job, 'job')}/events", Page[Event], _params(after=after, limit=100))


def stream_events(job: Job | str, after: int) -> Call[Event]:
    """A stream of `Event`; goes on behind the last seq that was seen."""
    headers = (("Accept", "text/event-stream"), ("Cache-Control", "no-store"), ("Last-Event-ID", str(after)))
    return Call("GET", f"/v1/jobs/{_segment(job, 'job')}/events", Event, headers=headers)


# -- checkpoints, usage -----------------------------------------------------------------------------------------------


def list_checkpoints(job: Job | str | None, limit: int | None) -> Call[Page[Checkpoint]]:
    params = _params(job=None if job is None else id_of(job, "job"), limit=limit)
    return Call("GET", "/v1/checkpoints", Page[Checkpoint], params)


def retrieve_checkpoint(checkpoint: Checkpoint | str) -> Call[Checkpoint]:
    return Call("GET", f"/v1/checkpoints/{_segment(checkpoint, 'checkpoint')}", Checkpoint)


def delete_checkpoint(checkpoint: Checkpoint | str) -> Call[Nothing]:
    return Call("DELETE", f"/v1/checkpoints/{_segment(checkpoint, 'checkpoint')}", Nothing)


def download_file(checkpoint: str, path: str, start: int, end: int | None = None) -> Call[bytes]:
    """The file's bytes from `start` on, up to but not with `end`."""
    headers = (("Range", f"bytes={start}-{'' if end is None else end - 1}"),) if start or end is not None else ()
    url = f"/v1/checkpoints/{_segment(checkpoint, 'checkpoint')}/files/{quote(path, safe='/')}"
    return Call("GET", url, bytes, headers=headers)


def list_usage(
    job: Job | str | None, start: datetime | None, end: datetime | None, group_by: Sequence[GroupBy]
) -> Call[Page[UsageRow]]:
    if isinstance(group_by, str):
        raise TypeError(f"expected group_by as a list such as ['sku'], found the text {group_by!r}")
    params = _params(
        job=None if job is None else id_of(job, "job"), start=_time("start", start), end=_time("end", end)
    ) + tuple(("group_by", name) for name in group_by)
    return Call("GET", "/v1/usage", Page[UsageRow], params)


# -- operators --------------------------------------------------------------------------------------------------------


def create_tenant(body: TenantCreate | Mapping[str, Any], key: str) -> Call[Tenant]:
    return Call("POST", "/v1/tenants", Tenant, json=to_body(body), idempotency_key=key)


def list_tenants(limit: int | None) -> Call[Page[Tenant]]:
    return Call("GET", "/v1/tenants", Page[Tenant], _params(limit=limit))


def create_key(tenant: Tenant | str, body: KeyCreate | Mapping[str, Any], key: str) -> Call[Key]:
    path = f"/v1/tenants/{_segment(tenant, 'tenant')}/keys"
    return Call("POST", path, Key, json=to_body(body), idempotency_key=key)


def list_keys(tenant: Tenant | str, limit: int | None) -> Call[Page[Key]]:
    return Call("GET", f"/v1/tenants/{_segment(tenant, 'tenant')}/keys", Page[Key], _params(limit=limit))


def revoke_key(tenant: Tenant | str, key: Key | str) -> Call[Key]:
    return Call("DELETE", f"/v1/tenants/{_segment(tenant, 'tenant')}/keys/{_segment(key, 'key')}", Key)


# -- helpers ----------------------------------------------------------------------------------------------------------


def to_body(fields: BaseModel | Mapping[str, Any]) -> Any:
    """JSON for a request. Request classes are written out in full; a resource stands for its id."""
    if isinstance(fields, BaseModel):
        return fields.model_dump(mode="json")
    return {name: _value(value) for name, value in fields.items()}


def _value(value: Any) -> Any:
    if isinstance(value, Resource) and isinstance(id_ := getattr(value, "id", None), str):
        return id_
    if isinstance(value, datetime):
        return _time("a time", value)
    if isinstance(value, Mapping):
        return {str(name): _value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_value(item) for item in value]
    if isinstance(value, Decimal):
        return format(value, "f")  # 0.0000004, not 4E-7
    # NaN stays a float here and is refused by `Call.body`, not turned into null.
    return value if isinstance(value, float) else to_jsonable_python(value)


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is None: the server's default holds."""
    return {name: value for name, value in fields.items() if value is not None}


def _params(**values: str | int | None) -> Params:
    return tuple((name, str(value)) for name, value in values.items() if value is not None)


def _any_of(name: str, values: str | Sequence[str] | None) -> Params:
    """One value or several, of which any will do."""
    several = () if values is None else (values,) if isinstance(values, str) else values
    return tuple((name, str(value)) for value in several)


def id_of(value: Resource | str, noun: str) -> str:
    """The id itself, or the id of the resource; never a text that would change the path."""
    text = value if isinstance(value, str) else getattr(value, "id", None)
    if not isinstance(text, str) or text in ("", ".", ".."):
        raise InvalidArgumentError(f"expected the id of a {noun}, found {value!r}")
    return text


def _segment(value: Resource | str, noun: str) -> str:
    return quote(id_of(value, noun), safe="")


def _time(name: str, value: datetime | None) -> str | None:
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise TypeError(f"{name}: expected a datetime with a zone, found {type(value).__name__}")
    if value.tzinfo is None:
        raise InvalidArgumentError(
            f"{name}: expected a time with a zone, found the naive {value.isoformat()}; "
            "use datetime(…, tzinfo=timezone.utc), or .astimezone() for local time"
        )
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
