"""The worker process: begin, do what the assignment says, end with a reason.

`main(environment)` is what the scheduler starts, in a process of its own, by its dotted name; `python -m
finery_gpu_workers.run` reads the process's environment. No actor class is needed.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from finery.types.errors import ErrorDetail
from finery.types.methods import JobCreate
from finery.types.models import ModelSource
from finery.types.reasons import JobReason
from finery_gpu_workers import seeds, storage
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.methods.prepare import prepare
from finery_gpu_workers.methods.preview import preview
from finery_gpu_workers.models.catalog import resolve
from finery_gpu_workers.report import CallError, ControlPlane, FencedError
from finery_gpu_workers.scratch import scratch_folder
from finery_gpu_workers.work import Ending, Task, Work
from finery_protos.v1 import worker_pb2 as pb

_log = logging.getLogger(__name__)
_CUSTOMERS = {
    "invalid_chat_template": JobReason.INVALID_DATA,
    "preview_too_large": JobReason.INVALID_DATA,
    "added_tokens_untrained": JobReason.INVALID_MODEL,
    "base_changed": JobReason.INVALID_MODEL,
    "model_not_found": JobReason.INVALID_MODEL,
    "model_requires_remote_code": JobReason.INVALID_MODEL,
    "row_too_long_for_model": JobReason.INVALID_MODEL,
    "unknown_target": JobReason.INVALID_MODEL,
    "unsupported_adapter": JobReason.INVALID_MODEL,
    "unsupported_model": JobReason.INVALID_MODEL,
    "invalid_environment": JobReason.INVALID_ENVIRONMENT,
    "sandbox_unavailable": JobReason.SANDBOX_UNAVAILABLE,
    "rewards_failed": JobReason.REWARDS_FAILED,
}
"""Errors that end the job at once, as another attempt would meet them too; all others are faults of ours. Another
choice of the customer's mends them; the operator mends `model_not_found` and `sandbox_unavailable`."""
_OF_ENVIRONMENTS = (JobReason.INVALID_ENVIRONMENT, JobReason.SANDBOX_UNAVAILABLE, JobReason.REWARDS_FAILED)
_SPEC: TypeAdapter[JobCreate] = TypeAdapter(JobCreate)
_SCORE_MODELS = TypeAdapter(dict[str, str | None])
_BROKEN_MODEL = ("model_not_found", "invalid_model", "unsafe_checkpoint_file")


