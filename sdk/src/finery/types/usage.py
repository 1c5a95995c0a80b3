"""Metered usage."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from finery.types.base import Resource
from finery.types.money import Usd


class Sku(StrEnum):
    """What is metered: tokens, and seconds where the name says so."""

    TRAIN_SFT = "train.sft"
    TRAIN_DPO = "train.dpo"
    """Tokens of both answers that carry loss."""
    TRAIN_RL = "train.rl"
    """Sampled tokens that carry loss, once for each pass over them."""
    EVAL_SFT = "eval.sft"
    EVAL_DPO = "eval.dpo"
    EVAL_RL = "eval.rl"
    """Tokens generated to evaluate."""
    ROLLOUT_PREFILL = "rollout.prefill"
    """Prompt tokens that were computed: once for a group."""
    ROLLOUT_PREFILL_CACHED = "rollout.prefill_cached"
    """Prompt tokens that the group's other rollouts took from the cache."""
    ROLLOUT_GENERATED = "rollout.generated"
    """Tokens that were sampled for training, those of rollouts without a reward excepted."""
    REWARD_CPU_SECONDS = "reward.cpu_seconds"
    """Of customers' code, whole seconds of the running sum."""
    REWARD_LLM_INPUT = "reward.llm_input"
    REWARD_LLM_OUTPUT = "reward.llm_output"


class UsageState(StrEnum):
    PROVISIONAL = "provisional"
    """Committed, not yet covered by a checkpoint."""
    BILLABLE = "billable"
    VOID = "void"
    """Never billed: a later attempt repeated the work, or the job ended before a checkpoint covered it."""


GroupBy = Literal["job", "sku", "day"]


class UsageRow(Resource):
    """A sum over usage records. The fields that were not grouped by are None."""

    object: Literal["usage"] = "usage"
    job: str | None = None
    sku: str | None = None
    day: str | None = None
    """YYYY-MM-DD, UTC; a window is [00:00, 24:00)."""
    quantity: int
    """Billable and provisional units."""
    billable: int
    provisional: int
    void: int
    cost: Usd
    """US dollars for `quantity`."""
