"""Runs of environments at the API's door and at the workers'."""

from __future__ import annotations

import json
import logging
from datetime import timedelta
from typing import Any

import grpc
import pytest
from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncEngine

from finery.types.jobs import JobState
from finery_service.db.engine import transaction
from finery_service.environments.runs import MAX_PENDING
from finery_service.previews import store as previews
from finery_service.reconcile import loop
from finery_service.reconcile.context import Context
from finery_testing import control
from finery_testing.api import Api
from finery_testing.clock import FakeClock
from finery_testing.control import Worker
from finery_testing.pool import ScriptedPool
from finery_testing.reconciling import SETTINGS, a_job, audited, lead

from .environments_support import GYM, environment, prompts, prompts_file, run

pytest_plugins = ("finery_testing.control_fixtures",)
ANSWERS: list[dict[str, Any]] = [{"prompt": 1, "output_text": "2"}, {"output_text": "x"}]
GRADED: list[dict[str, Any]] = [
    {"prompt": 1, "output_text": "2", "reward": 1.0, "parts": {"string_check": 1.0}, "seconds": 0.1, "printed": "\0"},
    {
        "prompt": 0,
        "output_text": "x",
        "reward": None,
        "failure": {"code": "timeout", "message": "too slow", "grader": "words"},
        "seconds": 10.0,
    },
]
SHOWN: list[dict[str, Any]] = [{"index": 0, "text": "0 + 1", "item": {"prompt": "0 + 1", "answer": "1"}}]
REFUSED, INVALID = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT


async def worker_of(context: Context, channel: grpc.aio.Channel, job: str) -> Worker:
    await loop.tick(context)
    [*_, attempt] = await control.attempts(context.engine, job)
    worker = Worker(channel, attempt)
    await worker.begin()
    return worker


