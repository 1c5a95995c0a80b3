"""One job's life through the real system: queue, cancel, refusals, tenants, the CLI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finery import BadRequestError, ConflictError, Finery, NotFoundError, PermissionDeniedError
from finery.types.files import File
from finery_testing.stack import Stack

from .jobs import attempts, create, processes_naming, stream_until_step, verify

pytestmark = pytest.mark.e2e


def test_evaluation_before_and_after_shows_that_it_learned(
    client: Finery, training_file: File, validation_file: File
) -> None:
    job = client.jobs.create(
        method="sft",
        model="tiny",
        training_file=training_file.id,
        validation_file=validation_file.id,
        hyperparameters={"max_steps": 40, "batch_tokens": 512, "learning_rate": 1e-2, "eval_every": 20},
    )
    events = list(client.jobs.stream(job.id))
    evaluations = {event.data["step"]: event.data for event in events if event.type == "eval"}
    assert sorted(evaluations) == [0, 20, 40]
    assert evaluations[40]["loss"] < evaluations[0]["loss"]
    job = verify(client, job.id, 40)
    assert job.usage["eval.sft"] == sum(evaluation["tokens"] for evaluation in evaluations.values())


def test_a_second_job_waits_for_the_only_slot_with_a_reason(stack: Stack, client: Finery, training_file: File) -> None:
    first = create(client, training_file.id, max_steps=100_000)
    stream_until_step(client, first.id, 1)
    second = create(client, training_file.id, max_steps=5)

    def waits() -> bool:
        job = client.jobs.retrieve(second.id)
        return job.state == "queued" and job.reason == "waiting_for_capacity" and job.position == 1

    stack.until(waits, 60, "the second job is queued with reason and position")
    assert client.jobs.retrieve(second.id).message
    client.jobs.cancel(first.id)
    assert client.jobs.wait(first.id, timeout=60, raise_on_failure=False).state == "cancelled"
    verify(client, client.jobs.wait(second.id, timeout=60).id, 5)


def test_e10_cancel_publishes_what_was_done_bills_it_and_leaves_no_process(
    stack: Stack, client: Finery, training_file: File
) -> None:
    job = create(client, training_file.id, max_steps=100_000, checkpoint_every=1000)
    stream_until_step(client, job.id, 30)
    assert client.jobs.cancel(job.id).intent == "cancel"
    job = client.jobs.wait(job.id, timeout=60, raise_on_failure=False)
    assert (job.state, job.reason) == ("cancelled", "cancelled_by_customer")
    (checkpoint,) = client.checkpoints.list(job=job.id)
    (row,) = [row for row in client.usage.list(job=job.id, group_by=["sku"]) if row.sku == "train.sft"]
    assert checkpoint.step == job.progress.step >= 30
    assert row.provisional == 0
    assert row.billable == job.usage["train.sft"] > 0
    events = list(client.jobs.stream(job.id))
    assert sum(e.type == "state" and e.data["to"] in ("succeeded", "failed", "cancelled") for e in events) == 1
    training = str(attempts(client, job.id)[-1].data["attempt"])
    stack.until(lambda: not processes_naming(training), 30, "no process of the attempt is left")
    assert client.jobs.cancel(job.id).state == "cancelled", "a second cancel answers the same"


def test_cancel_after_the_end_is_refused(client: Finery, training_file: File) -> None:
    job = create(client, training_file.id, max_steps=2)
    client.jobs.wait(job.id, timeout=60)
    with pytest.raises(ConflictError) as caught:
        client.jobs.cancel(job.id)
    assert caught.value.code == "job_already_terminal"
    assert client.jobs.retrieve(job.id).state == "succeeded"


def snapshot(stack: Stack, client: Finery) -> tuple[int, int, list[str]]:
    objects = sorted(str(path) for path in (stack.home / "objects").rglob("*") if path.is_file())
    return len(list(client.jobs.list())), len(list(client.files.list())), objects


def test_bad_input_names_the_field_and_leaves_nothing_behind(
    stack: Stack, client: Finery, training_file: File, tmp_path: Path
) -> None:
    before = snapshot(stack, client)
    good: dict[str, Any] = {"method": "sft", "model": "tiny", "training_file": training_file.id}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"model": "no-such-model"}, "model"),
        ({"training_file": "file_0000"}, "training_file"),
        ({"hyperparameters": {"learning_rate": -1}}, "hyperparameters.learning_rate"),
        ({"hyperparameters": {"learning_rat": 1e-3}}, "hyperparameters.learning_rat"),
        ({"hyperparameters": {"max_length": 4096}}, "hyperparameters.max_length"),
        ({"adapter": {"type": "lora", "rank": 0}}, "adapter.rank"),
        ({"method": "sftt"}, "method"),
        ({"name": "x" * 1000}, "name"),
    ]
    for change, param in bad:
        with pytest.raises(BadRequestError) as caught:
            client.jobs.create(**{**good, **change})
        assert caught.value.param == param, (change, caught.value)
        assert caught.value.request_id
    assert snapshot(stack, client) == before


def test_a_file_with_bad_lines_is_kept_as_invalid_with_line_numbers_and_refused_by_jobs(
    client: Finery, tmp_path: Path
) -> None:
    path = tmp_path / "bad.jsonl"
    good = '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}'
    path.write_text("\n".join([good, "{oops", good, '{"messages":[{"role":"human","content":"a"}]}']) + "\n")
    file = client.files.upload(path)
    assert (file.status, file.rows) == ("invalid", 2)
    assert [(error.line, error.code) for error in file.errors] == [(2, "invalid_json"), (4, "unknown_role")]
    with pytest.raises(BadRequestError) as caught:
        client.jobs.create(method="sft", model="tiny", training_file=file.id)
    assert caught.value.param == "training_file"


def test_tenants_never_see_each_other(stack: Stack, client: Finery, training_file: File) -> None:
    job = create(client, training_file.id, max_steps=2)
    client.jobs.wait(job.id, timeout=60)
    (checkpoint,) = client.checkpoints.list(job=job.id)
    with stack.operator() as operator:
        tenant = operator.admin.tenants.create(name="other")
        secret = operator.admin.keys.create(tenant.id).secret
        with pytest.raises(PermissionDeniedError):
            operator.jobs.retrieve(job.id)
    assert secret is not None
    with stack.client(secret) as other:
        assert not list(other.jobs.list())
        assert not list(other.files.list())
        assert not list(other.checkpoints.list())
        assert not other.usage.list(group_by=["sku"])
        for call in (
            lambda: other.jobs.retrieve(job.id),
            lambda: other.jobs.cancel(job.id),
            lambda: other.jobs.events(job.id),
            lambda: other.files.retrieve(training_file.id),
            lambda: other.checkpoints.retrieve(checkpoint.id),
        ):
            with pytest.raises(NotFoundError):
                call()
        with pytest.raises(BadRequestError) as caught:
            other.jobs.create(method="sft", model="tiny", training_file=training_file.id)
        assert caught.value.param == "training_file"


def test_the_command_line_takes_a_customer_through(stack: Stack, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    good = '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}\n'
    rows.write_text(good * 8)

    def finery(*arguments: str) -> str:
        command = [str(Path(sys.executable).parent / "finery"), *arguments]
        done = subprocess.run(command, env=stack.environment(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout

    file = json.loads(finery("files", "upload", str(rows), "--json"))
    job = json.loads(
        finery("jobs", "create", "--method", "sft", "--model", "tiny", "--file", file["id"], "--set", "max_steps=3",
               "--wait", "--json")
    )  # fmt: skip
    assert (job["state"], job["progress"]["step"]) == ("succeeded", 3)
    (checkpoint,) = json.loads(finery("checkpoints", "list", "--job", job["id"], "--json"))
    finery("checkpoints", "download", checkpoint["id"], "--to", str(tmp_path / "out"))
    assert list((tmp_path / "out").rglob("adapter_model.safetensors"))
    assert "train.sft" in finery("usage", "--job", job["id"])
