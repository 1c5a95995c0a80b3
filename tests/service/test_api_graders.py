"""Graders at the API's door: what cannot work is refused with its field, and who may be asked for a score."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from finery_service.settings import Settings
from finery_testing.api import Api

from .environments_support import CHECK, environment, prompts, prompts_file, refusal_of

JUDGE = "https://judge.example/v1"
KEY = "sk-a-key-of-the-operator"
SCORE: dict[str, Any] = {
    "type": "score_model",
    "base_url": JUDGE,
    "model": "judge-1",
    "input": [{"role": "user", "content": "{{ item.answer }} or {{ sample.output_text }}?"}],
}
PYTHON = {"type": "python", "source": "def grade(sample, item):\n    return 1.0\n"}


@pytest.fixture
def judged(api: Api) -> Iterator[Api]:
    """Its operator allows one model server."""
    services = api.app.state.services
    api.app.state.services = replace(services, settings=Settings(score_models={JUDGE: SecretStr(KEY)}))
    yield api
    api.app.state.services = services


def multi(formula: str, **graders: Any) -> dict[str, Any]:
    return {"type": "multi", "graders": graders or {"exact": CHECK, "words": PYTHON}, "calculate_output": formula}


@pytest.mark.parametrize(
    ("grader", "code", "param", "told"),
    [
        ({**CHECK, "reference": "{{ item.answer"}, "invalid_template", "reference", "'}}' after"),
        ({**CHECK, "input": "{{ config.key }}"}, "invalid_template", "input", "expected item"),
        ({**CHECK, "reference": "{{ sample.output_tools }}"}, "invalid_template", "reference", "sample.output_text"),
        ({**CHECK, "operation": "regex"}, "invalid_value", "operation", "'eq'"),
        ({**CHECK, "type": "magic"}, "invalid_value", "", "magic"),
        ({**CHECK, "refrence": "x"}, "unknown_field", "refrence", "reference"),
        (
            {"type": "text_similarity", "evaluation_metric": "bleu", "reference": "{{ 7 * 7 }}"},
            "invalid_template",
            "reference",
            "7 * 7",
        ),
        ({"type": "python", "source": ""}, "invalid_value", "source", "at least 1 character"),
        ({"type": "python", "source": "x = 1\n", "timeout_seconds": 0}, "invalid_value", "timeout_seconds", "0"),
        (multi("exact +"), "invalid_formula", "calculate_output", "found the end"),
        (multi("exact.__class__ + words"), "invalid_formula", "calculate_output", "'.' at character 6"),
        (multi("eval(exact) + words"), "invalid_formula", "calculate_output", "one of the functions"),
        (multi("exact + words + style"), "invalid_formula", "calculate_output", "'style'"),
        (multi("exact"), "unused_grader", "calculate_output", "0 * words"),
        (multi("bad", bad={**CHECK, "input": "{{ x }}"}), "invalid_template", "graders.bad.input", "item"),
        (multi("a", a=multi("exact", exact=CHECK)), "invalid_value", "graders.a", "multi"),
        ({**SCORE, "base_url": "https://other.example/v1"}, "score_model_not_allowed", "base_url", "other.example"),
        ({**SCORE, "base_url": f"{JUDGE}/extra"}, "score_model_not_allowed", "base_url", "operator"),
        ({**SCORE, "base_url": "https://judge.example@evil.example/v1"}, "invalid_value", "base_url", "user name"),
        ({**SCORE, "base_url": "file:///etc/passwd"}, "invalid_value", "base_url", "http or https"),
        ({**SCORE, "base_url": "http://169.254.169.254/v1"}, "score_model_not_allowed", "base_url", "operator"),
        ({**SCORE, "range": [1, 1]}, "invalid_value", "range", "a lower and a higher"),
        (
            {**SCORE, "input": [{"role": "user", "content": "{{ secret }}"}]},
            "invalid_template",
            "input[0].content",
            "item",
        ),
    ],
)
async def test_graders_that_cannot_work_are_refused_with_their_field(
    judged: Api, grader: dict[str, Any], code: str, param: str, told: str
) -> None:
    door = await judged.tenant()
    answer = await door.post("/v1/environments", {"spec": prompts("file_0000", grader)})
    error = answer.json()["error"]
    expected = f"spec.grader.{param}" if param else "spec.grader"
    assert (answer.status_code, error["code"], error["param"]) == (400, code, expected), answer.text
    assert told in error["message"]


async def test_graders_that_can_work_are_taken(judged: Api) -> None:
    door = await judged.tenant()
    file = await prompts_file(door)
    several = multi("0.5 * exact + min(words, 1) * judge", exact=CHECK, words=PYTHON, judge=SCORE)
    similar = {"type": "text_similarity", "evaluation_metric": "rouge_l", "reference": "{{ item.answer }}"}
    broken_code = {"type": "python", "source": "this is ( no python"}  # neither read nor run here
    for grader in (several, similar, broken_code):
        await environment(door, prompts(file, grader))
    spelled = await environment(door, prompts(file, {**SCORE, "base_url": "HTTPS://Judge.Example:443/v1/"}))
    assert spelled["spec"]["grader"]["base_url"] == JUDGE
    assert KEY not in (await door.get("/v1/environments")).text


async def test_without_an_operators_word_no_model_server_is_allowed(api: Api) -> None:
    door = await api.tenant()
    found = await refusal_of(door, prompts("file_0000", SCORE))
    assert found == (400, "score_model_not_allowed", "spec.grader.base_url")


def test_keys_of_model_servers_stay_in_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINERY_SCORE_MODELS", f'{{"{JUDGE}/": "{KEY}", "http://localhost:8000": null}}')
    settings = Settings()
    assert settings.score_models == {JUDGE: SecretStr(KEY), "http://localhost:8000": None}
    assert KEY not in repr(settings)
    for wrong in (f'{{"ftp://x": "{KEY}"}}', f'{{"{JUDGE}": ["{KEY}"]}}', f'["{KEY}"]'):
        monkeypatch.setenv("FINERY_SCORE_MODELS", wrong)
        with pytest.raises(ValidationError) as caught:
            Settings()
        assert KEY not in str(caught.value)
