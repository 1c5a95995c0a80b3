"""Evaluation of RL on held-out prompts: what it says, that it disturbs nothing, and when it ends a job."""

from __future__ import annotations

from typing import Any

import pytest

from finery.types.environments import RewardFailure
from finery.types.methods import FullWeights
from finery.types.reasons import JobReason
from finery_gpu_workers.environments.types import Grade
from finery_gpu_workers.methods import rl_run
from finery_gpu_workers.methods.rl_eval import evaluate
from finery_gpu_workers.methods.rl_plan import RlPlan
from finery_gpu_workers.methods.rl_sampling import Collector
from finery_gpu_workers.rollout.types import Sampling
from finery_testing.control_plane import FakeControlPlane

from .conftest import MakeJob, ended, last_manifest, trained
from .rl_jobs import CONSTANT, Scripted, hyper, prompt, python_grader, rl_job, text_of
from .test_rl_resume import LOWER
from .test_rl_sampling import SOON


def evaluated(control: FakeControlPlane) -> dict[int, dict[str, float]]:
    return {step.step: dict(step.evaluation.metrics) for step in control.steps if step.HasField("evaluation")}


class BySample(RlPlan):
    def evaluation_seeds(self, prompt: int) -> tuple[int, ...]:
        return tuple(range(1, 1 + self.hyper.eval_samples))


def test_greedy_reward_and_pass_at_k_by_hand() -> None:
    """Greedy: 1, 0, none. Samples that pass: 1 of 4, 4 of 4; of the third prompt one has no reward, so it is in none.

    pass@1 = (1/4 + 1) / 2, pass@2 = (1/2 + 1) / 2, pass@4: both 1.
    """
    rewards: dict[tuple[int, int], float | None] = {(0, 0): 1.0, (1, 0): 0.0, (2, 0): None}
    rewards |= {(0, 2): 0.8} | {(1, n): 1.0 for n in (1, 2, 3, 4)}
    rewards |= {(2, 1): 1.0, (2, 2): 0.9, (2, 3): 0.1, (2, 4): None}
    scripted = Scripted(rewards)
    plan = BySample(9, hyper(eval_samples=4, pass_threshold=0.8), seed=0)
    prompts = [prompt(n, (n,)) for n in range(3)]
    found = evaluate(7, prompts, plan, Sampling(8), Collector(scripted, scripted, text_of, SOON), 3)
    assert found.metrics["reward"] == 0.5
    assert found.metrics["pass_at_1"] == pytest.approx((1 / 4 + 1) / 2)
    assert found.metrics["pass_at_2"] == pytest.approx((1 / 2 + 1) / 2)
    assert found.metrics["pass_at_4"] == 1.0
    assert "pass_at_3" not in found.metrics
    assert 0 <= found.metrics["reward_low"] < 0.5 < found.metrics["reward_high"] <= 1
    assert found.metrics["failed_rollouts"] == 2
    assert found.tokens == 2 * (15 - 2)
    assert [(one.group, one.sample) for one in found.rollouts] == [(g, s) for g in range(3) for s in range(5)]
    assert found.as_dict()["reward"] == 0.5


def test_evaluations_change_nothing_that_trains(make_job: MakeJob) -> None:
    """The same prompts to train on, with and without evaluations in between."""
    often: dict[str, Any] = {"eval_prompts": 2, "eval_samples": 3, "eval_every": 1}
    held_out = [{"prompt": "held out", "number": n} for n in range(2)]
    with_them = trained(rl_job(make_job, LOWER, [*rows(), *held_out], **often))
    without = trained(rl_job(make_job, LOWER, rows()))
    assert sorted(evaluated(with_them)) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        assert ids(with_them.rollouts(step)) == ids(without.rollouts(step))
    weights = [
        next(file.sha256 for file in control.checkpoints[-1].files if file.path == "adapter_model.safetensors")
        for control in (with_them, without)
    ]
    assert weights[0] == weights[1]


def rows() -> list[Any]:
    return [{"prompt": f"Say {n}.", "number": n} for n in range(8)]


