"""The worker's side of the control plane: calls with retries, the lease and its heartbeat.

Lease: taken by `begin`, renewed by a thread every third of it. Times count from when the renewal was *sent*, by the
monotonic clock. After 0.8 of the lease without a renewal the process ends itself: by then nobody else may have been
told that the job is theirs. An answer ABORTED means that this has happened; then nothing more is written.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import grpc
from pydantic import TypeAdapter

from finery.types.errors import ErrorDetail
from finery.types.jobs import Intent
from finery.types.previews import PreviewRow
from finery.types.reasons import JobReason
from finery_gpu_workers.errors import WorkerError
from finery_protos.v1 import worker_pb2 as pb
from finery_protos.v1.worker_pb2_grpc import WorkersStub

Reply = TypeVar("Reply")

_log = logging.getLogger(__name__)
_RETRIED = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
_CALL_SECONDS = 10.0
_BEGIN_SECONDS = 60.0
_SELF_FENCE = 0.8
_ERROR_CHARACTERS = 16_000
_PREVIEW = TypeAdapter(tuple[PreviewRow, ...])
_PREVIEW_BYTES = 3 * 2**20
"""gRPC takes 4 MiB."""
# Reconnect soon after the server is back; gRPC's own back-off grows to two minutes.
_CHANNEL = [
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 64 * 2**20),  # an assignment holds the answers that are to be graded
]
_INTENTS = {pb.INTENT_RUN: Intent.RUN, pb.INTENT_PAUSE: Intent.PAUSE, pb.INTENT_CANCEL: Intent.CANCEL}
EXIT_FENCED = 75


class FencedError(Exception):
    """Another attempt owns the job, or the lease has run out: write nothing more."""


class CallError(Exception):
    """The control plane refused a call for good."""


def _exit(why: str) -> NoReturn:
    _log.error("this worker ends at once: %s", why)
    os._exit(EXIT_FENCED)


class ControlPlane:
    """One attempt's connection. Thread-safe. `die` ends the process when the lease is lost."""

    def __init__(
        self, address: str, attempt_id: str, fence: int, token: str, *, die: Callable[[str], None] = _exit
    ) -> None:
        self._channel = grpc.insecure_channel(address, options=_CHANNEL)
        self._stub = WorkersStub(self._channel)
        self._identity: dict[str, Any] = {"attempt_id": attempt_id, "fence": fence}
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._die = die
        self._lease = 0.0
        self._renewed = time.monotonic()
        self._closed = threading.Event()
        self._ending = False
        """The last call is on its way: an answer ABORTED to a heartbeat means that it has arrived."""
        self._thread: threading.Thread | None = None
        self.changed = threading.Condition()
        """Notified when orders arrive or the outbox moves."""
        self._granted = 0
        self._intent = Intent.RUN

    def begin(self, code_version: str) -> pb.Assignment:
        """Takes the lease and starts the heartbeat."""
        request = pb.BeginRequest(code_version=code_version, **self._identity)
        sent = time.monotonic()
        assignment = self._call(self._stub.Begin, request)
        self._lease = assignment.orders.lease_seconds
        self._renewed = sent
        self._obey(assignment.orders)
        self._thread = threading.Thread(target=self._heartbeat, name="heartbeat", daemon=True)
        self._thread.start()
        return assignment

    def commit(self, steps: list[pb.Step]) -> None:
        self._obey(self._call(self._stub.CommitSteps, pb.CommitStepsRequest(steps=steps, **self._identity)))

    def publish(self, **checkpoint: Any) -> str:
        """The fields of PublishCheckpointRequest; the new checkpoint's id."""
        request = pb.PublishCheckpointRequest(**checkpoint, **self._identity)
        response = self._call(self._stub.PublishCheckpoint, request)
        self._obey(response.orders)
        return response.checkpoint_id

    def report_prepared(self, **report: Any) -> None:
        """The fields of ReportPreparedRequest. Ends the attempt."""
        self._ending = True
        self._call(self._stub.ReportPrepared, pb.ReportPreparedRequest(**report, **self._identity))

    def report_preview(self, rows: Sequence[PreviewRow], warnings_json: str = "") -> None:
        """Ends the attempt. Raises WorkerError if the rows are more than one message holds."""
        rows_json = _PREVIEW.dump_json(tuple(rows))
        if len(rows_json) > _PREVIEW_BYTES:
            tokens, limit = sum(len(row.tokens) for row in rows), _PREVIEW_BYTES // 2**20
            message = f"Expected rows of at most {limit} MiB, found {tokens} tokens in {len(rows)} rows; ask for fewer."
            raise WorkerError("preview_too_large", message, param="rows")
        self._ending = True
        report = pb.ReportPreviewRequest(rows_json=rows_json.decode(), warnings_json=warnings_json, **self._identity)
        self._call(self._stub.ReportPreview, report)

    def report_environment_run(self, **report: Any) -> None:
        """The fields of ReportEnvironmentRunRequest. Ends the attempt."""
        self._ending = True
        self._call(self._stub.ReportEnvironmentRun, pb.ReportEnvironmentRunRequest(**report, **self._identity))

    def finish(self, reason: JobReason, error: ErrorDetail | None = None) -> None:
        """Ends the attempt."""
        self._ending = True
        error_json = _json(error) if error else ""
        self._call(self._stub.Finish, pb.FinishRequest(reason=reason.value, error_json=error_json, **self._identity))

    def close(self) -> None:
        self._ending = True
        self._closed.set()
        if self._thread:
            self._thread.join(_CALL_SECONDS)
        self._channel.close()

    @property
    def intent(self) -> Intent:
        """What the customer wants, as last heard."""
        with self.changed:
            return self._intent

    def wait_for_grant(self, step: int, give_up: Callable[[], bool]) -> Intent:
        """Returns once the step may start, or the intent is no longer to run, or `give_up()`; the intent."""
        with self.changed:
            self.changed.wait_for(lambda: self._granted >= step or self._intent is not Intent.RUN or give_up())
            return self._intent

    def _obey(self, orders: pb.Orders) -> None:
        with self.changed:
            self._granted = max(self._granted, orders.granted_through)
            self._intent = _INTENTS.get(orders.intent, self._intent)
            self.changed.notify_all()

    def _call(self, method: Callable[..., Reply], request: Any) -> Reply:
        """Retries what may pass until the lease has run out."""
        delay = 0.1
        while (left := self._left()) > 0:
            try:
                return method(request, timeout=min(left, _CALL_SECONDS), metadata=self._metadata)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.ABORTED:
                    raise FencedError("the control plane answers that a newer attempt owns the job") from None
                if error.code() not in _RETRIED:
                    raise CallError(f"{type(request).__name__}: {error.code().name}: {error.details()}") from None
            time.sleep(min(delay, max(0.0, self._left())))
            delay = min(2 * delay, 1.0)
        raise FencedError("the control plane did not answer before the lease had run out")

    def _left(self) -> float:
        return self._renewed + (self._lease or _BEGIN_SECONDS) - time.monotonic()

    def _heartbeat(self) -> None:
        pause = self._lease / 3
        while not self._closed.wait(min(pause, max(0.0, self._fence_at() - time.monotonic()))):
            sent = time.monotonic()
            if sent >= self._fence_at():
                return self._die("the lease could not be renewed")
            timeout = max(0.05, min(self._lease / 3, self._fence_at() - sent))
            try:
                request = pb.HeartbeatRequest(**self._identity)
                orders = self._stub.Heartbeat(request, timeout=timeout, metadata=self._metadata)
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel has been closed
                if self._ending and (self._closed.is_set() or _code(error) is grpc.StatusCode.ABORTED):
                    return None
                if _code(error) is grpc.StatusCode.ABORTED:
                    return self._die("a newer attempt owns the job")
                pause = self._lease / 15
            else:
                self._renewed, pause = sent, self._lease / 3
                self._obey(orders)
        return None

    def _fence_at(self) -> float:
        return self._renewed + _SELF_FENCE * self._lease


def _code(error: Exception) -> grpc.StatusCode | None:
    return error.code() if isinstance(error, grpc.RpcError) else None


def _json(error: ErrorDetail) -> str:
    """Within the size that the control plane takes: the last details are left out."""
    while len(text := error.model_dump_json(exclude_none=True)) > _ERROR_CHARACTERS and error.details:
        error = error.model_copy(update={"details": error.details[:-1]})
    return text
