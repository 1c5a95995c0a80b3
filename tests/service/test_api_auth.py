from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from sqlmodel import select
from structlog.testing import capture_logs

from finery.types.ids import new_id
from finery_service.auth.secrets import digest, new_secret, well_formed
from finery_service.db.engine import create_engine, transaction
from finery_service.db.tables import JobRow
from finery_testing import factories
from finery_testing.api import Api


def comparable(answer: httpx.Response) -> tuple[int, bytes, dict[str, str]]:
    headers = {name: value for name, value in answer.headers.items() if name != "x-request-id"}
    return answer.status_code, answer.content, headers


def test_key_has_160_random_bits_and_a_checksum() -> None:
    secrets = {new_secret("fny") for _ in range(200)}
    assert len(secrets) == 200
    for secret in secrets:
        assert len(secret) == 4 + 32 + 6
        assert well_formed(secret.encode())
        changed = secret[:10] + ("0" if secret[10] != "0" else "1") + secret[11:]
        assert not well_formed(changed.encode()), "a typo is seen without the database"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_h14_scheme_has_no_case(api: Api, scheme: str) -> None:
    door = await api.tenant()
    secret = door.client.headers["authorization"].split()[1]
    answer = await api.client.get("/v1/jobs", headers={"authorization": f"{scheme} {secret}"})
    assert answer.status_code == 200


async def test_h14_all_wrong_keys_get_the_same_401(api: Api) -> None:
    door = await api.tenant()
    right = door.client.headers["authorization"].encode()
    unknown = f"Bearer {new_secret('fny')}".encode()
    wrong: list[list[tuple[bytes, bytes]]] = [
        [(b"authorization", unknown)],
        [(b"authorization", b"Bearer caf\xe9")],
        [(b"authorization", b"Bearer " + b"\xff" * 42)],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"")],
        [(b"authorization", b"Basic dTpw")],
        [(b"authorization", b"Bearer " + b"k" * 2**20)],
        [(b"authorization", right), (b"authorization", right)],
        [(b"authorization", right), (b"authorization", unknown)],
        [(b"authorization", right[:-1])],
        [],
    ]
    answers = [comparable(await api.client.get("/v1/jobs", headers=headers)) for headers in wrong]
    assert {answer[0] for answer in answers} == {401}
    assert all(answer == answers[0] for answer in answers)
    error = json.loads(answers[0][1])["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


async def test_malformed_key_is_refused_without_the_database(own_api: Api) -> None:
    await own_api.app.state.services.app_engine.dispose()
    object.__setattr__(own_api.app.state.services, "app_engine", None)  # any use of it would be a 500
    answer = await own_api.client.get("/v1/jobs", headers={"authorization": "Bearer fny_nonsense"})
    assert answer.status_code == 401


async def test_revoked_key_stops_working_at_once(api: Api) -> None:
    operator = await api.operator()
    tenant = (await operator.post("/v1/tenants", json={"name": "h14 a"})).json()
    key = (await operator.post(f"/v1/tenants/{tenant['id']}/keys", json={})).json()
    client = api.with_key(key["secret"])
    assert (await client.get("/v1/jobs")).status_code == 200
    revoked = await operator.delete(f"/v1/tenants/{tenant['id']}/keys/{key['id']}")
    assert revoked.json()["revoked_at"]
    assert (await client.get("/v1/jobs")).status_code == 401
    again = await operator.delete(f"/v1/tenants/{tenant['id']}/keys/{key['id']}")
    assert (again.status_code, again.json()) == (200, revoked.json())


async def test_h16_other_tenants_ids_answer_as_unknown_ids_do(api: Api) -> None:
    mine, theirs = await api.tenant("mine"), await api.tenant("theirs")
    job = (await theirs.job()).json()
    file = job["training_file"]
    pairs: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", "/v1/jobs/{}", {"id": job["id"], "noun": "job"}),
        ("GET", "/v1/jobs/{}/events", {"id": job["id"], "noun": "job"}),
        ("POST", "/v1/jobs/{}/cancel", {"id": job["id"], "noun": "job"}),
        ("GET", "/v1/files/{}", {"id": file, "noun": "file"}),
        ("GET", "/v1/usage?job={}", {"id": job["id"], "noun": "job"}),
        ("GET", "/v1/checkpoints?job={}", {"id": job["id"], "noun": "job"}),
        ("GET", "/v1/jobs?after={}", {"id": job["id"], "noun": "job"}),
        ("GET", "/v1/files?after={}", {"id": file, "noun": "file"}),
    ]
    for method, path, thing in pairs:
        unknown = new_id(thing["noun"], 1)
        theirs_answer = await mine.client.request(method, path.format(thing["id"]))
        unknown_answer = await mine.client.request(method, path.format(unknown))
        assert theirs_answer.status_code in (400, 404)
        theirs_body = theirs_answer.content.replace(thing["id"].encode(), b"ID")
        assert theirs_body == unknown_answer.content.replace(unknown.encode(), b"ID"), path
    assert (await theirs.get(f"/v1/jobs/{job['id']}")).json()["intent"] == "run", "the foreign cancel did nothing"
    refused = await mine.job(training_file=file)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "training_file")


