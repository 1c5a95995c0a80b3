"""A job as the customer sees it, and the numbered history of its events."""

from __future__ import annotations

from decimal import Decimal
from enum import StrEnum
from os import PathLike
from typing import Any, Literal

from finery.types.base import Linked, Resource, Time
from finery.types.data import DataReport
from finery.types.errors import ErrorDetail
from finery.types.money import Usd


class JobState(StrEnum):
    VALIDATING = "validating"
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})


class Intent(StrEnum):
    """What the customer wants; the API writes only this, the reconciler moves the state."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"


class Progress(Resource):
    step: int = 0
    """Last committed step; 0 before the first."""
    total_steps: int | None = None
    """Known once the data is prepared."""
    trained_tokens: int = 0
    """Tokens with loss over all committed steps."""


class Job(Linked):
    object: Literal["job"] = "job"
    id: str
    project: str
    method: str
    model: str
    """Name of the base model."""
    from_checkpoint: str | None = None
    merge_checkpoint: bool = False
    training_file: str | None = None
    """None for RL in an environment that makes its prompts."""
    validation_file: str | None = None
    environment: dict[str, Any] | None = None
    """RL: the environment as it is used, an `EnvironmentSpec`."""
    environment_id: str | None = None
    name: str | None = None
    metadata: dict[str, str] = {}
    seed: int
    adapter: dict[str, Any]
    added_tokens: tuple[str, ...] = ()
    export_merged: bool = False
    hyperparameters: dict[str, Any]
    resources: dict[str, Any]
    priority: str
    limits: dict[str, Any] = {}
    state: JobState | str
    reason: str | None = None
    """A `JobReason`: why it waits, or why it ended."""
    message: str | None = None
    """The sentence that belongs to `reason`."""
    position: int | None = None
    """Place in the queue, from 1, while it is queued."""
    intent: Intent | str = Intent.RUN
    progress: Progress = Progress()
    data: DataReport | None = None
    """What preparation found; None before."""
    best_checkpoint: str | None = None
    """The checkpoint that evaluated best so far (lowest validation loss; RL: highest held-out reward); None where
    nothing is held out."""
    usage: dict[str, int] = {}
    """Units by SKU, billable and provisional; what was voided is not in it."""
    cost: Usd = Decimal(0)
    """US dollars for `usage`, at the price book pinned at submit."""
    error: ErrorDetail | None = None
    attempts: int = 0
    created_at: Time
    queued_at: Time | None = None
    started_at: Time | None = None
    finished_at: Time | None = None

    def stream(self, *, after: int = 0, progress: bool | None = None) -> Any:
        """`client.jobs.stream` of this job."""
        return self._client().jobs.stream(self, after=after, progress=progress)

    def wait(self, **options: Any) -> Any:
        """`client.jobs.wait` for this job: timeout, on_event, after, raise_on_failure, progress."""
        return self._client().jobs.wait(self, **options)

    def events(self, *, after: int = 0, limit: int | None = None) -> Any:
        """The history so far."""
        return self._client().jobs.events(self, after=after, limit=limit)

    def refresh(self) -> Any:
        """The job as it is now; this object stays as it is."""
        return self._client().jobs.retrieve(self)

    def cancel(self) -> Any:
        return self._client().jobs.cancel(self)

    def pause(self) -> Any:
        return self._client().jobs.pause(self)

    def resume(self) -> Any:
        return self._client().jobs.resume(self)

    def update(self, **changes: Any) -> Any:
        """`client.jobs.update` of this job: name, metadata."""
        return self._client().jobs.update(self, **changes)

    def checkpoints(self) -> Any:
        """Its checkpoints, oldest first."""
        return self._client().checkpoints.list(job=self)

    def rollouts(self, **options: Any) -> Any:
        """`client.jobs.rollouts` of this job: step, kind, limit."""
        return self._client().jobs.rollouts(self, **options)

    def plot(self, path: str | PathLike[str] | None = None) -> Any:
        """`client.jobs.plot` of this job: a picture in a notebook, a file with `path`."""
        return self._client().jobs.plot(self, path=path)


EventType = Literal["state", "metric", "eval", "checkpoint", "prepared", "attempt", "warning", "rollout"]


class Event(Resource):
    """One entry of a job's history. `seq` runs 1, 2, 3, … without gaps.

    `data` by type — state: from, to, reason, message, error?; prepared: rows, tokens, trained_tokens, dropped_rows,
    truncated_rows, total_steps, total_trained_tokens, statistics (a `DataReport`); warning: code, message, param?,
    details?; attempt: attempt, number, phase (started | ended), reason?, resumed_from_step?;
    metric: step, total_steps, loss, trained_tokens, tokens, learning_rate, grad_norm, tokens_per_second,
    step_seconds, learner_seconds, memory_bytes, cost; and by method — dpo: margin, accuracy, chosen_reward,
    rejected_reward, chosen_logp, rejected_logp, kl; rl: reward, reward_std, kl, and more (docs/rl.md);
    eval: step, tokens, and loss (sft, dpo; dpo also accuracy, margin) or reward, reward_low, reward_high, pass_at_<k>
    (rl); checkpoint: checkpoint, step, final, validation_loss, validation_reward;
    rollout: step, kind, place (of the prompt), prompt, text, reward, failure (its code): a sample, texts shortened.
    A number that is not finite is null, next to `non_finite: {field: "NaN" | "Infinity" | "-Infinity"}`.
    """

    object: Literal["event"] = "event"
    job: str
    seq: int
    type: EventType | str
    data: dict[str, Any]
    created_at: Time
