"""Tenants, projects and keys (operators create them)."""

from __future__ import annotations

from typing import Literal

from finery.types.base import Name, Request, Resource, Time
from finery.types.ids import ProjectId

Role = Literal["operator", "member"]


class TenantCreate(Request):
    name: Name


class Tenant(Resource):
    object: Literal["tenant"] = "tenant"
    id: str
    name: str
    default_project: str
    created_at: Time


class KeyCreate(Request):
    name: Name = "default"
    project: ProjectId | None = None


class Key(Resource):
    """A credential. `secret` is in the answer to its creation only; the server keeps a hash."""

    object: Literal["key"] = "key"
    id: str
    name: str
    tenant: str
    project: str
    prefix: str
    secret: str | None = None
    created_at: Time
    revoked_at: Time | None = None