@dataclass(frozen=True)
class Settings:
    """The process's environment, `FINERY_…`."""

    rpc_address: str
    attempt_id: str
    fence: int
    attempt_token: str = field(repr=False)
    store_url: str
    model_cache: Path
    device: str
    torch_threads: int
    score_models: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    """`SCORE_MODELS`: a JSON object of base URLs that graders may ask, and the key of each, or null."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Settings:
        names = ("RPC_ADDRESS", "ATTEMPT_ID", "FENCE", "ATTEMPT_TOKEN", "STORE_URL", "MODEL_CACHE")
        if missing := [f"FINERY_{name}" for name in names if not environment.get(f"FINERY_{name}")]:
            raise SystemExit(f"expected {', '.join(missing)} in the worker's environment, found nothing")
        address, attempt, fence, token, store, cache = (environment[f"FINERY_{name}"] for name in names)
        device = environment.get("FINERY_DEVICE", "auto")
        threads = seeds.torch_threads(environment)
        models = _score_models(environment.get("FINERY_SCORE_MODELS") or "{}")
        return cls(address, attempt, int(fence), token, store, Path(cache), device, threads, models)


def _score_models(raw: str) -> dict[str, str | None]:
    try:
        return _SCORE_MODELS.validate_json(raw)
    except ValidationError:
        # Without what was found: it holds keys.
        raise SystemExit("FINERY_SCORE_MODELS: expected a JSON object of URLs with a key or null each") from None


def main(environment: Mapping[str, str]) -> None:
    """One attempt, from its first call to its last. Returns when it is over, however it ended."""
    # Before torch is loaded. Its threads spin while they wait, which on a busy machine takes the cores from each other
    # (measured: under a fifth of the speed); this bound keeps the speed of a quiet one.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    settings = Settings.read(environment)
    control = ControlPlane(settings.rpc_address, settings.attempt_id, settings.fence, settings.attempt_token)
    try:
        attempt(settings, control)
    except FencedError as error:
        _log.warning("attempt %s stops: %s", settings.attempt_id, error)
    except CallError:
        _log.exception("attempt %s stops", settings.attempt_id)
    finally:
        control.close()


def attempt(settings: Settings, control: ControlPlane) -> None:
    """Raises FencedError, CallError."""
    code_version = version("finery-gpu-workers")
    assignment = control.begin(code_version)
    _log.info("attempt %s of job %s begins", settings.attempt_id, assignment.job_id)
    with scratch_folder() as folder:
        try:
            ending = _work(settings, control, assignment, folder, code_version)
        except FencedError:
            raise
        except Exception as error:
            ending = ending_of(error, settings.attempt_id)
    if ending:
        control.finish(ending.reason, ending.error)
        _log.info("attempt %s ends: %s", settings.attempt_id, ending.reason)


def _work(
    settings: Settings, control: ControlPlane, assignment: pb.Assignment, folder: Path, code_version: str
) -> Ending | None:
    task: dict[str, Any] = {
        "control": control,
        "store": storage.open_store(settings.store_url),
        "assignment": assignment,
        "folder": folder,
        "code_version": code_version,
        "score_models": settings.score_models,
    }
    if assignment.run_json:
        # Not at the top: environments are many modules, which most attempts do not need.
        from finery_gpu_workers.methods.grade import grade

        return grade(Task(**task))
    source: ModelSource = TypeAdapter(ModelSource).validate_json(assignment.model_source_json)
    training = assignment.kind == pb.ATTEMPT_KIND_TRAIN
    work = Work(
        **task,
        spec=_SPEC.validate_json(assignment.spec_json),
        model_folder=_model_folder(source, settings.model_cache),
        device=_device(settings.device) if training else "cpu",
    )
    if not training:
        # Not the time of this attempt: another one after midnight must prepare the same data.
        created = datetime.fromtimestamp(assignment.created_ms / 1000, UTC)
        return preview(work, created) if assignment.preview_json else prepare(work, created)
    # Loading torch takes seconds: after the first call, so that the lease is held meanwhile, and only to train.
    method = import_module(f"finery_gpu_workers.methods.{work.spec.method}")
    seeds.deterministic(work.spec.seed, threads=settings.torch_threads)
    ending: Ending = method.train(work)
    return ending


def _model_folder(source: ModelSource, cache: Path) -> Path:
    """Where the operator's entry is broken, the customer hears that it is, and only the log says where and how."""
    try:
        return resolve(source, cache)
    except WorkerError as error:
        if error.code not in _BROKEN_MODEL:
            raise
        message = (
            "model: expected a model that a worker can load, found that the catalogue's model is missing or broken; "
            "the job is not at fault: ask the operator to mend the model, then submit the job again."
        )
        raise WorkerError("model_not_found", message) from error


def _device(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def ending_of(error: Exception, attempt_id: str) -> Ending:
    """What an exception means for the job. The log gets the traceback, the customer a reference."""
    _log.error("attempt %s fails", attempt_id, exc_info=error)
    if isinstance(error, WorkerError) and error.code in _CUSTOMERS:
        return _customers(error, _CUSTOMERS[error.code])
    if _out_of_memory(error):
        message = "The worker ran out of memory; lower hyperparameters.micro_batch_tokens or max_length."
        return Ending(JobReason.OUT_OF_MEMORY, _detail(message, "out_of_memory", "invalid_request_error"))
    message = f"A fault on our side ended the attempt. Our log has the details under {attempt_id}."
    return Ending(JobReason.PLATFORM_FAULT, _detail(message, "platform_fault", "server_error"))


def _customers(error: WorkerError, reason: JobReason) -> Ending:
    param = error.param or ("environment" if reason in _OF_ENVIRONMENTS else "model")
    type_ = "server_error" if reason is JobReason.SANDBOX_UNAVAILABLE else "invalid_request_error"
    detail = ErrorDetail(message=error.message, type=type_, code=error.code, param=param, details=error.details)
    return Ending(reason, detail)


def _out_of_memory(error: Exception) -> bool:
    """Torch has a type of its own for it on an accelerator, but not on a CPU."""
    torch = sys.modules.get("torch")
    types = (MemoryError, torch.OutOfMemoryError) if torch else (MemoryError,)
    return isinstance(error, types) or "DefaultCPUAllocator" in str(error)


def _detail(message: str, code: str, type_: str) -> ErrorDetail:
    return ErrorDetail(message=message, type=type_, code=code)


if __name__ == "__main__":
    main(os.environ)
