"""Why a job is where it is: one enum that yields final state, retry budget, who pays, and the sentence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Payer = Literal["customer", "platform"]


class JobReason(StrEnum):
    # waiting
    WAITING_FOR_VALIDATION = "waiting_for_validation"
    WAITING_FOR_PLACEMENT = "waiting_for_placement"
    WAITING_FOR_CAPACITY = "waiting_for_capacity"
    WAITING_BEHIND = "waiting_behind"
    EXCEEDS_POOL = "exceeds_pool"
    POOL_UNREACHABLE = "pool_unreachable"
    # an attempt ended, the job goes on from its last checkpoint
    WORKER_LOST = "worker_lost"
    PLATFORM_FAULT = "platform_fault"
    LAUNCH_FAILED = "launch_failed"
    PREEMPTED = "preempted"
    # the job ended or rests
    COMPLETED = "completed"
    STOPPED_EARLY = "stopped_early"
    CANCELLED_BY_CUSTOMER = "cancelled_by_customer"
    PAUSED_BY_CUSTOMER = "paused_by_customer"
    INVALID_DATA = "invalid_data"
    INVALID_MODEL = "invalid_model"
    NO_TRAINABLE_TOKENS = "no_trainable_tokens"
    INVALID_ENVIRONMENT = "invalid_environment"
    SANDBOX_UNAVAILABLE = "sandbox_unavailable"
    REWARDS_FAILED = "rewards_failed"
    NON_FINITE_LOSS = "non_finite_loss"
    OUT_OF_MEMORY = "out_of_memory"
    TOO_MANY_FAULTS = "too_many_faults"


@dataclass(frozen=True)
class ReasonRule:
    """What follows from a reason."""

    final: Literal["succeeded", "failed", "cancelled", "paused"] | None
    """The state it puts the job in; None while the job waits or is tried again."""
    retries: int
    """How many attempts may end this way before the job fails with `too_many_faults`."""
    pays: Payer
    """Who answers for it. Steps after the last checkpoint are void, whoever that is: usage follows checkpoints."""
    sentence: str
    """What the customer reads."""


RULES: dict[JobReason, ReasonRule] = {
    JobReason.WAITING_FOR_VALIDATION: ReasonRule(None, 0, "platform", "The training data is being prepared."),
    JobReason.WAITING_FOR_PLACEMENT: ReasonRule(None, 0, "platform", "The job is ready and is about to be placed."),
    JobReason.WAITING_FOR_CAPACITY: ReasonRule(None, 0, "platform", "All accelerators of the pool are in use."),
    JobReason.WAITING_BEHIND: ReasonRule(None, 0, "platform", "Earlier jobs are waiting for the same accelerators."),
    JobReason.EXCEEDS_POOL: ReasonRule(
        None, 0, "platform", "The job asks for more accelerators than the pool has; it starts when the pool grows."
    ),
    JobReason.POOL_UNREACHABLE: ReasonRule(
        None, 0, "platform", "The accelerator pool does not answer; the job starts when it is back."
    ),
    JobReason.WORKER_LOST: ReasonRule(
        None, 5, "platform", "The worker was lost; the job goes on from its last checkpoint at no cost."
    ),
    JobReason.PLATFORM_FAULT: ReasonRule(
        None,
        2,
        "platform",
        "A fault on our side ended the attempt; the job goes on from its last checkpoint at no cost.",
    ),
    JobReason.LAUNCH_FAILED: ReasonRule(None, 5, "platform", "The worker could not be started; it is tried again."),
    JobReason.PREEMPTED: ReasonRule(
        None, 1_000_000, "platform", "The accelerators were needed elsewhere; the job goes on from its last checkpoint."
    ),
    JobReason.COMPLETED: ReasonRule(
        "succeeded", 0, "customer", "All steps are done and the final checkpoint is stored."
    ),
    JobReason.STOPPED_EARLY: ReasonRule(
        "succeeded",
        0,
        "customer",
        "The evaluation reached its target or stopped getting better; the best checkpoint is marked.",
    ),
    JobReason.CANCELLED_BY_CUSTOMER: ReasonRule("cancelled", 0, "customer", "The job was cancelled on request."),
    JobReason.PAUSED_BY_CUSTOMER: ReasonRule("paused", 0, "customer", "The job was paused on request."),
    JobReason.INVALID_DATA: ReasonRule(
        "failed", 0, "platform", "The training data cannot be used; the error says which lines and why."
    ),
    JobReason.INVALID_MODEL: ReasonRule(
        "failed", 0, "platform", "The model cannot be trained as asked; the error says what does not fit."
    ),
    JobReason.NO_TRAINABLE_TOKENS: ReasonRule(
        "failed", 0, "platform", "No token of the training data would carry loss; nothing was trained."
    ),
    JobReason.INVALID_ENVIRONMENT: ReasonRule(
        "failed", 0, "platform", "The environment cannot be used; the error says what and why."
    ),
    JobReason.SANDBOX_UNAVAILABLE: ReasonRule(
        "failed", 0, "platform", "The workers have no sandbox for customers' code, and it never runs without one."
    ),
    JobReason.REWARDS_FAILED: ReasonRule(
        "failed", 0, "customer", "Too many rollouts got no reward; the error and the rollouts say why."
    ),
    JobReason.NON_FINITE_LOSS: ReasonRule(
        "failed", 0, "customer", "Loss or gradient became NaN or infinite; try a lower learning rate."
    ),
    JobReason.OUT_OF_MEMORY: ReasonRule(
        "failed",
        0,
        "platform",
        "The accelerator ran out of memory; lower micro_batch_tokens, or max_length (RL: max_new_tokens).",
    ),
    JobReason.TOO_MANY_FAULTS: ReasonRule(
        "failed", 0, "platform", "Attempts kept failing on our side; nothing after the last checkpoint is billed."
    ),
}
