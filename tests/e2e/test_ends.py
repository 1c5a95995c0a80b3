"""How jobs, previews, files and checkpoints end: refused for their data, stopped early, deleted."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from finery import ConflictError, Finery, NotFoundError, PreviewFailedError
from finery.types.files import File
from finery_testing.stack import Stack
from finery_testing.tiny import CHAT_TEMPLATE

from .conftest import add_model
from .jobs import create, failed, held_out_losses, short, stream_until_step, succeeded

pytestmark = pytest.mark.e2e

LOOP = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role, please') }}{% endif %}"


def upload(client: Finery, folder: Path, *conversations: list[tuple[str, str]]) -> File:
    rows = ({"messages": [{"role": role, "content": text} for role, text in turns]} for turns in conversations)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = client.files.upload(path)
    assert file.status == "valid"
    return file


SHORT = [("user", "hi"), ("assistant", "ok")]
"""25 tokens, 3 of them trained."""
LONG = [("user", "h" * 30), ("assistant", "ok")]


class Looking:
    """A preview whose template loops, while other tests go on: it takes its time to be given up."""

    def __init__(self, client: Finery, file: File) -> None:
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._look, args=(client, file))
        self.thread.start()

    def _look(self, client: Finery, file: File) -> None:
        try:
            client.files.preview(file, model="loops", timeout=240)
        except BaseException as error:
            self.error = error


@pytest.fixture(scope="module", autouse=True)
def looping(stack: Stack, client: Finery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Looking]:
    add_model(stack, "loops", LOOP + CHAT_TEMPLATE)
    looking = Looking(client, upload(client, tmp_path_factory.mktemp("rows"), SHORT))
    yield looking
    looking.thread.join()


def test_h12_a_job_goes_by_while_the_template_of_a_preview_loops(
    client: Finery, looping: Looking, tmp_path: Path
) -> None:
    job = short(client, upload(client, tmp_path, SHORT).id)
    assert any(event.type == "prepared" for event in client.jobs.stream(job.id))  # no further than it
    assert looping.thread.is_alive()
    succeeded(client, job)


def test_a18_a_row_that_loses_its_answer_to_max_length_is_dropped_counted_and_not_billed(
    client: Finery, tmp_path: Path
) -> None:
    file = upload(client, tmp_path, SHORT, SHORT, LONG, SHORT)
    job = short(client, file.id, hyperparameters={"max_steps": None, "max_length": 25})
    job = succeeded(client, job)
    assert job.data is not None
    report = job.data.sets["train"]
    assert (report.rows, report.dropped_rows, report.dropped) == (3, 1, {"no_trainable_tokens": 1})
    assert report.dropped_lines == (3,)
    assert (job.progress.step, job.usage) == (1, {"train.sft": 9})


def test_a18_a_job_without_a_trainable_token_fails_before_an_accelerator_is_taken(
    client: Finery, tmp_path: Path
) -> None:
    job = short(client, upload(client, tmp_path, LONG, LONG).id, hyperparameters={"max_length": 25})
    error = failed(client, job)
    assert (error.code, error.param) == ("no_trainable_tokens", "training_file")
    assert client.jobs.retrieve(job.id).reason == "no_trainable_tokens"
    kinds = {event.data["kind"] for event in client.jobs.stream(job.id) if event.type == "attempt"}
    assert kinds == {"prepare"}


def test_a31_a_template_that_refuses_a_role_fails_the_job_with_its_lines(
    stack: Stack, client: Finery, tmp_path: Path
) -> None:
    add_model(stack, "strict", NO_SYSTEM + CHAT_TEMPLATE)
    file = upload(client, tmp_path, SHORT, [("system", "s"), *SHORT], SHORT, [("system", "t"), *SHORT])
    error = failed(client, short(client, file.id, model="strict"))
    assert (error.code, error.param) == ("template_error", "training_file")
    assert error.details is not None
    assert [(detail["line"], detail["code"]) for detail in error.details] == [
        (2, "template_error"),
        (4, "template_error"),
    ]
    assert "no system role, please" in error.message
    succeeded(client, short(client, file.id))  # its model's template takes them


def test_training_stops_early_where_the_held_out_loss_rises_and_marks_the_best_checkpoint(
    client: Finery, tmp_path: Path
) -> None:
    training = upload(client, tmp_path, *[[("user", "hi"), ("assistant", "a" * 20)]] * 4)
    held_out = upload(client, tmp_path, [("user", "hi"), ("assistant", "z" * 20)])
    steps, patience = 1000, 2
    job = short(
        client,
        training.id,
        validation_file=held_out.id,
        hyperparameters={
            "max_steps": steps,
            "batch_tokens": 64,
            "schedule": "constant",
            "warmup_ratio": 0.0,
            "learning_rate": 2e-2,
            "checkpoint_every": 5,
            "early_stopping_patience": patience,
        },
    )
    job = succeeded(client, job)
    assert (job.reason, job.progress.total_steps) == ("stopped_early", steps)
    losses = held_out_losses(client, job)
    assert list(losses) == list(range(0, job.progress.step + 1, 5)), "an evaluation at every checkpoint"
    best = min(losses, key=lambda step: losses[step])
    assert job.progress.step == best + 5 * patience < steps
    checkpoints = {checkpoint.step: checkpoint for checkpoint in client.checkpoints.list(job=job.id)}
    assert {step: found.validation_loss for step, found in checkpoints.items()} == {
        step: loss for step, loss in losses.items() if step
    }
    marked = [checkpoint for checkpoint in checkpoints.values() if checkpoint.best]
    assert [checkpoint.id for checkpoint in marked] == [job.best_checkpoint]
    assert marked[0].step == min(checkpoints, key=lambda step: losses[step])
    assert [step for step, checkpoint in checkpoints.items() if checkpoint.final] == [job.progress.step]
    # 21 trained tokens a row, one row of 43 an update; 21 an evaluation.
    assert job.usage == {"train.sft": 21 * job.progress.step, "eval.sft": 21 * len(losses)}
    assert job.cost == Decimal(job.usage["train.sft"]) * Decimal("0.0000004") + job.usage["eval.sft"] * Decimal(
        "0.0000001"
    )


def objects(stack: Stack, word: str) -> list[Path]:
    """Of the store, those with this in their key."""
    found = (path for path in (stack.home / "objects").rglob("*") if path.is_file())
    return [path for path in found if word in str(path)]


def test_a_file_is_deleted_when_no_job_needs_it_any_more(stack: Stack, client: Finery, tmp_path: Path) -> None:
    file = upload(client, tmp_path, SHORT, LONG)
    assert objects(stack, file.sha256)
    job = create(client, file.id, max_steps=100_000)
    stream_until_step(client, job.id, 1)
    with pytest.raises(ConflictError, match=job.id):
        client.files.delete(file.id)
    assert client.files.retrieve(file.id) == file
    client.jobs.cancel(job.id)
    client.jobs.wait(job.id, timeout=60, raise_on_failure=False)
    client.files.delete(file.id)
    for call in (client.files.retrieve, client.files.delete):
        with pytest.raises(NotFoundError):
            call(file.id)
    assert file.id not in [left.id for left in client.files.list()]
    stack.until(lambda: not objects(stack, file.sha256), 60, "its object is gone")
    assert client.jobs.retrieve(job.id).training_file == file.id, "the job's record stays"


def test_a_checkpoint_is_deleted_when_no_job_needs_it_any_more(
    stack: Stack, client: Finery, training_file: File, tmp_path: Path
) -> None:
    first = succeeded(client, short(client, training_file.id))
    (checkpoint,) = client.checkpoints.list(job=first.id)

    def stored() -> list[Path]:
        return [path for path in objects(stack, f"{first.id}/") if "/prepared/" not in str(path)]

    assert len(stored()) > len(checkpoint.files), "and what a job would resume from"
    second = short(client, training_file.id, from_checkpoint=checkpoint.id, hyperparameters={"max_steps": 100_000})
    stream_until_step(client, second.id, 1)
    with pytest.raises(ConflictError, match=second.id):
        client.checkpoints.delete(checkpoint.id)
    client.checkpoints.download(checkpoint.id, tmp_path / "kept")
    client.jobs.cancel(second.id)
    client.jobs.wait(second.id, timeout=60, raise_on_failure=False)
    # What was trained on top of it names it as its start, but stands alone.
    client.checkpoints.delete(checkpoint.id)
    with pytest.raises(NotFoundError):
        client.checkpoints.retrieve(checkpoint.id)
    assert not list(client.checkpoints.list(job=first.id))
    stack.until(lambda: not stored(), 60, "its objects are gone")


def test_h12_a_preview_whose_template_loops_is_given_up(client: Finery, looping: Looking) -> None:
    looping.thread.join()
    assert isinstance(looping.error, PreviewFailedError)
    preview = looping.error.preview
    assert preview.status == "failed"
    assert preview.error is not None
    assert preview.error.code == "invalid_chat_template"
    assert client.files.preview(preview.file, model="tiny").rows[0].trained_tokens == 3
