"""One number from the shards to the bill: what is stored, reported, planned, trained and billed."""

from __future__ import annotations

from typing import Any

import pytest

from finery.types.data import DataReport
from finery_gpu_workers.data import prepared

from .conftest import MakeJob, ended, trained


def chat(n: int) -> dict[str, Any]:
    answers = [
        {"role": "assistant", "content": "ok<|im_end|>" * n},
        {"role": "assistant", "content": "é" * n, "weight": n % 2},
    ]
    questions = [{"role": "user", "content": "hi" * n}, {"role": "user", "content": "x"}]
    return {"messages": [message for turn in zip(questions, answers, strict=True) for message in turn]}


ROWS: dict[str, list[dict[str, Any]]] = {
    "chat": [chat(n) for n in range(9)],
    "text": [{"text": "ab" * n + "<|eos|>"} for n in range(9)],
    "completion": [{"prompt": "ab" * n, "completion": "c" * n + "<|eos|>" * (n % 2)} for n in range(9)],
    "tokens": [
        {"input_ids": list(range(n + 1)), "labels": [-100 if i % 2 else i for i in range(n + 1)]} for n in range(9)
    ],
}
MAX_LENGTH = {"chat": 90, "text": 12, "completion": 16, "tokens": 6}


@pytest.mark.parametrize("format_", ROWS)
@pytest.mark.parametrize(("truncation", "train_on"), [("left", "assistant"), ("right", "all"), ("drop", "assistant")])
def test_the_trained_tokens_are_the_same_from_the_shards_to_the_bill(
    make_job: MakeJob, format_: str, truncation: str, train_on: str
) -> None:
    limits = {"max_length": MAX_LENGTH[format_], "truncation": truncation}
    job = trained(make_job(ROWS[format_], train_on=train_on, epochs=2, **limits))
    assert ended(job) == "completed"
    assert job.prepared is not None
    data = prepared.load(job.store / job.prepared.prepared_prefix)
    report = DataReport.model_validate_json(job.prepared.statistics_json).sets["train"]
    stored = sum(int(data.train.row(n).mask.sum()) for n in range(len(data.train)))
    assert stored == report.trained_tokens == job.prepared.trained_tokens > 0
    assert 2 * stored == job.prepared.total_trained_tokens
    assert 2 * stored == sum(usage.quantity for step in job.steps for usage in step.usage)
    assert len(job.steps) == job.prepared.total_steps
    assert sum(each.rows for each in report.lengths) == report.rows + report.dropped_rows == len(ROWS[format_])
    assert report.dropped_rows + report.truncated_rows > 0, "some row must be too long, or the test says little"
