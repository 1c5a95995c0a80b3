"""Every route of the OpenAPI page answers with every error that it documents and that can be provoked cheaply."""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from sqlalchemy.exc import OperationalError

from finery.data.strict_json import canonical_sha256
from finery.types.errors import ErrorBody
from finery_service.auth import caller, store
from finery_service.auth.idempotency import OPERATOR_SCOPE, Once
from finery_service.db.engine import transaction
from finery_testing.api import Api, Door

UNKNOWN = {"path": "a.bin", "name_or_id": "unknown"}
_PREFIXES = {"tenant": "ten", "checkpoint": "ckpt", "preview": "prev"}


@dataclass
class Call:
    """One operation of the page, and who may call it."""

    method: str
    template: str
    operation: dict[str, Any]
    client: httpx.AsyncClient
    other: httpx.AsyncClient
    scope: str

    @property
    def path(self) -> str:
        def unknown(match: re.Match[str]) -> str:
            noun = match[1].removesuffix("_id")
            return UNKNOWN.get(match[1], f"{_PREFIXES.get(noun, noun)}_unknown")

        return re.sub(r"\{(\w+)\}", unknown, self.template)

    @property
    def body(self) -> Any:
        """The page's example, None where there is none (or a form)."""
        content = self.operation.get("requestBody", {}).get("content", {}).get("application/json")
        return None if content is None else content["examples"]["usual"]["value"]

    async def send(self, client: httpx.AsyncClient | None = None, **arguments: Any) -> httpx.Response:
        if self.body is not None and "content" not in arguments:
            arguments["json"] = self.body
        return await (client or self.client).request(self.method, self.path, **arguments)


async def calls(api: Api, door: Door) -> Iterator[Call]:
    page = (await api.client.get("/openapi.json")).json()
    operator = await api.operator()
    found = []
    for template, operations in page["paths"].items():
        for method, operation in operations.items():
            is_operators = "operators" in str(operation.get("tags")) or (method, template) == ("post", "/v1/models")
            client, other = (operator, door.client) if is_operators else (door.client, operator)
            scope = OPERATOR_SCOPE if is_operators else door.tenant.id
            found.append(Call(method.upper(), template, operation, client, other, scope))
    return iter(found)


def check(call: Call, answer: httpx.Response, status: int, code: str | None = None) -> None:
    where = f"{call.method} {call.template}: {answer.text[:300]}"
    assert answer.status_code == status, where
    assert str(status) in call.operation["responses"], f"undocumented: {where}"
    check_body(answer, where)
    if code is not None:
        assert answer.json()["error"]["code"] == code, where


def check_body(answer: httpx.Response, where: str) -> None:
    assert answer.headers["content-type"] == "application/json", where
    assert answer.headers["x-request-id"], where
    error = ErrorBody.model_validate(answer.json()).error
    assert error.message, where
    assert {"message", "type", "code", "param"} <= set(answer.json()["error"]), where


async def on_every(
    api: Api, status: int, provoke: Callable[[Call], Awaitable[httpx.Response | None]], code: str | None = None
) -> int:
    """Provokes `status` wherever it is documented; returns how often."""
    count = 0
    for call in await calls(api, await api.tenant()):
        if str(status) in call.operation["responses"] and call.template.startswith("/v1/"):
            answer = await provoke(call)
            if answer is not None:
                check(call, answer, status, code)
                count += 1
    return count


async def test_400_for_a_parameter_that_no_route_has(api: Api) -> None:
    assert await on_every(api, 400, lambda call: call.send(params={"verbose": "1"}), "unknown_parameter") >= 25


async def test_401_without_a_key(api: Api) -> None:
    assert await on_every(api, 401, lambda call: call.send(api.client), "invalid_api_key") >= 25


async def test_403_with_the_other_kind_of_key(api: Api) -> None:
    assert await on_every(api, 403, lambda call: call.send(call.other)) >= 23


