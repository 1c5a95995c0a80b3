"""What the rollout engine refuses, before or instead of sampling rubbish."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.decoder import Decoder
from finery_gpu_workers.rollout.types import Group, Sampling
from finery_testing.tiny import make_tiny_model

from .test_rollout_engine import GROUPS, SAMPLING, engine, load


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


def test_a_row_longer_than_the_model_sees_is_refused_before_it_is_computed(tmp_path: Path) -> None:
    window: dict[str, Any] = {"model_type": "mistral", "sliding_window": 64, "max_position_embeddings": 64}
    model = load(make_tiny_model(tmp_path / "m", **window))
    one = engine(model)
    fits = Group(1, tuple(range(40)), (1,))
    assert len(list(one.generate([fits], Sampling(max_new_tokens=24), 0))) == 1
    spent = dataclasses.replace(one.spent)
    with pytest.raises(WorkerError, match=r"at most 64 tokens.* prompt of 40 with up to 25 new ones") as refused:
        list(one.generate([fits], Sampling(max_new_tokens=25), 0))
    assert refused.value.code == "row_too_long_for_model"
    assert one.spent == spent


WRONG: list[dict[str, Any]] = [{"max_new_tokens": 0}, {"temperature": -0.1}, {"temperature": float("nan")}]
WRONG += [{"top_p": 0.0}, {"top_p": 1.1}, {"top_k": 0}, {"min_p": -0.1}, {"min_p": 1.1}, {"stop_texts": ("a", "")}]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_settings_that_sample_nothing_are_refused(model: Decoder, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected"):
        list(engine(model).generate(GROUPS, dataclasses.replace(SAMPLING, **wrong), 0))


def test_a_prompt_without_tokens_and_no_rows_are_refused(model: Decoder) -> None:
    with pytest.raises(ValueError, match="group 4: expected a prompt of at least 1 token"):
        list(engine(model).generate([Group(4, (), (1,))], SAMPLING, 0))
    with pytest.raises(ValueError, match="max_rows: expected at least 1, found 0"):
        engine(model, max_rows=0)


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    model = load(make_tiny_model(tmp_path / "model"))
    model.norm[0] = float("nan")
    with pytest.raises(WorkerError, match="non_finite_logits"):
        list(engine(model).generate(GROUPS, SAMPLING, 0))