async def test_a_run_is_asked_for_graded_and_shown(
    own_api: Api, system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    door, context = await own_api.tenant(), await lead(system_engine, pool, clock)
    file, held_out = await prompts_file(door), await prompts_file(door, 2)
    made = await environment(door, prompts(file, held_out_file=held_out))
    asked = await run(door, made["id"], answers=ANSWERS, prompts=1)
    assert asked.status_code == 201, asked.text
    pending = asked.json()
    assert pending["id"].startswith("erun_")
    assert (pending["environment"], pending["status"], pending["answers"]) == (made["id"], "pending", [])
    path = f"/v1/environments/{made['id']}/runs/{pending['id']}"
    assert (await door.get(path)).json() == pending
    await loop.tick(context)
    [attempt] = await control.attempts(system_engine, pending["id"])
    assert (attempt.kind, attempt.placements) == ("prepare", [])
    async with control.rpc(system_engine, SETTINGS, clock) as channel:
        worker = Worker(channel, attempt)
        assignment = await worker.begin()
        assert json.loads(assignment.environment_json) == made["spec"]
        assert json.loads(assignment.run_json)["answers"] == [ANSWERS[0], {**ANSWERS[1], "prompt": 0}]
        assert json.loads(assignment.run_json)["prompts"] == 1
        assert (assignment.model_source_json, assignment.model_name) == ("", "")
        keys = [(await file_key(own_api, system_engine, one)) for one in (file, held_out)]
        assert [assignment.training_key, assignment.validation_key] == keys
        for _ in range(2):  # the answer to the first was lost
            await worker.graded(json.dumps(GRADED), json.dumps(SHOWN), 3)
    ready = (await door.get(path)).json()
    assert (ready["status"], ready["error"], ready["prompt_count"]) == ("ready", None, 3)
    assert ready["prompts"] == [{**SHOWN[0], "messages": []}]
    good, bad = ready["answers"]
    assert (good["reward"], good["parts"], good["printed"]) == (1.0, {"string_check": 1.0}, "\ufffd")
    assert (bad["reward"], bad["failure"]) == (None, GRADED[1]["failure"]), "a failure is not a reward of 0"
    for _ in range(2):
        await loop.tick(context)
    assert len(pool.launches) == 1, "nothing is trained"
    assert await control.usage(system_engine, pending["id"]) == []
    assert await audited(system_engine, pool) == []


async def file_key(api: Api, engine: AsyncEngine, file: str) -> str:
    async with transaction(engine) as session:
        from sqlmodel import select

        from finery_service.files.tables import FileRow

        return (await session.exec(select(FileRow.object_key).where(FileRow.id == file))).one()


async def test_a_run_is_no_job_and_no_metric(own_api: Api) -> None:
    door = await own_api.tenant()
    made = await environment(door)
    asked = (await run(door, made["id"])).json()["id"]
    assert (await door.get("/v1/jobs")).json()["data"] == []
    for call in ("", "/events", "/rollouts"):
        assert (await door.get(f"/v1/jobs/{asked}{call}")).status_code == 404
    for verb in ("cancel", "pause", "resume"):
        assert (await door.post(f"/v1/jobs/{asked}/{verb}")).status_code == 404
    assert (await door.get("/v1/checkpoints", params={"job": asked})).status_code == 404
    assert 'finery_open_jobs{state="validating"} 0.0' in (await own_api.client.get("/metrics")).text
    assert (await door.get("/v1/usage", params={"group_by": "job"})).json()["data"] == []


async def test_h05_a_run_is_found_only_under_its_environment(api: Api) -> None:
    door, other = await api.tenant(), await api.tenant("other")
    one, two, foreign = (await environment(door))["id"], (await environment(door))["id"], await environment(other)
    asked = (await run(door, one)).json()["id"]
    stranger = (await run(other, foreign["id"])).json()["id"]
    preview = await door.post(f"/v1/files/{await door.file_id()}/previews", {"model": "smollm2-135m-instruct"})
    wanted = [
        (door, two, asked),
        (door, one, stranger),
        (door, foreign["id"], stranger),
        (door, one, preview.json()["id"]),
        (door, one, "erun_0000"),
        (other, one, asked),
    ]
    for who, where, what in wanted:
        assert (await who.get(f"/v1/environments/{where}/runs/{what}")).status_code == 404, (where, what)
    assert (await door.get(f"/v1/environments/{one}/runs/{asked}")).status_code == 200
    await door.client.delete(f"/v1/environments/{one}")
    assert (await door.get(f"/v1/environments/{one}/runs/{asked}")).status_code == 404


async def test_what_cannot_be_run_is_refused(api: Api) -> None:
    door = await api.tenant()
    file = await prompts_file(door)
    gym = (await environment(door))["id"]
    made = (await environment(door, prompts(file, held_out_file=await prompts_file(door, 2))))["id"]
    bad: list[tuple[str, dict[str, Any], str, str]] = [
        (gym, {"prompts": 0}, "nothing_to_do", "answers"),
        (gym, {"prompts": 101}, "invalid_value", "prompts"),
        (gym, {"answers": [{"output_text": "x", "prompt": GYM["size"]}]}, "prompt_not_found", "answers[0].prompt"),
        (made, {"answers": [{"output_text": "x"}] * 2 + [{"output_text": "x", "prompt": 5}]}, "prompt_not_found", ""),
        (gym, {"answers": [{"prompt": 1}]}, "missing_field", "answers[0].output_text"),
        (gym, {"answers": [{"output_text": "x"}] * 101}, "invalid_value", "answers"),
        (gym, {"colour": "red"}, "unknown_field", "colour"),
    ]
    for where, body, code, param in bad:
        answer = await run(door, where, **body)
        error = answer.json()["error"]
        expected = param or "answers[2].prompt"
        assert (answer.status_code, error["code"], error["param"]) == (400, code, expected), answer.text
    assert (await run(door, made, answers=[{"output_text": "x", "prompt": 4}])).status_code == 201
    nothing = await door.client.post(f"/v1/environments/{gym}/runs")
    assert nothing.status_code == 201, "no body is that with all defaults"


async def test_a_file_stays_while_a_run_reads_it(own_api: Api, system_engine: AsyncEngine) -> None:
    door = await own_api.tenant()
    file = await prompts_file(door)
    made = (await environment(door, prompts(file)))["id"]
    asked = (await run(door, made)).json()["id"]
    await door.client.delete(f"/v1/environments/{made}")
    answer = await door.client.delete(f"/v1/files/{file}")
    assert (answer.status_code, answer.json()["error"]["details"]) == (409, [{"job": asked}])
    ended = "update jobs set state = 'succeeded', finished_at = created_at where id = :id"
    await control.execute(system_engine, ended, id=asked)
    assert (await door.client.delete(f"/v1/files/{file}")).status_code == 200


async def test_a_run_that_fails_says_why(
    own_api: Api, system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    door, context = await own_api.tenant(), await lead(system_engine, pool, clock)
    made = await environment(door)
    asked = (await run(door, made["id"])).json()["id"]
    error = {
        "message": "config: expected …",
        "type": "invalid_request_error",
        "code": "invalid_environment",
        "param": "c",
    }
    async with control.rpc(system_engine, SETTINGS, clock) as channel:
        worker = await worker_of(context, channel, asked)
        await worker.finish("invalid_environment", json.dumps(error))
    failed = (await door.get(f"/v1/environments/{made['id']}/runs/{asked}")).json()
    assert (failed["status"], failed["answers"]) == ("failed", [])
    assert {name: failed["error"][name] for name in error} == error


async def test_reports_are_held_to_what_was_asked_and_to_the_kind_of_attempt(
    own_api: Api, system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    door, context = await own_api.tenant(), await lead(system_engine, pool, clock)
    asked = (await run(door, (await environment(door))["id"], answers=ANSWERS, prompts=1)).json()["id"]
    job = (await door.job()).json()["id"]
    graded, shown = json.dumps(GRADED), json.dumps(SHOWN)
    async with control.rpc(system_engine, SETTINGS, clock) as channel:
        running = await worker_of(context, channel, asked)
        await control.refused(running.prepared(), REFUSED)
        await control.refused(running.previewed("[]"), REFUSED, "is no preview")
        await control.refused(running.finish("completed"), REFUSED)
        for wrong in (
            "{}",
            '[{"prompt": 0}]',
            graded.replace("10.0", "NaN"),
            graded.replace("10.0", "1e999"),
            graded.replace("1.0", '"high"'),
        ):
            await control.refused(running.graded(wrong, shown), INVALID, "answers_json")
        await control.refused(running.graded(json.dumps(GRADED[:1]), shown), INVALID, "answers_json: expected 2")
        await control.refused(running.graded(graded, json.dumps(SHOWN * 2)), INVALID, "prompts_json: expected at most")
        await control.refused(running.graded(graded, '[{"index": "x"}]'), INVALID, "prompts_json")
        await control.refused(running.graded(graded, shown, 0), INVALID, "prompt_count")
        preparing = await worker_of(context, channel, job)
        await control.refused(preparing.graded(graded, shown), REFUSED, "is no run")
    for id_ in (asked, job):
        assert (await control.job_row(system_engine, id_)).state == JobState.VALIDATING


async def test_e01_a_repeated_run_is_made_once(api: Api) -> None:
    door, headers = await api.tenant(), {"idempotency-key": "k1"}
    made = (await environment(door))["id"]
    first, again = [await run(door, made, headers) for _ in range(2)]
    assert (again.status_code, again.json()) == (201, first.json())
    other = await run(door, made, headers, prompts=1)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


async def test_runs_of_one_tenant_do_not_pile_up(own_api: Api, system_engine: AsyncEngine) -> None:
    door, other = await own_api.tenant(), await own_api.tenant("other")
    made = (await environment(door))["id"]
    asked = [await run(door, made) for _ in range(MAX_PENDING)]
    assert {answer.status_code for answer in asked} == {201}
    refused = await run(door, made)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_runs")
    assert 0 < int(refused.headers["retry-after"]) <= 60
    assert (await run(other, (await environment(other))["id"])).status_code == 201
    one = "update jobs set state = 'succeeded', finished_at = created_at where id = :id"
    await control.execute(system_engine, one, id=asked[0].json()["id"])
    assert (await run(door, made)).status_code == 201


async def test_old_runs_are_forgotten_with_all_that_belongs_to_them(
    own_api: Api, system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock
) -> None:
    door, context = await own_api.tenant(), await lead(system_engine, pool, clock)
    made = (await environment(door))["id"]
    asked = (await run(door, made)).json()["id"]
    async with control.rpc(system_engine, SETTINGS, clock) as channel:
        await (await worker_of(context, channel, asked)).graded(count=20)
    for _ in range(2):
        await loop.tick(context)  # the pool confirms that nothing is left
    counts = []
    for wait in (timedelta(hours=23), timedelta(hours=2)):
        clock.advance(wait.total_seconds())
        async with transaction(system_engine) as session:
            counts.append(await previews.forget(session, clock()))
    assert counts == [0, 1]
    assert (await door.get(f"/v1/environments/{made}/runs/{asked}")).status_code == 404
    assert (await control.events(system_engine, asked), await control.attempts(system_engine, asked)) == ([], [])
    assert (await door.get(f"/v1/environments/{made}")).status_code == 200


async def test_keys_of_model_servers_reach_attempts_that_ask_them_and_no_log(
    system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    context = await lead(system_engine, pool, clock)
    models = {"https://judge.example/v1": SecretStr("sk-secret"), "http://localhost:8000": None}
    context.settings = SETTINGS.model_copy(update={"score_models": models, "prepare_attempts": 5})
    judge = {"type": "score_model", "base_url": "https://judge.example/v1"}
    gone = {"type": "score_model", "base_url": "https://not.any.more/v1"}
    several = {"type": "multi", "graders": {"a": {"type": "python"}, "b": judge, "c": gone}}
    grading = {"method": "rl", "state": "validating"}
    jobs = [
        await a_job(system_engine, clock, state="validating"),
        await a_job(system_engine, clock, **grading, environment=GYM),
        await a_job(system_engine, clock, **grading, environment={"type": "prompts", "grader": {"type": "python"}}),
        await a_job(system_engine, clock, **grading, environment={"type": "prompts", "grader": judge}),
        await a_job(system_engine, clock, **grading, environment={"grader": several}, kind="run", run={"request": {}}),
    ]
    await loop.tick(context)
    given = {launch.attempt: launch.environment.get("FINERY_SCORE_MODELS") for launch in pool.launches}
    found = [given[(await control.attempts(system_engine, job.id))[0].id] for job in jobs]
    keys = '{"https://judge.example/v1": "sk-secret"}'
    assert found == [None, None, None, keys, keys], "each gets the keys that its own graders need, and no others"
    assert "sk-secret" not in repr(pool.launches) + repr(context.settings) + caplog.text
