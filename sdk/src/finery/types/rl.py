"""Reinforcement learning: sample answers, reward them, make the better ones likelier."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from finery.types.base import Request
from finery.types.environments import EnvironmentSpec
from finery.types.ids import EnvironmentId
from finery.types.spec import JobSpec, Optimization, Resources, Schedule

Algorithm = Literal["grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo"]
AdvantageScale = Literal["group", "batch", "none"]
LossNormalization = Literal["sequence", "token", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
Overlong = Literal["keep", "mask", "penalize"]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=64)]


def _comparable(samples: int) -> int:
    if samples < 2:
        raise ValueError(f"expected at least 2, as rollouts of a prompt are compared with each other, found {samples}")
    return samples


class RlHyperparameters(Optimization):
    """What is None is as the algorithm's source has it: see `rl_algorithms`; the job shows which."""

    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-4
    schedule: Schedule = "constant"
    algorithm: Algorithm = "grpo"
    """`grpo` (Shao et al. 2024, arXiv:2402.03300), `dr_grpo` (Liu et al. 2025, arXiv:2503.20783), `rloo` (Ahmadian et
    al. 2024, arXiv:2402.14740), `dapo` (Yu et al. 2025, arXiv:2503.14476), `gspo` (Zheng et al. 2025,
    arXiv:2507.18071), `cispo` (MiniMax 2025, arXiv:2506.13585). It sets what the fields below leave open."""
    steps: Annotated[int, Field(ge=1, le=1_000_000)] = 50
    """Batches of rollouts, each with all its updates."""
    prompts_per_step: Annotated[int, Field(ge=1, le=4096)] = 4
    samples_per_prompt: Annotated[
        int, Field(le=1024, json_schema_extra={"minimum": 2}), AfterValidator(_comparable)
    ] = 8
    """Rollouts of one prompt: a group. At least 2, as each is compared with the others."""
    updates_per_step: Annotated[int, Field(ge=1, le=64)] = 1
    """Optimizer updates that a step's groups are split over; divides `prompts_per_step`."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=131_072)] = 1024
    """Longer prompts are left out, counted."""
    max_new_tokens: Annotated[int, Field(ge=1, le=32_768)] = 256
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=1)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Leaves out tokens below this part of the likeliest one's probability."""
    stop: Annotated[tuple[StopString, ...], Field(max_length=16, strict=False)] = ()
    """Texts that end an answer, next to the model's end tokens; they stay in it."""
    advantage_scale: AdvantageScale | None = None
    """Divide advantages by the standard deviation of rewards: of the `group`, of the step's `batch`, or by none."""
    loss_normalization: LossNormalization | None = None
    """What the sum over tokens is divided by: each `sequence` by its tokens and then by the number of sequences; all by
    the number of `token`s; or all by a `constant`, sequences × `max_new_tokens`."""
    clip_low: Annotated[float, Field(ge=0, le=1)] | None = None
    clip_high: Annotated[float, Field(ge=0, le=100)] | None = None
    """The policy ratio counts between 1 - clip_low and 1 + clip_high."""
    kl_coefficient: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Of the divergence from the starting point; 0 computes no reference."""
    kl_estimator: KlEstimator = "k3"
    """k1 = log(p/r), k2 = k1²/2, k3 = r/p - 1 + k1 (Schulman 2020); p the policy's probability, r the reference's."""
    kl_placement: Literal["loss", "reward"] = "loss"
    dynamic_sampling: bool | None = None
    """Groups whose rewards are all equal are replaced by those of further prompts, in up to `max_resampling` rounds."""
    max_resampling: Annotated[int, Field(ge=1, le=16)] = 3
    overlong: Overlong | None = None
    """Answers that `max_new_tokens` cut off: trained as they are (`keep`), not trained but compared with (`mask`), or
    with a reward that falls over the last `overlong_buffer` tokens, down to 1 less (`penalize`)."""
    overlong_buffer: Annotated[int, Field(ge=1)] | None = None
    """Tokens; `penalize` only. None: a quarter of `max_new_tokens`."""
    importance_cap: Annotated[float, Field(gt=0)] | None = 2.0
    """Sampler and learner compute log-probs differently by rounding, and `top_p` and the like by more: each token's
    loss is weighed by min(cap, learner's probability / sampler's) (truncated importance sampling, Yao et al. 2025).
    None: no correction."""
    min_graded: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Part of a step's rollouts that must get a reward; with fewer the job fails. Those without are neither trained,
    nor billed, nor compared with."""
    eval_prompts: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Prompts that are held out to evaluate on: those of the environment's `held_out_file`, else its last ones."""
    eval_samples: Annotated[int, Field(ge=0, le=256)] = 0
    """Answers sampled to each for pass@k, next to the greedy one."""
    pass_threshold: float = 1.0
    """The reward from which on an answer counts as a pass."""
    target_reward: float | None = None
    """End the job, successfully, when the held-out greedy reward reaches this."""


class Samplers(Request):
    """Accelerators that only sample. 0: the learner's accelerator samples, too, with the same copy of the weights; more
    is not available yet."""

    min: Annotated[int, Field(ge=0, le=1024)] = 0
    max: Annotated[int, Field(ge=0, le=1024)] = 0


class RlResources(Resources):
    samplers: Samplers = Samplers()


class RlJobCreate(JobSpec):
    """The body of `POST /v1/jobs` for reinforcement learning."""

    method: Literal["rl"]
    environment: EnvironmentId | EnvironmentSpec
    """The id of one of your environments, or an environment as it would be created."""
    hyperparameters: RlHyperparameters = RlHyperparameters()
    resources: RlResources = RlResources()
