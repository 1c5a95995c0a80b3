"""What is refused at create: specs that contradict themselves, or that would silently do less than they say."""

from __future__ import annotations

from typing import Any

import pytest

from finery_testing import control, factories
from finery_testing.api import Api, Door

HYPER = "hyperparameters"
LORA: dict[str, Any] = {"type": "lora"}
FULL = {"type": "full"}


async def refused(door: Door, fields: dict[str, Any], param: str, code: str) -> str:
    answer = await door.job(**fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert (await door.get("/v1/jobs")).json()["data"] == [], "nothing was left behind"
    assert "expected" in error["message"]
    assert "found" in error["message"]
    return str(error["message"])


@pytest.mark.parametrize(
    ("fields", "param", "code", "told"),
    [
        ({"merge_checkpoint": True}, "merge_checkpoint", "nothing_to_merge", "no from_checkpoint"),
        ({"export_merged": True, "adapter": FULL}, "export_merged", "not_applicable", "nothing to merge"),
        (
            {HYPER: {"early_stopping_patience": 2}},
            "validation_file",
            "validation_file_required",
            "early_stopping_patience",
        ),
        ({HYPER: {"eval_every": 5}}, "validation_file", "validation_file_required", "eval_every"),
        (
            {HYPER: {"early_stopping_min_delta": 0.1}},
            f"{HYPER}.early_stopping_min_delta",
            "not_applicable",
            "early_stopping_patience",
        ),
        ({HYPER: {"decay_ratio": 0.3}}, f"{HYPER}.decay_ratio", "not_applicable", "found cosine"),
        (
            {HYPER: {"schedule": "wsd", "warmup_ratio": 0.8, "decay_ratio": 0.3}},
            f"{HYPER}.decay_ratio",
            "invalid_value",
            "at most 1",
        ),
        ({"added_tokens": ["<a>", "<b>", "<a>"]}, "added_tokens", "duplicate_value", "'<a>' twice"),
        (
            {"adapter": {**LORA, "targets": ["q_proj", "q_proj"]}},
            "adapter.targets",
            "duplicate_value",
            "'q_proj' twice",
        ),
        (
            {"adapter": {**LORA, "modules_to_save": ["lm_head", "lm_head"]}},
            "adapter.modules_to_save",
            "duplicate_value",
            "'lm_head' twice",
        ),
        ({"added_tokens": ["<a>"]}, "adapter.modules_to_save", "untrained_tokens", "found none"),
        (
            {"added_tokens": ["<a>"], "adapter": {**LORA, "modules_to_save": ["lm_head"]}},
            "adapter.modules_to_save",
            "untrained_tokens",
            "found lm_head",
        ),
    ],
)
async def test_a_spec_that_contradicts_itself_is_refused_by_name(
    api: Api, fields: dict[str, Any], param: str, code: str, told: str
) -> None:
    assert told in await refused(await api.tenant(), fields, param, code)


@pytest.mark.parametrize(
    "fields",
    [
        {"adapter": FULL, "added_tokens": ["<a>", "<b>"]},
        {"adapter": {**LORA, "modules_to_save": ["embed_tokens"]}, "added_tokens": ["<a>"], "export_merged": True},
        {HYPER: {"schedule": "wsd", "warmup_ratio": 0.5, "decay_ratio": 0.5}},
        {HYPER: {"schedule": "linear", "decay_ratio": 0.2}},  # the default, as a copied spec has it
        {HYPER: {"train_on": "last"}},
    ],
)
async def test_a_spec_that_makes_sense_is_taken_and_shown(api: Api, fields: dict[str, Any]) -> None:
    answer = await (await api.tenant()).job(**fields)
    assert answer.status_code == 201, answer.text
    job = answer.json()
    assert job["adapter"]["type"] == fields.get("adapter", LORA)["type"]
    assert job["added_tokens"] == fields.get("added_tokens", [])
    assert job["export_merged"] == fields.get("export_merged", False)
    assert (job["merge_checkpoint"], job["data"], job["best_checkpoint"]) == (False, None, None)


async def test_early_stopping_with_a_validation_file_is_taken(api: Api) -> None:
    door = await api.tenant()
    hyper = {"early_stopping_patience": 1, "early_stopping_min_delta": 0.5, "eval_every": 3}
    answer = await door.job(validation_file=await door.file_id(), hyperparameters=hyper)
    assert answer.status_code == 201, answer.text


@pytest.mark.parametrize(
    ("format_", "possible"),
    [
        ("chat", {"assistant", "last", "all"}),
        ("completion", {"assistant", "last", "completion", "all"}),
        ("text", {"assistant", "all"}),
    ],
)
async def test_what_rows_cannot_be_trained_on_is_refused(api: Api, format_: str, possible: set[str]) -> None:
    door = await api.tenant()
    file = await factories.file(api.system_engine, door.tenant, now=api.clock(), format=format_)
    for train_on in ("assistant", "last", "completion", "all"):
        answer = await door.job(training_file=file.id, hyperparameters={"train_on": train_on})
        if train_on in possible:
            assert answer.status_code == 201, answer.text
        else:
            error = answer.json()["error"]
            found = (answer.status_code, error["code"], error["param"])
            assert found == (400, "train_on_not_possible", "hyperparameters.train_on")
        body = {"model": factories.MODEL_NAME, "train_on": train_on}
        preview = await door.post(f"/v1/files/{file.id}/previews", body)
        if train_on in possible:
            assert preview.status_code == 201, preview.text
        else:
            error = preview.json()["error"]
            assert (preview.status_code, error["code"], error["param"]) == (400, "train_on_not_possible", "train_on")
            assert error["message"] == answer.json()["error"]["message"].removeprefix("hyperparameters.")


@pytest.mark.parametrize(("limit", "length"), [(512, 512), (2048, 2048), (8192, 2048)])
async def test_a_max_length_that_nobody_wrote_is_one_that_the_model_takes(api: Api, limit: int, length: int) -> None:
    door = await api.tenant()
    async with await api.operator() as operator:
        source = {"type": "path", "path": "/models/short"}
        model = {"name": f"takes-{limit}", "max_length": limit, "source": source}
        assert (await operator.post("/v1/models", json=model)).status_code == 201
    for given in ({}, {"epochs": 2}):
        job = await door.job(model=model["name"], hyperparameters=given)
        assert job.status_code == 201, job.text
        assert job.json()["hyperparameters"]["max_length"] == length
    if limit < 2048:
        await refused_length(door, str(model["name"]), f"at most {limit} tokens with takes-{limit}, found 2048")


async def refused_length(door: Door, model: str, said: str) -> None:
    job = await door.job(model=model, hyperparameters={"max_length": 2048})
    path = f"/v1/files/{await door.file_id()}/previews"
    preview = await door.post(path, {"model": model, "max_length": 2048})
    for answer in (job, preview):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "max_length_too_long")
        assert said in answer.json()["error"]["message"]
    assert (await door.post(path, {"model": model})).status_code == 201


