"""Retries, lease, fence, outbox. Servers are real; times are short."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from finery.types.errors import ErrorDetail
from finery.types.jobs import Intent
from finery.types.previews import PreviewRow, PreviewToken
from finery.types.reasons import JobReason
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.outbox import Outbox
from finery_gpu_workers.report import CallError, ControlPlane, FencedError
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.control_plane import FakeControlPlane

from .conftest import MakeJob

Connect = Callable[..., ControlPlane]


@pytest.fixture
def fake(make_job: MakeJob) -> FakeControlPlane:
    control = make_job()
    control.prepared = pb.ReportPreparedRequest(total_steps=100)
    return control


class Death:
    """Stands in for the end of the process."""

    def __init__(self) -> None:
        self.why: str | None = None
        self.at = 0.0
        self.happened = threading.Event()

    def __call__(self, why: str) -> None:
        self.why, self.at = why, time.monotonic()
        self.happened.set()


@pytest.fixture
def death() -> Death:
    return Death()


@pytest.fixture
def connect(fake: FakeControlPlane, death: Death) -> Iterator[Connect]:
    made: list[ControlPlane] = []

    def make(
        lease: float = 60.0,
        token: str | None = None,
        kind: pb.AttemptKind.ValueType = pb.ATTEMPT_KIND_TRAIN,
    ) -> ControlPlane:
        fake.lease_seconds = lease
        e = fake.attempt(kind)
        token = token or e["FINERY_ATTEMPT_TOKEN"]
        made.append(
            ControlPlane(e["FINERY_RPC_ADDRESS"], e["FINERY_ATTEMPT_ID"], int(e["FINERY_FENCE"]), token, die=death)
        )
        return made[-1]

    yield make
    for control in made:
        control.close()


def failing(code: grpc.StatusCode, call: str, times: int) -> Callable[[str, Any], grpc.StatusCode | None]:
    left = iter(range(times))
    return lambda name, _request: code if name == call and next(left, None) is not None else None


def steps(first: int, last: int) -> list[pb.Step]:
    return [pb.Step(step=n) for n in range(first, last + 1)]


def test_begin_brings_the_assignment_and_the_orders(fake: FakeControlPlane, connect: Connect) -> None:
    control = connect()
    assignment = control.begin("0.1.0")
    assert (assignment.job_id, assignment.model_name) == ("job_test", "tiny")
    assert control.intent is Intent.RUN
    assert control.wait_for_grant(fake.grant_steps, lambda: False) is Intent.RUN


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_what_may_pass_is_tried_again(fake: FakeControlPlane, connect: Connect, code: grpc.StatusCode) -> None:
    control = connect()
    fake.hook = failing(code, "Begin", 2)
    control.begin("0.1.0")
    fake.hook = failing(code, "CommitSteps", 3)
    control.commit(steps(1, 1))
    assert [step.step for step in fake.steps] == [1]


def test_a_server_that_is_restarted_within_the_lease_is_found_again(fake: FakeControlPlane, connect: Connect) -> None:
    control = connect()
    control.begin("0.1.0")
    fake.restart(down_seconds=0.5)
    control.commit(steps(1, 1))
    assert [step.step for step in fake.steps] == [1]


def test_a_refusal_for_good_is_not_tried_again(fake: FakeControlPlane, connect: Connect) -> None:
    control = connect(token="wrong")
    with pytest.raises(CallError, match="UNAUTHENTICATED"):
        control.begin("0.1.0")
    assert fake.calls == ["Begin"]
    fake.refused.clear()


def test_aborted_means_fenced_and_is_not_tried_again(fake: FakeControlPlane, connect: Connect) -> None:
    control = connect()
    control.begin("0.1.0")
    fake.attempt(pb.ATTEMPT_KIND_TRAIN)
    with pytest.raises(FencedError):
        control.commit(steps(1, 1))
    assert fake.calls.count("CommitSteps") == 1
    assert not fake.steps


def test_heartbeats_keep_the_lease_and_bring_orders(fake: FakeControlPlane, connect: Connect, death: Death) -> None:
    control = connect(lease=0.6)
    control.begin("0.1.0")
    waiting = threading.Event()

    def cancel(name: str, _request: Any) -> None:
        if fake.calls.count("Heartbeat") >= 4 and waiting.is_set():
            fake.intent = pb.INTENT_CANCEL

    fake.hook = cancel
    waiting.set()
    assert control.wait_for_grant(50, lambda: False) is Intent.CANCEL
    assert not death.happened.is_set()


def test_a_lease_that_cannot_be_renewed_ends_the_process_before_it_runs_out(
    fake: FakeControlPlane, connect: Connect, death: Death
) -> None:
    control = connect(lease=2.0)
    control.begin("0.1.0")
    began = time.monotonic()
    fake.hook = lambda name, _request: grpc.StatusCode.UNAVAILABLE if name == "Heartbeat" else None
    assert death.happened.wait(5)
    assert death.why == "the lease could not be renewed"
    assert 1.4 < death.at - began < 2.0


def test_a_heartbeat_that_is_fenced_ends_the_process(fake: FakeControlPlane, connect: Connect, death: Death) -> None:
    control = connect(lease=0.6)
    control.begin("0.1.0")
    fake.attempt(pb.ATTEMPT_KIND_TRAIN)
    assert death.happened.wait(5)
    assert death.why == "a newer attempt owns the job"


def test_calls_give_up_when_the_lease_has_run_out(fake: FakeControlPlane, connect: Connect) -> None:
    control = connect(lease=0.8)
    control.begin("0.1.0")
    fake.hook = lambda _name, _request: grpc.StatusCode.UNAVAILABLE
    began = time.monotonic()
    with pytest.raises(FencedError, match="before the lease had run out"):
        control.commit(steps(1, 1))
    assert time.monotonic() - began < 2


def test_after_finish_a_refused_heartbeat_does_not_end_the_process(
    fake: FakeControlPlane, connect: Connect, death: Death
) -> None:
    control = connect(lease=0.3)
    control.begin("0.1.0")
    control.finish(JobReason.CANCELLED_BY_CUSTOMER)
    assert not death.happened.wait(1.0)
    assert fake.finished is not None


def test_an_error_is_cut_to_the_size_that_is_taken(fake: FakeControlPlane, connect: Connect) -> None:
    control = connect()
    control.begin("0.1.0")
    details = [{"line": n, "message": "x" * 500} for n in range(100)]
    control.finish(JobReason.INVALID_DATA, ErrorDetail(message="m", type="t", code="c", details=details))
    assert fake.finished is not None
    assert fake.finished.error is not None
    assert 20 < len(fake.finished.error.details or []) < 100


def test_the_outbox_sends_in_order_and_publishes_behind_all_steps(fake: FakeControlPlane, connect: Connect) -> None:
    control = connect()
    control.begin("0.1.0")
    outbox = Outbox(control)
    seen: list[int] = []
    for step in range(1, 13):
        assert outbox.wait_for_grant(step) is Intent.RUN
        outbox.commit(pb.Step(step=step))
        if step % 4 == 0:
            outbox.then(lambda: seen.append(fake.step))
    outbox.drain()
    assert seen == [4, 8, 12]
    assert [step.step for step in fake.steps] == list(range(1, 13))


def test_steps_that_wait_are_sent_in_one_call(fake: FakeControlPlane, connect: Connect) -> None:
    control = connect()
    fake.grant_steps = 10
    control.begin("0.1.0")
    outbox = Outbox(control)
    go = threading.Event()
    outbox.then(lambda: bool(go.wait(10)) or None)  # type: ignore[arg-type]
    for step in range(1, 8):
        outbox.commit(pb.Step(step=step))
    go.set()
    outbox.drain()
    assert fake.calls.count("CommitSteps") == 1
    assert fake.step == 7


def test_an_error_of_the_outbox_is_raised_in_the_loop(fake: FakeControlPlane, connect: Connect) -> None:
    control = connect()
    control.begin("0.1.0")
    outbox = Outbox(control)

    def fail() -> None:
        raise OSError("the store is away")

    outbox.then(fail)
    with pytest.raises(OSError, match="the store is away"):
        outbox.drain()
    with pytest.raises(OSError, match="the store is away"):
        outbox.wait_for_grant(50)
    with pytest.raises(OSError, match="the store is away"):
        outbox.commit(pb.Step(step=1))


def test_a_preview_is_reported_and_one_that_is_too_long_says_so(fake: FakeControlPlane, connect: Connect) -> None:
    fake.preview_json = "{}"
    control = connect(kind=pb.ATTEMPT_KIND_PREPARE)
    control.begin("0.1.0")
    token = PreviewToken(id=195, text="é", trained=True)
    with pytest.raises(WorkerError, match=r"preview_too_large.* 90000 tokens in 1 rows; ask for fewer"):
        control.report_preview([PreviewRow(line=1, tokens=(token,) * 90_000)])
    assert "ReportPreview" not in fake.calls
    control.report_preview([PreviewRow(line=1, tokens=(token,) * 3, trained_tokens=3)])
    assert fake.previewed is not None
    (row,) = json.loads(fake.previewed.rows_json)
    assert row["tokens"] == [{"id": 195, "text": "é", "trained": True}] * 3
