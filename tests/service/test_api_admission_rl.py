"""RL at create: environments, and which settings go together (C18), before any accelerator is taken."""

from __future__ import annotations

from typing import Any

import pytest

from finery_testing import control, factories
from finery_testing.api import Api, Door

HYPER = "hyperparameters"
GYM = {"type": "reasoning_gym", "task": "chain_sum", "size": 2000}
CHECK = {"type": "string_check", "operation": "eq", "reference": "{{ item.answer }}"}


async def made(door: Door, environment: Any = GYM, **fields: Any) -> Any:
    return await door.job(method="rl", environment=environment, **fields)


async def prompts(api: Api, door: Door, rows: int = 20, **values: Any) -> str:
    values = {"format": "prompts", **values}
    return (await factories.file(api.system_engine, door.tenant, now=api.clock(), rows=rows, **values)).id


def of_file(file: str, **more: Any) -> dict[str, Any]:
    return {"type": "prompts", "file": file, "grader": CHECK, **more}


EVALUATED = {"eval_prompts": 4}


@pytest.mark.parametrize(
    ("hyper", "param", "code", "told"),
    [
        (
            {"prompts_per_step": 6, "updates_per_step": 4},
            "updates_per_step",
            "invalid_value",
            "expected a divisor of prompts_per_step (6), one of 1, 2, 3, 6, found 4",
        ),
        ({"prompts_per_step": 1, "updates_per_step": 2}, "updates_per_step", "invalid_value", "one of 1, found 2"),
        (
            {"samples_per_prompt": 1},
            "samples_per_prompt",
            "invalid_value",
            "expected at least 2, as rollouts of a prompt are compared with each other, found 1",
        ),
        ({"overlong_buffer": 8}, "overlong_buffer", "not_applicable", "overlong penalize next to it"),
        (
            {"algorithm": "dapo", "overlong": "mask", "overlong_buffer": 8},
            "overlong_buffer",
            "not_applicable",
            "found mask",
        ),
        (
            {"overlong": "penalize", "overlong_buffer": 65, "max_new_tokens": 64},
            "overlong_buffer",
            "invalid_value",
            "at most max_new_tokens (64), found 65",
        ),
        ({"kl_estimator": "k1"}, "kl_estimator", "not_applicable", "kl_coefficient above 0"),
        ({"kl_placement": "reward"}, "kl_placement", "not_applicable", "kl_coefficient above 0"),
        ({"max_resampling": 4}, "max_resampling", "not_applicable", "dynamic_sampling next to it"),
        (
            {"algorithm": "dapo", "dynamic_sampling": False, "max_resampling": 4},
            "max_resampling",
            "not_applicable",
            "dynamic_sampling",
        ),
        ({"eval_samples": 4}, "eval_prompts", "eval_prompts_required", "because of hyperparameters.eval_samples"),
        ({"eval_every": 4}, "eval_prompts", "eval_prompts_required", "because of hyperparameters.eval_every"),
        (
            {"early_stopping_patience": 4},
            "eval_prompts",
            "eval_prompts_required",
            "because of hyperparameters.early_stopping_patience",
        ),
        ({"target_reward": 0.0}, "eval_prompts", "eval_prompts_required", "because of hyperparameters.target_reward"),
        ({"pass_threshold": 0.5}, "eval_prompts", "eval_prompts_required", "because of hyperparameters.pass_threshold"),
        ({**EVALUATED, "pass_threshold": 0.5}, "pass_threshold", "not_applicable", "eval_samples above 0 next to it"),
        ({**EVALUATED, "early_stopping_min_delta": 0.1}, "early_stopping_min_delta", "not_applicable", "patience"),
        ({"stop": ["\n", "a", "\n"]}, "stop", "duplicate_value", "twice"),
        (
            {"max_prompt_tokens": 8000, "max_new_tokens": 193},
            "max_prompt_tokens",
            "max_length_too_long",
            "max_prompt_tokens + max_new_tokens of at most 8192, which smollm2-135m-instruct takes, found 8000 + 193",
        ),
        ({"max_new_tokens": 8192}, "max_new_tokens", "max_length_too_long", "found 1 + 8192"),
        (
            {"prompts_per_step": 1024, "samples_per_prompt": 513},
            "prompts_per_step",
            "invalid_value",
            "expected prompts_per_step × samples_per_prompt × rounds × max_new_tokens of at most 134217728 tokens, "
            f"which are held together, found {1024 * 513 * 256}",
        ),
        (
            {"prompts_per_step": 256, "samples_per_prompt": 513, "dynamic_sampling": True},
            "prompts_per_step",
            "invalid_value",
            f"found {256 * 513 * 4 * 256}",
        ),
        (
            {"eval_prompts": 2048, "eval_samples": 256},
            "eval_prompts",
            "invalid_value",
            "eval_prompts × (1 + eval_samples) × max_new_tokens of at most 134217728 tokens, which are held together, "
            f"found {2048 * 257 * 256}",
        ),
        ({"decay_ratio": 0.3}, "decay_ratio", "not_applicable", "found constant"),
    ],
)
async def test_c18_settings_that_contradict_each_other_are_refused_with_what_is_possible(
    api: Api, hyper: dict[str, Any], param: str, code: str, told: str
) -> None:
    door = await api.tenant()
    answer = await made(door, hyperparameters=hyper)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, f"{HYPER}.{param}", code), error
    assert told in error["message"]
    assert (await door.get("/v1/jobs")).json()["data"] == []


