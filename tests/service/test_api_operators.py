from __future__ import annotations

import asyncio
import re

import pytest

from finery_service.auth.secrets import well_formed
from finery_testing import control, factories
from finery_testing.api import Api, Door


async def test_tenant_key_and_first_request(api: Api) -> None:
    operator = await api.operator()
    tenant = (await operator.post("/v1/tenants", json={"name": "first"})).json()
    assert tenant["default_project"].startswith("proj_")
    assert tenant["id"] in [item["id"] for item in (await operator.get("/v1/tenants?limit=100")).json()["data"]]
    key = (await operator.post(f"/v1/tenants/{tenant['id']}/keys", json={})).json()
    assert well_formed(key["secret"].encode())
    assert (key["name"], key["tenant"], key["project"]) == ("default", tenant["id"], tenant["default_project"])
    assert (await api.with_key(key["secret"]).get("/v1/jobs")).json()["data"] == []
    listed = (await operator.get(f"/v1/tenants/{tenant['id']}/keys")).json()["data"]
    assert listed == [{**key, "secret": None}]


PATH = {"type": "path", "path": "/m"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/tenants", {"name": ""}, 400, "name"),
        ("/v1/tenants", {}, 400, "name"),
        ("/v1/tenants", {"name": "x", "plan": "gold"}, 400, "plan"),
        ("/v1/tenants/ten_unknown/keys", {}, 404, None),
        ("/v1/tenants/%00/keys", {}, 404, None),
        ("/v1/models", {"name": "Bad Name", "source": {"type": "path", "path": "/m"}}, 400, "name"),
        ("/v1/models", {"name": "m", "source": {"type": "path", "path": "relative"}}, 400, "source.path"),
        ("/v1/models", {"name": "m", "source": {"type": "hub", "repo": "a"}}, 400, "source.repo"),
        ("/v1/models", {"name": "m", "source": {"type": "zip"}}, 400, "source"),
        ("/v1/models", {"name": "m", "source": {"type": "s3", "url": "http://x"}}, 400, "source.url"),
        ("/v1/models", {"name": "m", "source": PATH, "parameters": 10**30}, 400, "parameters"),
        ("/v1/models", {"name": "m", "source": PATH, "max_length": 2**31}, 400, "max_length"),
    ],
)
async def test_bad_requests_name_their_field(
    api: Api, path: str, body: dict[str, object], status: int, param: str | None
) -> None:
    answer = await (await api.operator()).post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


async def test_a_key_needs_no_body_as_everything_in_it_has_a_default(api: Api) -> None:
    operator = await api.operator()
    tenant = (await operator.post("/v1/tenants", json={"name": "bodyless"})).json()
    made = await operator.post(f"/v1/tenants/{tenant['id']}/keys")
    assert (made.status_code, made.json()["name"]) == (201, "default")
    again = await operator.post(f"/v1/tenants/{tenant['id']}/keys", headers={"idempotency-key": "k"})
    same = await operator.post(f"/v1/tenants/{tenant['id']}/keys", json={}, headers={"idempotency-key": "k"})
    assert same.json()["id"] == again.json()["id"], "no body and {} are one request"
    assert (await operator.post("/v1/tenants")).status_code == 400, "a name has no default"


async def test_names_of_tenants_are_taken_once(api: Api) -> None:
    operator = await api.operator()
    answers = await asyncio.gather(*(operator.post("/v1/tenants", json={"name": "twins"}) for _ in range(5)))
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409, 409]
    refused = next(answer for answer in answers if answer.status_code == 409)
    assert (refused.json()["error"]["code"], refused.json()["error"]["param"]) == ("tenant_exists", "name")
    assert refused.headers["x-should-retry"] == "false"
    assert (await operator.post("/v1/tenants", json={"name": "Twins"})).status_code == 201


async def test_key_of_another_tenants_project_is_refused(api: Api) -> None:
    operator, other = await api.operator(), await api.tenant()
    tenant = (await operator.post("/v1/tenants", json={"name": "second"})).json()
    answer = await operator.post(f"/v1/tenants/{tenant['id']}/keys", json={"project": other.tenant.project_id})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "project")
    unknown = await operator.delete(f"/v1/tenants/{tenant['id']}/keys/key_unknown")
    assert unknown.status_code == 404


