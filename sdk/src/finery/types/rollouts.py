"""Rollouts: what was sampled, what it was rewarded with, and what was trained of it. All are kept."""

from __future__ import annotations

from typing import Any, Literal

from finery.types.base import Resource
from finery.types.environments import RewardFailure

RolloutKind = Literal["train", "eval"]


class Rollout(Resource):
    """One answer. Token ids are those that were sampled, never tokenised again."""

    object: Literal["rollout"] = "rollout"
    id: str
    """`roll_<step>_<number>`, and `roll_e<step>_<number>` of an evaluation; unique within its job. The number is its
    place in the step's stored file, from 0."""
    job: str
    step: int
    kind: RolloutKind | str = "train"
    group: int
    """The prompt within the step, from 0; rollouts of one group are compared with each other."""
    sample: int
    """Within the group, from 0."""
    prompt: int
    """Its place in the environment, from 0."""
    messages: tuple[dict[str, Any], ...] = ()
    prompt_text: str | None = None
    """Of a prompt that is a text, not messages."""
    item: dict[str, Any] = {}
    """The prompt's row, as graders see it."""
    prompt_tokens: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    """With the end token, where it ended by one."""
    text: str = ""
    """Without it."""
    log_probs: tuple[float, ...] = ()
    """Of each token, in the distribution that it was sampled from, nats."""
    versions: tuple[int, ...] = ()
    """Of the weights that sampled each token: the number of optimizer updates that they had."""
    finish: Literal["stop", "length", "lost"] | str
    """An end token or stop text; `max_new_tokens`; it never came back."""
    reward: float | None = None
    parts: dict[str, float | None] = {}
    failure: RewardFailure | None = None
    advantage: float | None = None
    """None where it was not compared with its group."""
    trained: bool = False
    """Its tokens had a part in an update; so they are billed as `train.rl`."""
    seconds: dict[str, float] = {}
    """`generate` and `reward`."""