OPEN = ("advantage_scale", "loss_normalization", "clip_low", "clip_high", "dynamic_sampling", "overlong")


@pytest.mark.parametrize(
    ("hyper", "expected"),
    [
        ({}, ("group", "sequence", 0.2, 0.2, False, "keep")),
        ({"algorithm": "dr_grpo"}, ("none", "constant", 0.2, 0.2, False, "keep")),
        ({"algorithm": "dapo"}, ("group", "token", 0.2, 0.28, True, "penalize")),
        ({"algorithm": "gspo"}, ("group", "sequence", 3e-4, 4e-4, False, "keep")),
        ({"algorithm": "dapo", "clip_high": 0.3, "overlong": "keep"}, ("group", "token", 0.2, 0.3, True, "keep")),
        ({"dynamic_sampling": True, "max_resampling": 4}, ("group", "sequence", 0.2, 0.2, True, "keep")),
        ({"algorithm": "dapo", "max_resampling": 16}, ("group", "token", 0.2, 0.28, True, "penalize")),
    ],
)
async def test_a_job_shows_what_its_algorithm_sets(api: Api, hyper: dict[str, Any], expected: tuple[Any, ...]) -> None:
    answer = await made(await api.tenant(), hyperparameters=hyper)
    assert answer.status_code == 201, answer.text
    shown = answer.json()[HYPER]
    assert tuple(shown[name] for name in OPEN) == expected
    assert shown["overlong_buffer"] == (64 if expected[-1] == "penalize" else None), "a quarter of max_new_tokens"


@pytest.mark.parametrize(
    "hyper",
    [
        {"updates_per_step": 4, "prompts_per_step": 8},
        {"kl_coefficient": 0.05, "kl_estimator": "k1", "kl_placement": "reward"},
        {"kl_estimator": "k3", "kl_placement": "loss", "max_resampling": 3, "pass_threshold": 1.0},  # defaults
        {"overlong": "penalize", "overlong_buffer": 256},
        {"prompts_per_step": 1024, "samples_per_prompt": 512},  # 2^27 tokens
        {**EVALUATED, "eval_samples": 8, "pass_threshold": 0.5, "eval_every": 5, "target_reward": 0.9},
        {**EVALUATED, "early_stopping_patience": 2, "early_stopping_min_delta": 0.01},
        {"max_prompt_tokens": 7936, "max_new_tokens": 256},
    ],
)
async def test_settings_that_make_sense_are_taken(api: Api, hyper: dict[str, Any]) -> None:
    answer = await made(await api.tenant(), hyperparameters=hyper)
    assert answer.status_code == 201, answer.text
    assert answer.json()[HYPER].items() >= hyper.items()


@pytest.mark.parametrize(
    ("limit", "given", "lengths"),
    [
        (8192, {}, (1024, 256)),
        (1024, {}, (768, 256)),
        (128, {}, (64, 64)),
        (512, {"max_new_tokens": 500}, (12, 500)),
        (512, {"max_prompt_tokens": 300}, (300, 212)),
        (300, {"max_prompt_tokens": 40, "max_new_tokens": 260}, (40, 260)),
    ],
)
async def test_lengths_that_nobody_wrote_are_ones_that_the_model_takes(
    api: Api, limit: int, given: dict[str, int], lengths: tuple[int, int]
) -> None:
    door, name = await api.tenant(), f"rl-{limit}-{len(given)}-{sum(given.values())}"
    async with await api.operator() as operator:
        model = {"name": name, "max_length": limit, "source": {"type": "path", "path": "/models/short"}}
        assert (await operator.post("/v1/models", json=model)).status_code == 201
    answer = await made(door, model=name, hyperparameters=given)
    assert answer.status_code == 201, answer.text
    shown = answer.json()[HYPER]
    assert (shown["max_prompt_tokens"], shown["max_new_tokens"]) == lengths