@pytest.mark.parametrize("id_", ["job_%00", "job_%F0%9F%98%80", "..", "job_' or 1=1", "x" * 5000, "%ff", "job_\u2028"])
async def test_garbage_ids_are_unknown_ids(api: Api, id_: str) -> None:
    door = await api.tenant()
    for path in (f"/v1/jobs/{id_}", f"/v1/files/{id_}", f"/v1/models/{id_}", f"/v1/checkpoints/{id_}"):
        assert (await door.get(path)).status_code == 404, path
    answer = await door.get(f"/v1/jobs?after={id_}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


async def test_operator_and_tenant_doors_are_apart(api: Api) -> None:
    door, operator = await api.tenant(), await api.operator()
    for method, path in [
        ("POST", "/v1/tenants"),
        ("GET", "/v1/tenants"),
        ("POST", f"/v1/tenants/{door.tenant.id}/keys"),
        ("GET", f"/v1/tenants/{door.tenant.id}/keys"),
        ("DELETE", f"/v1/tenants/{door.tenant.id}/keys/key_1"),
        ("POST", "/v1/models"),
    ]:
        answer = await door.client.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "operator_key_required"), path
    for method, path in [
        ("GET", "/v1/jobs"),
        ("POST", "/v1/jobs"),
        ("POST", "/v1/files"),
        ("GET", "/v1/usage"),
        ("GET", "/v1/checkpoints"),
    ]:
        answer = await operator.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "tenant_key_required"), path
    assert (await operator.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "param"),
    [
        ("GET", "/v1/nothing", 404, "route_not_found", None),
        ("GET", "/v1/jobs/", 404, "route_not_found", None),
        ("GET", "/", 404, "route_not_found", None),
        ("DELETE", "/v1/jobs", 405, "method_not_allowed", None),
        ("GET", "/v1/jobs?limit=1000", 400, "invalid_value", "limit"),
        ("GET", "/v1/jobs?limit=x", 400, "invalid_value", "limit"),
        ("GET", "/v1/usage?group_by=hour", 400, "invalid_value", "group_by"),
        ("GET", "/v1/jobs/job_1/events?after=-1", 400, "invalid_value", "after"),
    ],
)
async def test_errors_of_the_framework_have_our_body(
    api: Api, method: str, path: str, status: int, code: str, param: str | None
) -> None:
    door = await api.tenant()
    answer = await door.client.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["message"]
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


async def test_method_not_allowed_names_all_that_are(api: Api) -> None:
    assert (await api.client.delete("/v1/jobs")).headers["allow"] == "GET, HEAD, POST"


