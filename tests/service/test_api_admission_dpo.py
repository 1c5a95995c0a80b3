"""DPO at create: which files and settings go together (B10), and what the job shows."""

from __future__ import annotations

from typing import Any

import pytest

from finery_testing import factories
from finery_testing.api import Api, Door

HYPER = "hyperparameters"


async def pairs(api: Api, door: Door) -> str:
    return (await factories.file(api.system_engine, door.tenant, now=api.clock(), format="preference")).id


async def made(api: Api, door: Door, **hyper: Any) -> Any:
    return await door.job(method="dpo", training_file=await pairs(api, door), hyperparameters=hyper)


@pytest.mark.parametrize(
    ("hyper", "param", "code", "told"),
    [
        *[
            (
                {"loss": loss, "label_smoothing": 0.1},
                "label_smoothing",
                "not_applicable",
                f"sigmoid or robust next to it, as no other smooths labels, found {loss}",
            )
            for loss in ("ipo", "hinge", "simpo", "orpo", "apo_zero", "apo_down")
        ],
        ({"loss": "robust"}, "label_smoothing", "invalid_value", "above 0, below 0.5"),
        ({"loss": "robust", "label_smoothing": 0.0}, "label_smoothing", "invalid_value", "found 0"),
        ({"label_smoothing": 0.5}, "label_smoothing", "invalid_value", "less than 0.5, found 0.5"),
        ({"label_smoothing": -0.1}, "label_smoothing", "invalid_value", "found -0.1"),
        (
            {"margin": 0.6},
            "margin",
            "not_applicable",
            "the loss simpo next to it, as no other has a margin, found sigmoid",
        ),
        ({"loss": "orpo", "sft_weight": 0.1}, "sft_weight", "not_applicable", "orpo has the likelihood"),
        ({"early_stopping_min_delta": 0.1}, "early_stopping_min_delta", "not_applicable", "early_stopping_patience"),
        ({"decay_ratio": 0.3}, "decay_ratio", "not_applicable", "the schedule wsd"),
    ],
)
async def test_b10_a_setting_that_its_loss_does_not_look_at_is_refused(
    api: Api, hyper: dict[str, Any], param: str, code: str, told: str
) -> None:
    door = await api.tenant()
    answer = await made(api, door, **hyper)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, f"{HYPER}.{param}", code), error
    assert told in error["message"]
    assert (await door.get("/v1/jobs")).json()["data"] == []


@pytest.mark.parametrize(
    ("hyper", "beta"),
    [
        ({}, 0.1),
        ({"loss": "ipo"}, 0.1),
        ({"loss": "simpo"}, 2.0),
        ({"loss": "simpo", "margin": 1.5, "beta": 2.5}, 2.5),
        ({"loss": "robust", "label_smoothing": 0.1, "beta": 0.5}, 0.5),
        ({"label_smoothing": 0.49, "sft_weight": 1.0}, 0.1),
        ({"loss": "hinge", "margin": 0.5, "label_smoothing": 0.0, "sft_weight": 0.0}, 0.1),  # defaults, as copied
        ({"loss": "orpo", "beta": None}, 0.1),
        ({"loss": "apo_down", "sft_weight": 0.2}, 0.1),
    ],
)
async def test_a_job_shows_the_beta_that_its_loss_will_have(api: Api, hyper: dict[str, Any], beta: float) -> None:
    answer = await made(api, await api.tenant(), **hyper)
    assert answer.status_code == 201, answer.text
    job = answer.json()
    assert (job["method"], job[HYPER]["beta"], job[HYPER]["loss"]) == ("dpo", beta, hyper.get("loss", "sigmoid"))
    assert (job[HYPER]["max_length"], job[HYPER]["learning_rate"]) == (2048, 5e-5)
    assert (job["environment"], job["environment_id"]) == (None, None)


@pytest.mark.parametrize(
    ("method", "format_", "expected"),
    [
        ("dpo", "chat", "a file of preference rows for method dpo, found one of chat rows, which is for method sft"),
        (
            "dpo",
            "prompts",
            "a file of preference rows for method dpo, found one of prompts rows, which is for method rl",
        ),
        (
            "sft",
            "preference",
            "a file of chat, completion, text or tokens rows for method sft, found one of preference rows, which is "
            "for method dpo",
        ),
    ],
)
async def test_rows_of_another_method_are_refused_naming_both(
    api: Api, method: str, format_: str, expected: str
) -> None:
    door = await api.tenant()
    file = await factories.file(api.system_engine, door.tenant, now=api.clock(), format=format_)
    answer = await door.job(method=method, training_file=file.id)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "wrong_task_format", "training_file")
    assert error["message"] == f"training_file: expected {expected}."


async def test_pairs_are_evaluated_on_pairs(api: Api) -> None:
    door = await api.tenant()
    training, validation, chat = await pairs(api, door), await pairs(api, door), await door.file_id()
    fields: dict[str, Any] = {"method": "dpo", "training_file": training, HYPER: {"early_stopping_patience": 2}}
    for file, status in ((None, 400), (chat, 400), (validation, 201)):
        answer = await door.job(validation_file=file, **fields)
        assert answer.status_code == status, answer.text
    assert answer.json()["validation_file"] == validation


async def test_pairs_are_previewed_as_rows_are(api: Api) -> None:
    door = await api.tenant()
    answer = await door.post(f"/v1/files/{await pairs(api, door)}/previews", {"model": factories.MODEL_NAME})
    assert (answer.status_code, answer.json()["status"]) == (201, "pending")
