"""A control plane in memory for worker tests: one job, real gRPC, and the rules that the real one enforces.

It refuses what the real one refuses (tokens, fences, gaps, steps that were not granted, checkpoints whose steps are not
committed or whose files are not in the store with the sha256 that was said, completion without proof), so that a wrong
worker fails.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc

from finery.types.errors import ErrorDetail
from finery.types.methods import JobCreate, RlJobCreate
from finery_protos.v1 import worker_pb2 as pb
from finery_protos.v1.worker_pb2_grpc import WorkersServicer, add_WorkersServicer_to_server
from finery_testing.stored import Refused, check_checkpoint, check_rollouts, must

TENANT, JOB = "ten_test", "job_test"
Q = TypeVar("Q")
A = TypeVar("A")
Hook = Callable[[str, Any], grpc.StatusCode | None]
"""(name of the call, request) before it is handled; a status refuses it."""


@dataclass
class Finished:
    reason: str
    error: ErrorDetail | None


@dataclass
class FakeControlPlane(WorkersServicer):
    """One job and its attempts, one after the other. `store` is the folder of a `file://` store."""

    store: Path
    spec: JobCreate
    model: Path
    training: bytes | None
    """None: the environment makes its prompts."""
    validation: bytes | None = None
    job: str = JOB
    created_ms: int = 1_796_000_000_000
    base: tuple[pb.BasePart, ...] = ()
    start_prefix: str = ""
    training_encoding: str = "jsonl"
    grant_steps: int = 3
    lease_seconds: float = 60.0
    hook: Hook = lambda _name, _request: None
    intent: pb.Intent.ValueType = pb.INTENT_RUN

    fence: int = 0
    kind: pb.AttemptKind.ValueType = pb.ATTEMPT_KIND_UNSPECIFIED
    live: bool = False
    step: int = 0
    granted: int = 0
    calls: list[str] = field(default_factory=list)
    steps: list[pb.Step] = field(default_factory=list)
    """Of all attempts, in the order of their commit."""
    checkpoints: list[pb.PublishCheckpointRequest] = field(default_factory=list)
    prepared: pb.ReportPreparedRequest | None = None
    preview_json: str = ""
    previewed: pb.ReportPreviewRequest | None = None
    run_json: str = ""
    graded: pb.ReportEnvironmentRunRequest | None = None
    finished: Finished | None = None
    refused: list[str] = field(default_factory=list)
    """Refusals that only a wrong worker gets: all but those of hooks and fences."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.port = 0
        self._serve()
        for name, content in (("training", self.training), ("validation", self.validation)):
            if content is not None:
                path = self.store / TENANT / "files" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    def _serve(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(8))
        add_WorkersServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def restart(self, down_seconds: float) -> None:
        """Away at once; back on the same port after a while."""
        self._server.stop(0).wait()
        threading.Timer(down_seconds, self._serve).start()

    def close(self) -> None:
        self._server.stop(0).wait()

    def attempt(self, kind: pb.AttemptKind.ValueType) -> dict[str, str]:
        """A new attempt; the environment of its worker."""
        with self._lock:
            self.fence += 1
            self.kind, self.live, self.finished = kind, True, None
            self.step = self.granted = self.checkpoints[-1].step if self.checkpoints else 0
        return {
            "FINERY_RPC_ADDRESS": f"127.0.0.1:{self.port}",
            "FINERY_ATTEMPT_ID": self._attempt_id,
            "FINERY_FENCE": str(self.fence),
            "FINERY_ATTEMPT_TOKEN": f"token-{self.fence}",
            "FINERY_STORE_URL": self.store.as_uri(),
            "FINERY_MODEL_CACHE": str(self.store.parent / "models"),
            "FINERY_DEVICE": "cpu",
            "FINERY_TORCH_THREADS": "1",
        }

    @property
    def _attempt_id(self) -> str:
        return f"att_{self.fence}"

    @property
    def _output_prefix(self) -> str:
        return f"{TENANT}/jobs/{self.job}/{self._attempt_id}/"

    # ---- the calls

    def Begin(self, request: pb.BeginRequest, context: grpc.ServicerContext) -> pb.Assignment:  # noqa: N802
        return self._answer("Begin", self._begin, request, context)

    def Heartbeat(self, request: pb.HeartbeatRequest, context: grpc.ServicerContext) -> pb.Orders:  # noqa: N802
        return self._answer("Heartbeat", lambda _: self._orders(), request, context)

    def ReportPrepared(self, request: pb.ReportPreparedRequest, context: grpc.ServicerContext) -> pb.Orders:  # noqa: N802
        return self._answer("ReportPrepared", self._report_prepared, request, context)

    def ReportPreview(self, request: pb.ReportPreviewRequest, context: grpc.ServicerContext) -> pb.Orders:  # noqa: N802
        return self._answer("ReportPreview", self._report_preview, request, context)

    def ReportEnvironmentRun(  # noqa: N802
        self, request: pb.ReportEnvironmentRunRequest, context: grpc.ServicerContext
    ) -> pb.Orders:
        return self._answer("ReportEnvironmentRun", self._report_run, request, context)

    def CommitSteps(self, request: pb.CommitStepsRequest, context: grpc.ServicerContext) -> pb.Orders:  # noqa: N802
        return self._answer("CommitSteps", self._commit_steps, request, context)

    def PublishCheckpoint(  # noqa: N802
        self, request: pb.PublishCheckpointRequest, context: grpc.ServicerContext
    ) -> pb.PublishCheckpointResponse:
        return self._answer("PublishCheckpoint", self._publish, request, context)

    def Finish(self, request: pb.FinishRequest, context: grpc.ServicerContext) -> pb.FinishResponse:  # noqa: N802
        return self._answer("Finish", self._finish, request, context)

    def _answer(self, name: str, handler: Callable[[Q], A], request: Q, context: grpc.ServicerContext) -> A:
        code = self.hook(name, request)
        if code is not None:
            context.abort(code, "as the test wants it")
        try:
            with self._lock:
                self.calls.append(name)
                self._check_identity(request, dict(context.invocation_metadata() or ()))
                return handler(request)
        except Refused as refused:
            if refused.code is not grpc.StatusCode.ABORTED:
                self.refused.append(f"{name}: {refused}")
            context.abort(refused.code, str(refused))
            raise AssertionError("abort raises") from None

    def _check_identity(self, request: Any, metadata: dict[str, Any]) -> None:
        if metadata.get("authorization") != f"Bearer token-{request.fence}":
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, "wrong token")
        if not self.live or request.fence != self.fence or request.attempt_id != self._attempt_id:
            raise Refused(grpc.StatusCode.ABORTED, "fenced")

    def _begin(self, request: pb.BeginRequest) -> pb.Assignment:
        assignment = pb.Assignment(
            kind=self.kind,
            job_id=self.job,
            tenant_id=TENANT,
            spec_json=self.spec.model_dump_json(),
            model_source_json=json.dumps({"type": "path", "path": str(self.model)}),
            model_name="tiny",
            output_prefix=self._output_prefix,
            base=self.base,
            created_ms=self.created_ms,
            start_prefix=self.start_prefix,
            preview_json=self.preview_json if self.kind == pb.ATTEMPT_KIND_PREPARE else "",
            environment_json=self._environment_json(),
            run_json=self.run_json if self.kind == pb.ATTEMPT_KIND_PREPARE else "",
            orders=self._orders(),
        )
        if self.training is not None:
            assignment.training_key = f"{TENANT}/files/training"
            assignment.training_sha256 = hashlib.sha256(self.training).hexdigest()
            assignment.training_encoding = self.training_encoding
        if self.validation is not None:
            assignment.validation_key = f"{TENANT}/files/validation"
            assignment.validation_sha256 = hashlib.sha256(self.validation).hexdigest()
            assignment.validation_encoding = "jsonl"
        if self.kind == pb.ATTEMPT_KIND_TRAIN:
            assert self.prepared is not None
            assignment.prepared_prefix = self.prepared.prepared_prefix
            if self.checkpoints:
                last = self.checkpoints[-1]
                assignment.resume.CopyFrom(
                    pb.Resume(step=last.step, prefix=last.resume_prefix, sha256=last.resume_sha256)
                )
        return assignment

    def _report_prepared(self, request: pb.ReportPreparedRequest) -> pb.Orders:
        must(self.kind == pb.ATTEMPT_KIND_PREPARE, "not a prepare attempt")
        must(request.prepared_prefix.startswith(self._output_prefix), "prepared_prefix is not the attempt's")
        self.prepared, self.live = request, False
        return self._orders()

    def _report_preview(self, request: pb.ReportPreviewRequest) -> pb.Orders:
        must(self.kind == pb.ATTEMPT_KIND_PREPARE and bool(self.preview_json), "not asked for a preview")
        self.previewed, self.live = request, False
        return self._orders()

    def _report_run(self, request: pb.ReportEnvironmentRunRequest) -> pb.Orders:
        must(self.kind == pb.ATTEMPT_KIND_PREPARE and bool(self.run_json), "not asked for a run")
        self.graded, self.live = request, False
        return self._orders()

    def _environment_json(self) -> str:
        if not isinstance(self.spec, RlJobCreate):
            return ""
        assert not isinstance(self.spec.environment, str)
        return self.spec.environment.model_dump_json()

    def _commit_steps(self, request: pb.CommitStepsRequest) -> pb.Orders:
        for step in request.steps:
            if step.step <= self.step and step.step > 0:
                continue
            must(step.step in (self.step + 1, 0), f"expected step {self.step + 1}, found {step.step}")
            must(step.step <= self.granted, f"step {step.step}: granted through {self.granted}")
            must(all(usage.unit.endswith(f":{step.step}") for usage in step.usage), "a unit of another step")
            check_rollouts(self.store, self._output_prefix, step)
            self.steps.append(step)
            self.step = step.step
        return self._orders()

    def _publish(self, request: pb.PublishCheckpointRequest) -> pb.PublishCheckpointResponse:
        assert self.prepared is not None
        must(1 <= request.step <= self.step, f"committed through {self.step}, found {request.step}")
        hyper = self.spec.hyperparameters
        early = hyper.early_stopping_patience is not None or getattr(hyper, "target_reward", None) is not None
        early = early and request.step == self.step
        last = request.step == self.prepared.total_steps
        must(request.final or not last, "the last step's checkpoint is not final")
        must(last or early or not request.final, "final only at the last step, or where the job stops early")
        must(request.kind == ("full" if self.spec.adapter.type == "full" else "adapter"), f"kind {request.kind}")
        must(not request.HasField("validation_loss") or math.isfinite(request.validation_loss), "loss not finite")
        must(not self.checkpoints or request.step > self.checkpoints[-1].step, "a checkpoint twice")
        check_checkpoint(self.store, self._output_prefix, request)
        self.checkpoints.append(request)
        return pb.PublishCheckpointResponse(checkpoint_id=f"ckpt_{request.step}", orders=self._orders())

    def _finish(self, request: pb.FinishRequest) -> pb.FinishResponse:
        if request.reason == "completed":
            assert self.prepared is not None
            must(self.step == self.prepared.total_steps, "completed before the last step")
        if request.reason in ("completed", "stopped_early"):
            final = bool(self.checkpoints) and self.checkpoints[-1].final and self.checkpoints[-1].step == self.step
            must(final, f"{request.reason} without a final checkpoint of the last step")
        must(len(request.error_json) <= 16_384, "error_json is too long")
        error = ErrorDetail.model_validate_json(request.error_json) if request.error_json else None
        self.finished, self.live = Finished(request.reason, error), False
        return pb.FinishResponse()

    def _orders(self) -> pb.Orders:
        total = self.prepared.total_steps if self.prepared else 0
        if self.intent == pb.INTENT_RUN:
            self.granted = max(self.granted, min(self.step + self.grant_steps, total))
        return pb.Orders(intent=self.intent, granted_through=self.granted, lease_seconds=self.lease_seconds)

    def rollouts(self, step: int, *, evaluation: bool = False) -> list[dict[str, Any]]:
        """Those of the last attempt that committed the step."""
        message = next(one for one in reversed(self.steps) if one.step == step)
        file = message.evaluation_rollouts if evaluation else message.rollouts
        return [json.loads(line) for line in (self.store / file.key).read_text().splitlines()]