async def test_404_for_unknown_ids(api: Api) -> None:
    filters = {"/v1/usage": "job", "/v1/checkpoints": "job", "/v1/jobs": "project"}

    async def unknown(call: Call) -> httpx.Response | None:
        if "{" in call.template:
            return await call.send()
        return await call.send(params={filters[call.template]: "unknown"}) if call.template in filters else None

    assert await on_every(api, 404, unknown) >= 20


async def test_413_and_415_for_bodies(api: Api) -> None:
    async def large(call: Call) -> httpx.Response | None:
        return None if call.body is None else await call.send(content=b" " * (2**16 + 1))

    def packed(call: Call) -> Awaitable[httpx.Response]:
        return call.send(content=b"\x1f\x8b", headers={"content-encoding": "gzip"})

    assert await on_every(api, 413, large, "body_too_large") >= 6
    assert await on_every(api, 415, packed, "unsupported_content_encoding") >= 7


async def test_409_while_a_twin_runs_and_422_for_a_key_of_another_request(api: Api) -> None:
    """The request that has the key stands still inside its transaction, as the test holds it."""

    async def held(call: Call, body_sha256: str) -> httpx.Response | None:
        if call.body is None:
            return None
        once = Once(call.scope, "k", f"{call.method} {call.path}", body_sha256)
        async with transaction(api.system_engine) as session:
            assert await store.take_turn(session, once.scope, "k", once.fingerprint) == "ours"
            return await call.send(headers={"idempotency-key": "k"})

    async def twin(call: Call) -> httpx.Response | None:
        is_create = "Idempotency-Key" in [parameter["name"] for parameter in call.operation.get("parameters", [])]
        return await held(call, canonical_sha256(call.body)) if is_create else None

    assert await on_every(api, 409, twin, "request_in_progress") >= 5
    assert await on_every(api, 422, lambda call: held(call, "another"), "idempotency_key_reused") >= 5


@contextmanager
def broken(api: Api, error: Exception) -> Iterator[None]:
    def fail() -> None:
        raise error

    api.app.dependency_overrides[caller.caller] = fail
    try:
        yield
    finally:
        api.app.dependency_overrides.clear()


async def test_500_and_503_tell_nothing_of_what_broke(api: Api) -> None:
    for status, error in ((500, RuntimeError("hunter2")), (503, OperationalError("hunter2", {}, OSError("hunter2")))):

        async def fails(call: Call, error: Exception = error) -> httpx.Response:
            with broken(api, error):
                answer = await call.send()
            assert "hunter2" not in answer.text
            return answer

        assert await on_every(api, status, fails) >= 25


async def test_405_names_the_methods_of_the_path(api: Api) -> None:
    door = await api.tenant()
    methods: dict[str, set[str]] = {}
    for call in await calls(api, door):
        methods.setdefault(call.path, set()).add(call.method)
    for path, allowed in methods.items():
        allowed |= {"HEAD"} if "GET" in allowed else set()
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY"} - allowed:
            answer = await door.client.request(method, path)
            where = f"{method} {path}"
            assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed"), where
            assert set(answer.headers["allow"].split(", ")) == allowed, where
            check_body(answer, where)


async def test_unknown_paths_and_methods_answer_with_our_body_and_a_request_id(api: Api) -> None:
    door, chance = await api.tenant(), random.Random(7)
    pieces = [
        "v1",
        "v2",
        "jobs",
        "job_1",
        "files",
        "events",
        "..",
        ".",
        "",
        "%00",
        "%2F",
        "é",
        "{id}",
        "a b",
        "x" * 500,
    ]
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW", "get"]
    for _ in range(300):
        path = "/" + "/".join(chance.choice(pieces) for _ in range(chance.randint(1, 5)))
        method = chance.choice(methods)
        answer = await door.client.request(method, path)
        where = f"{method} {path}: {answer.status_code} {answer.text[:200]}"
        assert answer.status_code < 500, where
        assert answer.headers["x-request-id"], where
        if answer.status_code >= 400:
            check_body(answer, where)
