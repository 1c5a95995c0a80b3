"""Previews at the API's door and at the workers'."""

from __future__ import annotations

import json
from typing import Any

import grpc
from sqlalchemy.ext.asyncio import AsyncEngine

from finery.types.jobs import JobState
from finery_service.previews.service import MAX_PENDING
from finery_service.reconcile import loop
from finery_service.reconcile.context import Context
from finery_testing import control, factories
from finery_testing.api import Api, Door
from finery_testing.clock import FakeClock
from finery_testing.control import Worker
from finery_testing.pool import ScriptedPool
from finery_testing.reconciling import SETTINGS, lead

pytest_plugins = ("finery_testing.control_fixtures",)
ROW = {
    "line": 1,
    "tokens": [{"id": 104, "text": "h", "trained": False}, {"id": 0, "text": "\0", "trained": True}],
    "trained_tokens": 1,
}
WARNING = {"code": "tools_not_rendered", "message": "file: no.", "param": "file", "details": [{"rows": 1}]}


async def ask(door: Door, file: str | None = None, *, headers: dict[str, str] | None = None, **body: Any) -> Any:
    file = file or await door.file_id()
    return await door.post(f"/v1/files/{file}/previews", {"model": factories.MODEL_NAME, **body}, headers=headers)


async def worker_of(context: Context, channel: grpc.aio.Channel, preview: str) -> Worker:
    await loop.tick(context)
    [*_, attempt] = await control.attempts(context.engine, preview)
    worker = Worker(channel, attempt)
    await worker.begin()
    return worker


