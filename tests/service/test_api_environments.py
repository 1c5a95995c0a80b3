"""Environments at the API's door: what is kept, what is refused, whose they are."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from finery_service.environments import patterns, service
from finery_service.environments.tasks import TASKS
from finery_testing import factories
from finery_testing.api import Api, Door

from .environments_support import CHECK, GYM, environment, prompts, prompts_file, refusal_of
from .test_api_files_delete import waiting_for_a_lock


async def test_an_environment_is_kept_shown_and_listed(api: Api) -> None:
    door = await api.tenant()
    file, held_out = await prompts_file(door), await prompts_file(door, 2)
    api.clock.advance(1)
    made = await environment(door, prompts(file, held_out_file=held_out), name="sums")
    assert made["id"].startswith("env_")
    assert (made["object"], made["name"], made["project"]) == ("environment", "sums", door.tenant.project_id)
    assert (made["type"], made["spec"]["file"], made["spec"]["held_out_file"]) == ("prompts", file, held_out)
    assert made["spec"]["grader"] == {**CHECK, "name": "string_check", "input": "{{ sample.output_text }}"}
    api.clock.advance(1)
    gym = await environment(door)
    assert gym["spec"] == {**GYM, "config": {}, "seed": 0, "system_prompt": None, "answer_pattern": None}
    assert (await door.get(f"/v1/environments/{made['id']}")).json() == made
    page = (await door.get("/v1/environments", params={"limit": 1})).json()
    assert (page["data"], page["has_more"]) == ([gym], True)
    rest = (await door.get("/v1/environments", params={"limit": 1, "after": page["last_id"]})).json()
    assert (rest["data"], rest["has_more"]) == ([made], False)


async def test_lists_keep_to_a_project(api: Api) -> None:
    door, other = await api.tenant(), await api.tenant("other")
    made = await environment(door, project=door.tenant.project_id)
    own = await door.get("/v1/environments", params={"project": door.tenant.project_id})
    assert [one["id"] for one in own.json()["data"]] == [made["id"]]
    for project in (other.tenant.project_id, "proj_0000", "nonsense"):
        answer = await door.get("/v1/environments", params={"project": project})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "project_not_found")
    assert await refusal_of(door, GYM, project=other.tenant.project_id) == (400, "project_not_found", "project")
    assert (await other.get("/v1/environments", params={"after": made["id"]})).status_code == 400


async def test_h16_another_tenants_environment_is_as_unknown_as_none(api: Api) -> None:
    door, other = await api.tenant(), await api.tenant("other")
    foreign, unknown = (await environment(door))["id"], (await environment(door))["id"]
    run = (await door.post(f"/v1/environments/{foreign}/runs", {})).json()["id"]
    assert (await door.client.delete(f"/v1/environments/{unknown}")).status_code == 200

    async def asked(id_: str, door: Door) -> list[tuple[int, str, list[str]]]:
        path = f"/v1/environments/{id_}"
        answers = [
            await door.get(path),
            await door.client.delete(path),
            await door.post(f"{path}/runs", {}),
            await door.get(f"{path}/runs/{run}"),
        ]
        return [(one.status_code, one.text.replace(id_, "ID"), sorted(one.headers)) for one in answers]

    found = await asked(foreign, other)
    assert found == await asked("env_" + "0" * 36, other) == await asked(unknown, door)
    assert {status for status, _, _ in found} == {404}
    assert (await door.get(f"/v1/environments/{foreign}/runs/{run}")).status_code == 200
    for odd in ("env_%00", "nonsense", "env_" + "x" * 100):
        assert (await door.get(f"/v1/environments/{odd}")).status_code == 404


async def test_a_deleted_environment_is_gone_and_frees_its_files(api: Api) -> None:
    door = await api.tenant()
    file, held_out = await prompts_file(door), await prompts_file(door, 2)
    made = await environment(door, prompts(file, held_out_file=held_out))
    for id_ in (file, held_out):
        answer = await door.client.delete(f"/v1/files/{id_}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "file_in_use")
        assert made["id"] in answer.json()["error"]["message"]
        assert answer.json()["error"]["details"] == [{"environment": made["id"]}]
    gone = await door.client.delete(f"/v1/environments/{made['id']}")
    assert gone.json() == {"object": "environment", "id": made["id"], "deleted": True}
    assert (await door.client.delete(f"/v1/environments/{made['id']}")).status_code == 404
    assert (await door.get("/v1/environments")).json()["data"] == []
    for id_ in (file, held_out):
        assert (await door.client.delete(f"/v1/files/{id_}")).status_code == 200


async def test_a_file_is_not_deleted_while_an_environment_with_it_is_being_created(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = await api.tenant()
    file = await prompts_file(door)
    holds, goes_on, check = asyncio.Event(), asyncio.Event(), service.check

    async def slowly(*arguments: Any) -> None:
        await check(*arguments)
        holds.set()
        await goes_on.wait()

    monkeypatch.setattr(service, "check", slowly)
    creating = asyncio.create_task(environment(door, prompts(file)))
    await holds.wait()
    deleting = asyncio.create_task(door.client.delete(f"/v1/files/{file}"))
    await waiting_for_a_lock(api)
    goes_on.set()
    made, refused = await creating, await deleting
    assert (refused.status_code, refused.json()["error"]["details"]) == (409, [{"environment": made["id"]}])


async def test_e01_a_repeated_environment_is_made_once(api: Api) -> None:
    door, headers = await api.tenant(), {"idempotency-key": "k1"}
    first = await door.post("/v1/environments", {"spec": GYM}, headers=headers)
    again = await door.post("/v1/environments", {"spec": GYM}, headers=headers)
    assert (again.status_code, again.json(), again.headers["idempotent-replayed"]) == (201, first.json(), "true")
    other = await door.post("/v1/environments", {"spec": GYM, "name": "x"}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert len((await door.get("/v1/environments")).json()["data"]) == 1


async def test_files_must_be_the_tenants_valid_and_hold_prompts(api: Api) -> None:
    door, other = await api.tenant(), await api.tenant("other")
    good, chat, foreign = await prompts_file(door), await door.file_id(), await prompts_file(other)
    broken = (await door.upload(b"{oops\n")).json()["id"]
    gone = await prompts_file(door, 4)
    await door.client.delete(f"/v1/files/{gone}")
    for id_ in (foreign, gone, "file_0000"):
        assert await refusal_of(door, prompts(id_)) == (400, "file_not_found", "spec.file")
        held_out = prompts(good, held_out_file=id_)
        assert await refusal_of(door, held_out) == (400, "file_not_found", "spec.held_out_file")
    twin = prompts(good, held_out_file=await prompts_file(door))
    assert await refusal_of(door, twin) == (400, "held_out_is_trained_on", "spec.held_out_file")
    assert await refusal_of(door, prompts(broken)) == (400, "invalid_file", "spec.file")
    answer = await door.post("/v1/environments", {"spec": prompts(good, held_out_file=chat)})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "wrong_task_format", "spec.held_out_file")
    assert "a file of prompts rows" in error["message"]
    assert "one of chat rows" in error["message"]


@pytest.mark.parametrize(
    ("change", "code", "param", "told"),
    [
        ({"task": "chain_sums"}, "unknown_task", "task", "did you mean chain_sum?"),
        ({"task": "zzzzzz"}, "unknown_task", "task", "'zzzzzz'."),
        ({"task": "../x"}, "invalid_value", "task", "matches"),
        ({"answer_pattern": "("}, "invalid_regex", "answer_pattern", "missing ), unterminated subpattern"),
        ({"answer_pattern": "(?P<x>a)(?P<x>b)"}, "invalid_regex", "answer_pattern", "redefinition"),
        ({"answer_pattern": "a" * 513}, "invalid_value", "answer_pattern", "at most 512 characters"),
        ({"size": 0}, "invalid_value", "size", "0"),
        ({"seed": -1}, "invalid_value", "seed", "-1"),
        ({"config": [1]}, "invalid_value", "config", "an object"),
    ],
)
async def test_h11_tasks_and_patterns_are_looked_at(
    api: Api, change: dict[str, Any], code: str, param: str, told: str
) -> None:
    door = await api.tenant()
    answer = await door.post("/v1/environments", {"spec": {**GYM, **change}})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, f"spec.{param}"), answer.text
    assert told in error["message"]


async def test_h11_patterns_that_search_for_ever_are_kept_and_never_searched_with_here(api: Api) -> None:
    door = await api.tenant()
    for pattern in (r"(a+)+$", r"(a|aa)+$", r"\\boxed\{(\d+)\}"):
        await environment(door, {**GYM, "answer_pattern": pattern})


@pytest.mark.parametrize("child", ["while True: pass", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
async def test_h11_a_pattern_that_does_not_come_to_an_end_is_refused_and_its_process_ends(
    api: Api, monkeypatch: pytest.MonkeyPatch, child: str
) -> None:
    """No pattern is known that `re` compiles slowly: another program stands in for one."""
    monkeypatch.setattr(patterns, "_CHILD", child)
    monkeypatch.setattr(patterns, "SECONDS", 0.5)
    children: list[asyncio.subprocess.Process] = []
    spawn = asyncio.create_subprocess_exec

    async def watched(*command: Any, **arguments: Any) -> asyncio.subprocess.Process:
        children.append(await spawn(*command, **arguments))
        return children[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", watched)
    found = await refusal_of(await api.tenant(), {**GYM, "answer_pattern": "a"})
    assert found == (400, "invalid_regex", "spec.answer_pattern")
    assert [one.returncode for one in children] == [-signal.SIGKILL]


async def test_h11_a_pattern_of_megabytes_is_refused(api: Api) -> None:
    door = await api.tenant()
    answer = await door.post("/v1/environments", {"spec": {**GYM, "answer_pattern": "a" * 10_000_000}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_the_names_of_tasks_are_those_of_the_package() -> None:
    factory = pytest.importorskip("reasoning_gym.factory")
    assert set(factory.DATASETS) == TASKS


async def test_the_cursor_of_another_list_is_refused(api: Api) -> None:
    door = await api.tenant()
    job = await factories.job(api.system_engine, door.tenant, now=api.clock())
    for after in (job.id, "env_0000", "x"):
        answer = await door.get("/v1/environments", params={"after": after})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_cursor")