async def test_a_validation_file_of_another_format_is_refused(api: Api) -> None:
    door = await api.tenant()
    chat, text = [
        (await factories.file(api.system_engine, door.tenant, now=api.clock(), format=format_)).id
        for format_ in ("chat", "text")
    ]
    fields = {"training_file": chat, "validation_file": text}
    assert "text rows" in await refused(door, fields, "validation_file", "format_mismatch")


@pytest.mark.parametrize("param", ["training_file", "validation_file"])
async def test_a_deleted_file_answers_as_an_unknown_one(api: Api, param: str) -> None:
    door = await api.tenant()
    gone = await factories.file(api.system_engine, door.tenant, now=api.clock(), deleted_at=api.clock())
    await refused(door, {param: gone.id}, param, "file_not_found")


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({"accelerator_type": "T9"}, "1 accelerator of the type 'T9' (resources.accelerator_type)"),
        ({}, "more accelerators than the pool has"),
    ],
)
async def test_a_job_that_asks_for_what_the_pool_lacks_says_what_it_is(
    api: Api, resources: dict[str, Any], said: str
) -> None:
    door = await api.tenant()
    job = (await door.job(resources=resources)).json()["id"]
    waits = "update jobs set state = 'queued', reason = 'exceeds_pool', queue_position = 1 where id = :id"
    await control.execute(api.system_engine, waits, id=job)
    found = (await door.get(f"/v1/jobs/{job}")).json()
    assert found["reason"] == "exceeds_pool"
    assert said in found["message"]
