"""The arithmetic of the benchmark and of the demo, by hand."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from finery.types.checkpoints import Checkpoint, CheckpointFile
from finery.types.jobs import Event, Job, Progress
from finery.types.usage import UsageRow

from .sizes import ROOT

NOW = datetime(2026, 1, 2, tzinfo=UTC)
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    for folder in ("bench", "examples"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module


def test_service_overhead_by_hand(load: Load) -> None:
    metrics = [
        {"step": 1, "step_seconds": 100.0, "learner_seconds": 1.0},
        {"step": 2, "step_seconds": 4.0, "learner_seconds": 3.5},
        {"step": 3, "step_seconds": 6.0, "learner_seconds": 5.75},
    ]
    assert load("service_overhead").overhead(metrics) == (0.75, 10.0)


def test_rows_are_appended_as_json(load: Load, tmp_path: Path) -> None:
    rows = load("rows")
    row = rows.Row("a", 1.0, 2.0, 0.5, "s", 3, "note")
    for _ in range(2):
        rows.append(row, tmp_path / "results.json")
    assert (
        json.loads((tmp_path / "results.json").read_text())
        == [{"name": "a", "ours": 1.0, "reference": 2.0, "ratio": 0.5, "unit": "s", "runs": 3, "note": "note"}] * 2
    )


def test_an_unknown_benchmark_is_named(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("run").main(["nothing"]) == 2
    assert "nothing" in capsys.readouterr().out


def test_turns_of_one_speaker_are_joined_and_windows_begin_with_the_user(load: Load) -> None:
    data = load("data")
    said = [("a", "Hi"), ("a", " there "), ("b", "Hello"), ("a", "1"), ("b", "2"), ("a", "3"), ("b", "4"), ("a", "5")]
    conversation = {"messages": [[{"text": text, "sender": sender}] for sender, text in said]}
    assert data.turns(conversation) == ["Hi there", "Hello", "1", "2", "3", "4", "5"]
    (row,) = data.rows(conversation)
    assert [one["role"] for one in row["messages"]] == ["user", "assistant"] * 3
    assert [one["content"] for one in row["messages"]] == ["Hi there", "Hello", "1", "2", "3", "4"]


def test_no_conversation_is_in_both_splits(load: Load) -> None:
    data = load("data")
    conversations = {
        str(n): {"messages": [[{"text": f"{n} {i}", "sender": "ab"[i % 2]}] for i in range(12)]} for n in range(20)
    }
    training, held_out = data.split(conversations, 10, 5)
    assert (len(training), len(held_out)) == (10, 5)

    def origin(row: Any) -> str:
        return str(row["messages"][0]["content"].split()[0])

    assert not {origin(row) for row in training} & {origin(row) for row in held_out}
    assert data.split(conversations, 10, 5) == (training, held_out)


class Outcome:
    """A job of two steps and two evaluations in which everything adds up."""

    def __init__(self, folder: Path) -> None:
        (folder / "a.bin").write_bytes(b"weights")
        file = CheckpointFile(path="a.bin", bytes=7, sha256=hashlib.sha256(b"weights").hexdigest())
        job = {"id": "job_1", "project": "proj_1", "method": "sft", "model": "m", "training_file": "file_1", "seed": 0}
        empty: dict[str, Any] = {"adapter": {}, "hyperparameters": {}, "resources": {}}
        progress = Progress(step=2, total_steps=2, trained_tokens=30)
        self.folder = folder
        self.job = Job.model_validate(
            {**job, **empty, "priority": "normal", "state": "succeeded", "progress": progress, "created_at": NOW}
            | {"cost": Decimal("0.5")}
        )
        self.events = [
            self.event(1, "eval", step=0, loss=3.0, tokens=7),
            self.event(2, "metric", step=1, trained_tokens=10),
            self.event(3, "metric", step=2, trained_tokens=20),
            self.event(4, "eval", step=2, loss=2.0, tokens=7),
        ]
        self.rows = [self.row("train.sft", 30, "0.4"), self.row("eval.sft", 14, "0.1")]
        self.checkpoint = Checkpoint(
            id="ckpt_1",
            job="job_1",
            project="proj_1",
            model="m",
            step=2,
            final=True,
            files=(file,),
            bytes=7,
            created_at=NOW,
        )

    def event(self, seq: int, kind: str, **content: Any) -> Event:
        return Event(job="job_1", seq=seq, type=kind, data=content, created_at=NOW)

    def row(self, sku: str, tokens: int, cost: str, provisional: int = 0) -> UsageRow:
        return UsageRow(sku=sku, quantity=tokens, billable=tokens, provisional=provisional, void=0, cost=Decimal(cost))

    def discrepancies(self, load: Load) -> list[str]:
        show, demo = load("show"), load("demo_sft")
        finished = show.Finished(self.job, self.events, self.checkpoint, self.folder, self.rows)
        found: list[str] = show.discrepancies(finished, demo.learned(finished))
        return found


def test_the_demo_finds_nothing_wrong_when_everything_adds_up(load: Load, tmp_path: Path) -> None:
    assert Outcome(tmp_path).discrepancies(load) == []


def _with_other_content(folder: Path) -> Path:
    (folder / "a.bin").write_bytes(b"changed")
    return folder


BREAK: dict[str, Callable[[Outcome], None]] = {
    "succeeded": lambda it: setattr(it, "job", it.job.model_copy(update={"state": "failed"})),
    "no gap": lambda it: it.events.__setitem__(0, it.event(2, "eval", step=0, loss=3.0, tokens=7)),
    "there once": lambda it: it.events.__setitem__(2, it.event(3, "metric", step=1, trained_tokens=20)),
    "trained tokens": lambda it: it.rows.__setitem__(0, it.row("train.sft", 29, "0.4")),
    "tokens of the evaluations": lambda it: it.rows.__setitem__(1, it.row("eval.sft", 15, "0.1")),
    "provisional": lambda it: it.rows.__setitem__(1, it.row("eval.sft", 14, "0.1", provisional=1)),
    "job's cost": lambda it: it.rows.__setitem__(0, it.row("train.sft", 30, "0.3")),
    "the final one": lambda it: setattr(it, "checkpoint", it.checkpoint.model_copy(update={"final": False})),
    "manifest": lambda it: setattr(it, "folder", _with_other_content(it.folder)),
    "loss fell": lambda it: it.events.__setitem__(3, it.event(4, "eval", step=2, loss=3.0, tokens=7)),
}


@pytest.mark.parametrize("what", sorted(BREAK))
def test_the_demo_finds_what_does_not_add_up(load: Load, tmp_path: Path, what: str) -> None:
    outcome = Outcome(tmp_path)
    BREAK[what](outcome)
    found = outcome.discrepancies(load)
    assert any(what in line for line in found), found


def finished(load: Load, *evaluations: dict[str, float]) -> Any:
    events = [Event(job="job_1", seq=n, type="eval", data=data, created_at=NOW) for n, data in enumerate(evaluations)]
    return load("show").Finished(None, events, None, None, [])


def test_the_demo_tells_whether_dpo_learned(load: Load) -> None:
    start, end = {"loss": 0.69, "accuracy": 0.5}, {"loss": 0.6, "accuracy": 0.7}
    learned = load("demo_dpo").learned
    assert all(learned(finished(load, start, end)).values())
    for wrong in ({"loss": 0.7}, {"accuracy": 0.4}):
        assert not all(learned(finished(load, start, end | wrong)).values())
    assert not all(learned(finished(load, start | {"accuracy": 0.6}, end)).values())


def test_the_demo_tells_whether_rl_learned_beyond_chance(load: Load) -> None:
    learned = load("demo_rl").learned
    start = {"pass_at_1_low": 0.0, "pass_at_1_high": 0.2}
    assert all(learned(finished(load, start, {"pass_at_1_low": 0.3, "pass_at_1_high": 0.9})).values())
    assert not all(learned(finished(load, start, {"pass_at_1_low": 0.1, "pass_at_1_high": 0.9})).values())


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('{"word": "iron"}', 1.0),
        (' {"word":"iron"}\n', 1.0),
        ('{"word": "iron", "a": 1}', 0.3),
        ("iron", 0.1),
        ("no", 0.0),
    ],
)
def test_the_demos_reward_file(load: Load, text: str, reward: float) -> None:
    parts = load("word_reward").grade({"output_text": text}, {"word": "iron"})
    assert sum(parts.values()) == pytest.approx(reward)