async def test_a_preview_is_asked_for_and_shown(
    own_api: Api, system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    door, context = await own_api.tenant(), await lead(system_engine, pool, clock)
    file = await door.file_id()
    answer = await ask(door, file, rows=2, max_length=64, train_on="last", truncation="drop", added_tokens=["<t>"])
    assert answer.status_code == 201, answer.text
    preview = answer.json()
    assert preview["id"].startswith("prev_")
    assert (preview["file"], preview["model"], preview["status"]) == (file, factories.MODEL_NAME, "pending")
    path = f"/v1/files/{file}/previews/{preview['id']}"
    assert (await door.get(path)).json() == preview
    await loop.tick(context)
    [attempt] = await control.attempts(system_engine, preview["id"])
    assert (attempt.kind, attempt.placements) == ("prepare", [])
    async with control.rpc(system_engine, SETTINGS, clock) as channel:
        worker = Worker(channel, attempt)
        assignment = await worker.begin()
        request, spec = json.loads(assignment.preview_json), json.loads(assignment.spec_json)
        assert (request["rows"], request["first_line"], request["max_length"]) == (2, 1, 64)
        assert spec["hyperparameters"]["max_length"] == 64
        assert (spec["hyperparameters"]["train_on"], spec["hyperparameters"]["truncation"]) == ("last", "drop")
        assert spec["added_tokens"] == ["<t>"]
        assert (assignment.training_key, spec["training_file"]) == (f"{door.tenant.id}/files/{sha(own_api)}", file)
        for _ in range(2):  # the answer to the first was lost
            await worker.previewed(json.dumps([ROW]), json.dumps([WARNING]))
    ready = (await door.get(path)).json()
    assert ready["warnings"] == [WARNING]
    shown = [token["text"] for token in ready["rows"][0]["tokens"]]
    assert (ready["status"], ready["error"], shown) == ("ready", None, ["h", "\ufffd"])
    for _ in range(2):
        await loop.tick(context)
    assert len(pool.launches) == 1, "nothing is trained"
    assert pool.workers_ == {}
    assert await control.usage(system_engine, preview["id"]) == []


async def test_a_preview_of_a_short_model_is_cut_as_its_jobs_are(
    own_api: Api, system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    door, context = await own_api.tenant(), await lead(system_engine, pool, clock)
    await control.execute(system_engine, "update models set max_length = 512 where id = :id", id=factories.MODEL_ID)
    preview = (await ask(door)).json()["id"]
    await loop.tick(context)
    [attempt] = await control.attempts(system_engine, preview)
    async with control.rpc(system_engine, SETTINGS, clock) as channel:
        assignment = await Worker(channel, attempt).begin()
    assert json.loads(assignment.preview_json)["max_length"] == 512
    assert json.loads(assignment.spec_json)["hyperparameters"]["max_length"] == 512


def sha(api: Api) -> str:
    (key,) = [key for key in api.objects() if "/files/" in key]
    return key.rpartition("/")[2]


async def test_a_preview_is_no_job(own_api: Api) -> None:
    door = await own_api.tenant()
    preview = (await ask(door)).json()["id"]
    job = (await door.job()).json()["id"]
    assert [job_["id"] for job_ in (await door.get("/v1/jobs")).json()["data"]] == [job]
    for call in ("", "/events"):
        assert (await door.get(f"/v1/jobs/{preview}{call}")).status_code == 404
    for verb in ("cancel", "pause", "resume"):
        assert (await door.post(f"/v1/jobs/{preview}/{verb}")).status_code == 404
    assert (await door.get("/v1/jobs", params={"after": preview})).status_code == 400
    assert (await door.get("/v1/checkpoints", params={"job": preview})).status_code == 404


async def test_a_preview_that_fails_says_why(
    own_api: Api, system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    door, context = await own_api.tenant(), await lead(system_engine, pool, clock)
    file = await door.file_id()
    preview = (await ask(door, file)).json()["id"]
    error = {"message": "it loops", "type": "invalid_request_error", "code": "invalid_chat_template", "param": "model"}
    async with control.rpc(system_engine, SETTINGS, clock) as channel:
        worker = await worker_of(context, channel, preview)
        await worker.finish("invalid_data", json.dumps(error))
    failed = (await door.get(f"/v1/files/{file}/previews/{preview}")).json()
    assert (failed["status"], failed["rows"]) == ("failed", [])
    assert {name: failed["error"][name] for name in error} == error


async def test_the_two_ends_of_a_preparation_are_not_taken_for_each_other(
    own_api: Api, system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    door, context = await own_api.tenant(), await lead(system_engine, pool, clock)
    preview, job = (await ask(door)).json()["id"], (await door.job()).json()["id"]
    refused = grpc.StatusCode.FAILED_PRECONDITION
    async with control.rpc(system_engine, SETTINGS, clock) as channel:
        previewing = await worker_of(context, channel, preview)
        await control.refused(previewing.prepared(), refused, "ReportPreview")
        await control.refused(previewing.finish("completed"), refused)
        for wrong in ("", "{}", '[{"line": NaN}]', '[{"tokens": []}]', '[{"line": 1, "tokens": [{"id": "x"}]}]'):
            await control.refused(previewing.previewed(wrong), grpc.StatusCode.INVALID_ARGUMENT, "rows_json")
        for wrong in ("{}", '[{"code": "x"}]'):
            await control.refused(previewing.previewed("[]", wrong), grpc.StatusCode.INVALID_ARGUMENT, "warnings_json")
        preparing = await worker_of(context, channel, job)
        await control.refused(preparing.previewed("[]"), refused, "is no preview")
    for id_ in (preview, job):
        assert (await control.job_row(system_engine, id_)).state == JobState.VALIDATING


async def test_what_cannot_be_previewed_is_refused(api: Api) -> None:
    door, other = await api.tenant(), await api.tenant("other")
    file = await door.file_id()
    bad: list[tuple[dict[str, Any], str, str]] = [
        ({"model": "no-such"}, "model_not_found", "model"),
        ({"max_length": 8193}, "max_length_too_long", "max_length"),
        ({"max_length": 1}, "invalid_value", "max_length"),
        ({"rows": 51}, "invalid_value", "rows"),
        ({"first_line": 0}, "invalid_value", "first_line"),
        ({"colour": "red"}, "unknown_field", "colour"),
    ]
    for body, code, param in bad:
        answer = await ask(door, file, **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, code, param), body
    upload = await door.upload(b"{oops\n")
    answer = await ask(door, upload.json()["id"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_file")
    assert answer.json()["error"]["details"][0]["line"] == 1
    for who, unknown in ((door, "file_0000"), (door, "a%00b"), (other, file)):
        answer = await ask(who, unknown)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "file_not_found")


async def test_a_preview_is_found_only_by_its_tenant_under_its_file(api: Api) -> None:
    door, other = await api.tenant(), await api.tenant("other")
    file, second = await door.file_id(), await door.file_id(2)
    preview = (await ask(door, file)).json()["id"]
    job = (await door.job(training_file=file)).json()["id"]
    wanted = [(door, second, preview), (door, file, job), (door, file, "prev_0000"), (other, file, preview)]
    for who, where, what in wanted:
        assert (await who.get(f"/v1/files/{where}/previews/{what}")).status_code == 404
    assert (await door.get(f"/v1/files/{file}/previews/{preview}")).status_code == 200


async def test_e01_a_repeated_preview_is_made_once(api: Api) -> None:
    door = await api.tenant()
    path, headers = f"/v1/files/{await door.file_id()}/previews", {"idempotency-key": "k1"}
    first = await door.post(path, {"model": factories.MODEL_NAME}, headers=headers)
    again = await door.post(path, {"model": factories.MODEL_NAME}, headers=headers)
    assert (again.status_code, again.json()) == (201, first.json())
    assert again.headers["idempotent-replayed"] == "true"
    other = await door.post(path, {"model": factories.MODEL_NAME, "rows": 1}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


async def test_previews_of_one_tenant_do_not_pile_up(own_api: Api, system_engine: AsyncEngine) -> None:
    door, other = await own_api.tenant(), await own_api.tenant("other")
    file = await door.file_id()
    made = [await ask(door, file, headers={"idempotency-key": f"k{n}"}) for n in range(MAX_PENDING)]
    assert {answer.status_code for answer in made} == {201}
    refused = await ask(door, file, headers={"idempotency-key": "one-more"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_previews")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert 0 < int(refused.headers["retry-after"]) <= 60
    again = await ask(door, file, headers={"idempotency-key": "k0"})
    assert again.json() == made[0].json(), "asking again makes no other one"
    assert (await ask(other)).status_code == 201
    one = "update jobs set state = 'succeeded', finished_at = created_at where id = :id"
    await control.execute(system_engine, one, id=made[0].json()["id"])
    assert (await ask(door, file, headers={"idempotency-key": "one-more"})).status_code == 201
