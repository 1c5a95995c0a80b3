"""Free JSON of customers is shown again inside other JSON: what is taken at the door can be read in every answer.

pydantic, with which the SDK reads answers and the service rollouts, stops at 200 levels.
"""

from __future__ import annotations

from typing import Any

import pytest

from finery.data.strict_json import MAX_NESTING
from finery.types.environments import Environment
from finery.types.jobs import Job
from finery.types.pages import Page
from finery.types.rollouts import Rollout
from finery_testing.api import Api

from .environments_support import GYM, environment
from .test_api_rollouts import a_job, stored


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


async def test_what_is_nested_as_deep_as_may_be_is_shown_everywhere(api: Api) -> None:
    door = await api.tenant()
    config = {"deep": nested(MAX_NESTING - 4)}  # with config, environment, body and the field
    made = await environment(door, {**GYM, "config": config})
    job = await door.post("/v1/jobs", {"method": "rl", "model": "smollm2-135m-instruct", "environment": made["spec"]})
    assert job.status_code == 201, job.text
    environments, jobs = await door.get("/v1/environments"), await door.get("/v1/jobs")
    assert Page[Environment].model_validate_json(environments.content).data[0].spec["config"] == config
    [shown] = Page[Job].model_validate_json(jobs.content).data
    assert shown.environment is not None
    assert shown.environment["config"] == config


@pytest.mark.parametrize("levels", [MAX_NESTING, 198, 250, 980, 5000])
async def test_a_body_that_is_nested_deeper_is_refused_in_a_sentence(api: Api, levels: int) -> None:
    door = await api.tenant()
    config = '{"a":' * levels + "1" + "}" * levels
    body = f'{{"spec": {{"type": "reasoning_gym", "task": "chain_sum", "config": {config}}}}}'
    answer = await door.client.post("/v1/environments", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_json", None)
    assert "deep" in error["message"]
    assert "something else" not in error["message"]


async def test_rows_of_prompts_are_as_deep_as_rollouts_can_be_shown(api: Api) -> None:
    door = await api.tenant()
    item = {"prompt": "1 + 1", "answer": nested(MAX_NESTING - 1)}
    good = (await door.upload([item], "good.jsonl")).json()
    bad = (await door.upload([item, {**item, "answer": nested(MAX_NESTING)}], "bad.jsonl")).json()
    assert (good["status"], bad["status"]) == ("valid", "invalid")
    [error] = bad["errors"]
    assert (error["line"], error["code"]) == (2, "invalid_json")
    assert f"at most {MAX_NESTING} deep" in error["message"]
    job, attempt = await a_job(api, door)
    await stored(api, job, attempt, 1, 2, item=item)
    answer = await door.get(f"/v1/jobs/{job.id}/rollouts")
    assert [one.item for one in Page[Rollout].model_validate_json(answer.content).data] == [item, item]