async def test_registered_model_is_found_by_name_and_id_and_its_source_stays_ours(api: Api) -> None:
    operator, door = await api.operator(), await api.tenant()
    body = {"name": "tiny", "source": {"type": "path", "path": "/secret/place"}, "max_length": 64, "parameters": 10}
    made = await operator.post("/v1/models", json=body)
    assert made.status_code == 201, made.text
    by_name = (await door.get("/v1/models/tiny")).json()
    assert by_name == (await door.get(f"/v1/models/{made.json()['id']}")).json() == made.json()
    assert (by_name["max_length"], by_name["methods"]) == (64, ["sft", "dpo", "rl"])
    shown = {sku: by_name["prices"][sku] for sku in ("train.sft", "train.dpo", "rollout.generated")}
    assert shown == {"train.sft": "0.4", "train.dpo": "0.8", "rollout.generated": "0.4"}
    assert "/secret/place" not in (await door.get("/v1/models")).text
    taken = await operator.post("/v1/models", json=body)
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "model_exists")
    too_long = await door.job(model="tiny", hyperparameters={"max_length": 65})
    assert too_long.json()["error"]["param"] == "hyperparameters.max_length"
    assert (await door.job(model="tiny", hyperparameters={"max_length": 64})).status_code == 201


async def test_ready_when_the_schema_is_the_newest(api: Api) -> None:
    assert (await api.client.get("/livez")).json() == {"status": "ok"}
    assert (await api.client.get("/readyz")).json() == {"status": "ok"}


async def test_not_ready_on_another_schema(own_api: Api, database: object) -> None:
    import psycopg

    with psycopg.connect(database.owner_dsn) as owner:  # type: ignore[attr-defined]
        owner.execute("update alembic_version set version_num = '0000'")
    answer = await own_api.client.get("/readyz")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (503, "not_ready", "server_error")
    assert "0000" in error["message"]


async def test_metrics_count_by_route_and_never_by_id(api: Api) -> None:
    door = await api.tenant()
    await door.get("/v1/jobs/job_unknown")
    text = (await api.client.get("/metrics")).text
    assert 'finery_http_requests_total{method="GET",route="/v1/jobs/{job_id}",status="404"}' in text
    assert "finery_http_request_seconds_bucket" in text
    assert "job_unknown" not in text
    assert door.tenant.id not in text


async def test_metrics_tell_open_jobs_by_state_and_how_long_the_oldest_waits(own_api: Api) -> None:
    door = await own_api.tenant()
    clock, engine = own_api.clock, own_api.system_engine
    for state in ("queued", "queued", "running", "paused", "succeeded"):
        await factories.job(engine, door.tenant, now=clock(), state=state)
    await factories.job(engine, door.tenant, now=clock(), state="validating", kind="preview")
    waiting = "update jobs set queued_at = now() - interval '90 seconds' where state = 'queued'"
    await control.execute(engine, waiting)
    text = (await own_api.client.get("/metrics")).text
    found = dict(re.findall(r'^finery_open_jobs\{state="(\w+)"\} (\S+)$', text, re.MULTILINE))
    assert found == {"validating": "0.0", "queued": "2.0", "starting": "0.0", "running": "1.0"}
    [seconds] = re.findall(r"^finery_oldest_queued_seconds (\S+)$", text, re.MULTILINE)
    assert 90 <= float(seconds) < 150


async def test_metrics_are_told_without_a_database_too(own_api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise OSError("connection refused")

    monkeypatch.setattr("finery_service.http.health.transaction", away)
    answer = await own_api.client.get("/metrics")
    assert answer.status_code == 200
    assert "finery_open_jobs{" not in answer.text
    assert "finery_oldest_queued_seconds NaN" in answer.text


async def test_every_route_of_tenants_and_operators_asks_for_a_key(api: Api) -> None:
    page = (await api.client.get("/openapi.json")).json()
    door: Door = await api.tenant()
    assert door
    for path, operations in page["paths"].items():
        for method in operations:
            if path.startswith("/v1"):
                answer = await api.client.request(method, re.sub(r"\{.*?\}", "x", path))
                assert answer.status_code == 401, (method, path)