def ids(rollouts: list[dict[str, Any]]) -> list[Any]:
    return [(row["prompt"], row["tokens"], row["log_probs"], row["trained"]) for row in rollouts]


def test_held_out_rollouts_are_kept_and_billed_as_evaluation(make_job: MakeJob) -> None:
    control = trained(rl_job(make_job, LOWER, eval_prompts=3, eval_samples=2, checkpoint_every=2))
    assert ended(control) == JobReason.COMPLETED
    assert sorted(evaluated(control)) == [0, 2, 3]
    for step in control.steps:
        if not step.HasField("evaluation"):
            continue
        found = control.rollouts(step.step, evaluation=True)
        assert [row["id"] for row in found] == [f"roll_e{step.step}_{n}" for n in range(9)]
        assert {row["kind"] for row in found} == {"eval"}
        assert {row["prompt"] for row in found} == {9, 10, 11}
        (billed,) = [one for one in step.usage if one.sku == "eval.rl"]
        assert (billed.unit, billed.quantity) == (f"eval:{step.step}", sum(len(row["tokens"]) for row in found))
        assert billed.quantity == step.evaluation.tokens
        greedy = [row["reward"] for row in found if row["sample"] == 0]
        assert step.evaluation.metrics["reward"] == pytest.approx(sum(greedy) / 3)
        assert not step.evaluation.HasField("loss")
    rewards = {one.step: one.validation_reward for one in control.checkpoints}
    assert rewards == {step: pytest.approx(evaluated(control)[step]["reward"]) for step in (2, 3)}
    assert last_manifest(control)["validation_reward"] == pytest.approx(rewards[3])


def test_a_job_ends_where_its_target_is_reached(make_job: MakeJob) -> None:
    """Greedy answers of lower-case letters; the target is reached long before step 40."""
    grader = python_grader("return sum(c.islower() for c in text) / max(1, len(text))")
    options: dict[str, Any] = {"prompts_per_step": 4, "samples_per_prompt": 8, "max_new_tokens": 3, "steps": 40}
    options |= {"eval_prompts": 2, "eval_every": 4, "target_reward": 0.99, "learning_rate": 3e-2}
    control = trained(rl_job(make_job, grader, adapter=FullWeights(type="full"), **options))
    assert ended(control) == JobReason.STOPPED_EARLY
    last = control.steps[-1].step
    assert last < 40
    assert last % 4 == 0
    found = evaluated(control)
    assert found[last]["reward"] >= 0.99
    assert all(one["reward"] < 0.99 for step, one in found.items() if step not in (0, last))
    assert (control.checkpoints[-1].step, control.checkpoints[-1].final) == (last, True)


def test_a_job_ends_when_the_reward_has_not_risen_for_too_long(make_job: MakeJob) -> None:
    control = trained(rl_job(make_job, CONSTANT, eval_prompts=2, eval_every=1, early_stopping_patience=2, steps=9))
    assert ended(control) == JobReason.STOPPED_EARLY
    # The one before training is the first best; two in a row without a better one.
    assert [step.step for step in control.steps] == [0, 1, 2]
    assert control.checkpoints[-1].final


def test_a_broken_grader_ends_the_job_before_anything_is_trained(make_job: MakeJob) -> None:
    control = trained(rl_job(make_job, python_grader("raise KeyError('x')"), eval_prompts=2))
    assert ended(control) == JobReason.REWARDS_FAILED
    assert [step.step for step in control.steps] == [0]
    assert all(row["failure"]["code"] == "error" for row in control.rollouts(0, evaluation=True))


def test_what_was_trained_is_published_where_the_last_evaluation_gets_no_rewards(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the last step a checkpoint is the final one: the control plane takes no other."""

    def failing(step: int, *others: Any) -> Any:
        found = evaluate(step, *others)
        for one in found.rollouts if step == 3 else ():
            one.grade = Grade(failure=RewardFailure(code="error", message="no"))
        return found

    monkeypatch.setattr(rl_run, "evaluate", failing)
    control = trained(rl_job(make_job, LOWER, eval_prompts=2))
    assert ended(control) == JobReason.REWARDS_FAILED
    assert [(one.step, one.final) for one in control.checkpoints] == [(3, True)]