async def test_an_environment_comes_with_the_job_or_by_its_id(api: Api) -> None:
    door = await api.tenant()
    file, held_out = await prompts(api, door), await prompts(api, door, rows=5)
    spec = of_file(file, held_out_file=held_out)
    created = await door.post("/v1/environments", {"spec": spec})
    assert created.status_code == 201, created.text
    hyper = {"eval_prompts": 5}
    by_id = (await made(door, created.json()["id"], hyperparameters=hyper)).json()
    inline = (await made(door, spec, hyperparameters=hyper)).json()
    for job, id_ in ((by_id, created.json()["id"]), (inline, None)):
        assert job["environment"] == created.json()["spec"], job
        assert (job["environment_id"], job["training_file"], job["validation_file"]) == (id_, file, held_out)
    gym = (await made(door)).json()
    assert (gym["training_file"], gym["validation_file"], gym["environment_id"]) == (None, None, None)
    told = {name: gym["environment"][name] for name in ("task", "size", "seed")}
    assert told == {"task": "chain_sum", "size": 2000, "seed": 0}, "defaults are told"
    listed = (await door.get("/v1/jobs?method=rl&method=dpo")).json()["data"]
    assert {job["id"] for job in listed} == {gym["id"], inline["id"], by_id["id"]}
    row = await control.job_row(api.system_engine, by_id["id"])
    assert row.spec["environment"] == row.environment_id, "as it was asked for"


async def test_environments_that_cannot_be_had_are_told_alike(api: Api) -> None:
    door, stranger = await api.tenant(), await api.tenant()
    id_ = (await door.post("/v1/environments", {"spec": GYM})).json()["id"]
    gone = (await door.post("/v1/environments", {"spec": GYM})).json()["id"]
    assert (await door.client.delete(f"/v1/environments/{gone}")).status_code == 200
    for answer in (await made(stranger, id_), await made(door, gone), await made(door, "env_unknown")):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "environment_not_found", "environment")


async def test_an_environment_that_came_with_the_job_is_checked_as_one_that_is_kept(api: Api) -> None:
    door = await api.tenant()
    chat, file = await door.file_id(), await prompts(api, door)
    grader = {"type": "multi", "graders": {"a": CHECK}, "calculate_output": "a + b"}
    cases = [
        ({"type": "reasoning_gym", "task": "chain_summ"}, "environment.task", "unknown_task"),
        (of_file(chat), "environment.file", "wrong_task_format"),
        (of_file("file_unknown"), "environment.file", "file_not_found"),
        (of_file(file, grader=grader), "environment.grader.calculate_output", "invalid_formula"),
        (of_file(file, held_out_file=file), "environment.held_out_file", "not_applicable"),
    ]
    for environment, param, code in cases:
        error = (await made(door, environment)).json()["error"]
        assert (error["param"], error["code"]) == (param, code), error
    assert (await door.get("/v1/jobs")).json()["data"] == []


@pytest.mark.parametrize(
    ("rows", "held_out", "count", "told"),
    [
        (20, None, 19, None),
        (20, None, 20, "fewer than the file's 20 rows"),
        (20, 5, 5, None),
        (20, 5, 6, "at most the 5 rows of the file that is held out"),
        (1, 5, 5, None),
    ],
)
async def test_there_are_as_many_prompts_as_are_held_out(
    api: Api, rows: int, held_out: int | None, count: int, told: str | None
) -> None:
    door = await api.tenant()
    more = {"held_out_file": await prompts(api, door, held_out)} if held_out else {}
    spec, hyper = of_file(await prompts(api, door, rows), **more), {"eval_prompts": count, "prompts_per_step": 1}
    answer = await made(door, spec, hyperparameters=hyper)
    if told is None:
        assert answer.status_code == 201, answer.text
    else:
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, f"{HYPER}.eval_prompts")
        assert told in error["message"]


@pytest.mark.parametrize(("held_out", "left"), [(None, 8), (5, 10)])
async def test_a_step_has_no_prompt_twice(api: Api, held_out: int | None, left: int) -> None:
    door = await api.tenant()
    more = {"held_out_file": await prompts(api, door, held_out)} if held_out else {}
    spec = of_file(await prompts(api, door, rows=10), **more)
    assert (await made(door, spec, hyperparameters={"eval_prompts": 2, "prompts_per_step": left})).status_code == 201
    answer = await made(door, spec, hyperparameters={"eval_prompts": 2, "prompts_per_step": left + 1})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, f"{HYPER}.prompts_per_step")
    assert f"at most {left}, the prompts that there are to train on" in error["message"]
    gym = {"type": "reasoning_gym", "task": "chain_sum", "size": 3}
    assert (await made(door, gym, hyperparameters={"prompts_per_step": 4})).status_code == 400


async def test_prompts_are_no_training_file_and_no_preview(api: Api) -> None:
    door = await api.tenant()
    answer = await door.job(training_file=await prompts(api, door))
    assert "found one of prompts rows, which is for method rl" in answer.json()["error"]["message"]


async def test_samplers_of_their_own_are_not_there_yet_and_none_may_be_said(api: Api) -> None:
    door = await api.tenant()
    none = await made(door, resources={"samplers": {"min": 0, "max": 0}})
    assert (none.status_code, none.json()["resources"]["samplers"]) == (201, {"min": 0, "max": 0})
    error = (await made(door, resources={"samplers": {"max": 2}})).json()["error"]
    assert (error["param"], error["code"]) == ("resources.samplers.max", "not_available")
    assert "expected 0, as more is not available yet, found 2" in error["message"]