async def test_head_answers_as_get_without_the_body(api: Api) -> None:
    door = await api.tenant()
    job = await factories.job(api.system_engine, door.tenant, now=api.clock(), state="running")
    for path in ("/livez", "/v1/jobs", f"/v1/jobs/{job.id}", "/v1/jobs/job_unknown", "/v1/nothing"):
        get, head = await door.get(path), await door.client.head(path)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        assert head.headers["content-length"] == get.headers["content-length"], path
    async with asyncio.timeout(10):  # a stream would not end
        head = await door.client.head(f"/v1/jobs/{job.id}/events", headers={"accept": "text/event-stream"})
    assert head.status_code == 200
    assert (await api.client.head("/v1/jobs")).status_code == 401
    wrong = await door.client.head(f"/v1/jobs/{job.id}/cancel")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


async def test_request_id_is_on_every_answer_and_a_sane_one_is_kept(api: Api) -> None:
    door = await api.tenant()
    for answer in [await api.client.get("/livez"), await api.client.get("/v1/jobs"), await door.get("/v1/nothing")]:
        assert answer.headers["x-request-id"].startswith("req_")
    kept = await door.get("/v1/jobs", headers={"x-request-id": "abc-1.2_3"})
    assert kept.headers["x-request-id"] == "abc-1.2_3"
    for insane in ["a b", "x" * 200, "a\tb", ""]:
        assert (await door.get("/v1/jobs", headers={"x-request-id": insane})).headers["x-request-id"].startswith("req_")


async def test_fault_of_ours_is_a_clean_500_and_the_traceback_is_logged(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = await api.tenant()

    async def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the inner secret")

    monkeypatch.setattr("finery_service.jobs.service.get", broken)
    with capture_logs() as logs:
        answer = await door.get("/v1/jobs/job_1")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "inner secret" not in answer.text
    assert answer.headers["x-request-id"]
    assert any("RuntimeError: the inner secret" in entry.get("traceback", "") for entry in logs)


async def test_database_that_is_gone_is_a_503_to_retry(own_api: Api) -> None:
    door = await own_api.tenant()
    gone = create_engine("postgresql://finery_app:x@127.0.0.1:1/none")
    object.__setattr__(own_api.app.state.services, "app_engine", gone)
    answer = await door.get("/v1/jobs")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_unavailable")
    assert answer.headers["retry-after"] == "1"
    ready = await own_api.client.get("/readyz")
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "not_ready")
    assert (await own_api.client.get("/livez")).status_code == 200


async def test_no_secret_is_logged_or_listed(api: Api) -> None:
    operator = await api.operator()
    tenant = (await operator.post("/v1/tenants", json={"name": "h14 b"})).json()
    with capture_logs() as logs:
        key = (await operator.post(f"/v1/tenants/{tenant['id']}/keys", json={"name": "laptop"})).json()
        listed = await operator.get(f"/v1/tenants/{tenant['id']}/keys")
        door, secret = api.with_key(key["secret"]), key["secret"]
        misplaced = [
            await door.post("/v1/jobs", json=body)
            for body in (
                {"method": secret},
                {"method": "sft", "training_file": secret, "adapter": {"type": secret}, secret: 1},
                {"method": "rl", "environment": secret, secret: 1},
                {"method": "rl", "environment": {"type": secret, secret: 1}},
            )
        ]
    assert key["secret"].startswith("fny_")
    assert key["prefix"] == key["secret"][:10]
    assert key["secret"] not in str(logs)
    assert listed.json()["data"][0]["secret"] is None
    for answer in misplaced:
        assert answer.status_code == 400
        values = [detail["message"] for detail in answer.json()["error"]["details"] if detail["param"] != secret]
        assert values
        assert secret not in "".join(values)
    assert digest(key["secret"]).hex() not in listed.text


async def test_row_level_security_is_on_for_the_doors(api: Api) -> None:
    await api.tenant()
    row = await factories.job(api.system_engine, (await api.tenant()).tenant, now=api.clock())
    async with transaction(api.app.state.services.app_engine, "ten_other") as session:
        assert (await session.exec(select(JobRow))).all() == []
    async with transaction(api.app.state.services.app_engine, row.tenant_id) as session:
        assert len((await session.exec(select(JobRow))).all()) == 1
