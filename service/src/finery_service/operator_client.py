"""The few operator calls that `up --tenant` makes over REST, with the standard library only. Blocking."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

from finery_service.home import write_private

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # our own server: never through a proxy


class OperatorError(Exception):
    """The API refused; the message is its own."""


def status(url: str) -> int | None:
    """The status of a GET, or None when nothing answers."""
    try:
        with _OPENER.open(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def ensure_tenant(base_url: str, operator_key: str, name: str, key_file: Path) -> None:
    """See that a tenant `name` exists and that `key_file` holds a live key of it. Repeatable."""
    tenant = _find(base_url, operator_key, name)
    if tenant is None:
        tenant = _call(base_url, operator_key, "POST", "/v1/tenants", {"name": name})["id"]
    secret = key_file.read_text().strip() if key_file.exists() else ""
    if not secret or not _is_live(base_url, operator_key, tenant, secret):
        key = _call(base_url, operator_key, "POST", f"/v1/tenants/{tenant}/keys", {"name": "up"})
        write_private(key_file, key["secret"] + "\n")


def _find(base_url: str, operator_key: str, name: str) -> str | None:
    for tenant in _list(base_url, operator_key, "/v1/tenants"):
        if tenant["name"] == name:
            return str(tenant["id"])
    return None


def _is_live(base_url: str, operator_key: str, tenant: str, secret: str) -> bool:
    keys = _list(base_url, operator_key, f"/v1/tenants/{tenant}/keys")
    return any(secret.startswith(key["prefix"]) and not key.get("revoked_at") for key in keys)


def _list(base_url: str, operator_key: str, path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after = ""
    while True:
        page = _call(base_url, operator_key, "GET", f"{path}?limit=100{after}")
        found += page["data"]
        if not page["has_more"]:
            return found
        after = f"&after={quote(page['last_id'])}"


def _call(base_url: str, operator_key: str, method: str, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(  # noqa: S310 our own http URL
        base_url + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {operator_key}", "Content-Type": "application/json"},
    )
    try:
        with _OPENER.open(request, timeout=30) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:1000]
        raise OperatorError(f"{method} {path} answered {error.code}: {text}") from None
