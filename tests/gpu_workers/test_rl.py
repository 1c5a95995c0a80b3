"""RL jobs, whole: the real worker, the tiny model, real graders."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file

from finery.types.methods import FullWeights
from finery.types.reasons import JobReason
from finery.types.rollouts import Rollout
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.losses import policy
from finery_gpu_workers.methods import rl_run, rl_terms, rl_update
from finery_gpu_workers.methods.rl_plan import RlPlan
from finery_gpu_workers.rollout import engine
from finery_testing.control_plane import FakeControlPlane
from finery_testing.tiny import EOS, IM_END, make_tiny_model

from .conftest import MakeJob, ended, goes_on, last_manifest, stands_on, trained
from .rl_jobs import CONSTANT, HAS_A, SHARE_OF_A, hyper, python_grader, rl_job, rl_rows

SLOW = pytest.mark.slow
FAST, SLOWER = ["dapo", "gspo"], ["dr_grpo", "rloo", "cispo"]


def usage(control: FakeControlPlane, step: int) -> dict[str, int]:
    (message,) = [one for one in control.steps if one.step == step]
    assert {one.unit for one in message.usage} <= {f"step:{step}", f"eval:{step}"}
    return {one.sku: one.quantity for one in message.usage}


def notices(control: FakeControlPlane, code: str) -> list[dict[str, Any]]:
    found = [json.loads(one.data_json) for step in control.steps for one in step.notices if one.type == "warning"]
    return [one for one in found if one["code"] == code]


def test_it_learns_and_keeps_every_rollout(make_job: MakeJob) -> None:
    """Lower-case letters: 26 of 261 tokens at the beginning."""
    big = {"prompts_per_step": 4, "samples_per_prompt": 8, "max_new_tokens": 4, "steps": 15, "learning_rate": 3e-2}
    grader = python_grader("return sum(c.islower() for c in text) / max(1, len(text))")
    control = trained(rl_job(make_job, grader, adapter=FullWeights(type="full"), **big))
    assert ended(control) == JobReason.COMPLETED
    rewards = [step.metrics["reward"] for step in control.steps]
    assert sum(rewards[:2]) / 2 < 0.2
    assert sum(rewards[-2:]) / 2 > 0.9
    updates = 0
    for step in control.steps:
        rows = control.rollouts(step.step)
        assert [Rollout.model_validate(row).id for row in rows] == [f"roll_{step.step}_{n}" for n in range(32)]
        assert [(row["group"], row["sample"]) for row in rows] == [(g, s) for g in range(4) for s in range(8)]
        assert {version for row in rows for version in row["versions"]} == {updates}
        updates += int(step.metrics["updates"])
        assert step.metrics["reward"] == pytest.approx(sum(row["reward"] for row in rows) / 32)
        assert step.metrics["updates"] == any(row["advantage"] for row in rows)
        if step.metrics["updates"]:
            assert (step.metrics["ratio_mean"], step.metrics["clip_fraction"]) == (1.0, 0.0)
    manifest = last_manifest(control)
    assert manifest["trained_tokens"] == sum(usage(control, n).get("train.rl", 0) for n in range(1, 16))
    assert manifest["spec"]["method"] == "rl"
    assert manifest["validation_reward"] is None


def test_what_is_billed_is_what_was_sampled_and_trained(make_job: MakeJob) -> None:
    control = trained(rl_job(make_job))
    assert ended(control) == JobReason.COMPLETED
    for step in (1, 2, 3):
        rows, found = control.rollouts(step), usage(control, step)
        prompts = {row["group"]: len(row["prompt_tokens"]) for row in rows}
        assert found["rollout.prefill"] == sum(prompts.values())
        assert found["rollout.prefill_cached"] == 3 * sum(prompts.values())
        assert found["rollout.generated"] == sum(len(row["tokens"]) for row in rows)
        assert found.get("train.rl", 0) == sum(len(row["tokens"]) for row in rows if row["trained"])
        # Equal groups are trained like others where another one has something to say.
        assert {row["trained"] for row in rows} == {any(row["advantage"] for row in rows)}
        for row in rows:
            assert len(row["tokens"]) == len(row["log_probs"]) == len(row["versions"])
            ended_by_token = row["tokens"][-1] in (IM_END, EOS)
            assert row["finish"] == ("stop" if ended_by_token else "length")
            assert ended_by_token or len(row["tokens"]) == 6


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_sampler_and_learner_agree_but_for_rounding_at_any_temperature(make_job: MakeJob, temperature: float) -> None:
    """At a learning rate that moves nothing: 3 steps of the same policy, in float32."""
    control = trained(rl_job(make_job, SHARE_OF_A, temperature=temperature, learning_rate=1e-12, seed=4, steps=2))
    gaps = [step.metrics["sampler_gap"] for step in control.steps if "sampler_gap" in step.metrics]
    assert gaps
    assert max(gaps) < 1e-5
    means = [step.metrics["importance_mean"] for step in control.steps if "importance_mean" in step.metrics]
    assert means == pytest.approx([1.0] * len(means), abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"kl_coefficient": 0.1}, {"dynamic_sampling": True}], ids=str)
def test_a_constant_reward_leaves_the_weights_as_they_are_and_says_so(make_job: MakeJob, options: Any) -> None:
    control = trained(rl_job(make_job, CONSTANT, checkpoint_every=1, weight_decay=0.1, **options))
    assert ended(control) == JobReason.COMPLETED
    numbers = [load_file(control.store / one.prefix / "adapter_model.safetensors") for one in control.checkpoints]
    assert len(numbers) == 3
    for name, value in numbers[0].items():
        assert value.equal(numbers[2][name])
        assert not value.any() or "lora_B" not in name  # as it began
    groups = 8 if "dynamic_sampling" in options else 2
    assert all(step.metrics["zero_variance_groups"] == step.metrics["groups"] == groups for step in control.steps)
    assert all(step.metrics["updates"] == step.metrics["kept_groups"] == 0 for step in control.steps)
    assert all(step.metrics["loss"] == step.metrics["grad_norm"] == 0 for step in control.steps)
    for step in (1, 2, 3):  # scored and billed, as the algorithm has it; dynamic sampling leaves such groups out
        rows = control.rollouts(step)
        assert all(row["advantage"] == 0 and row["trained"] == (groups == 2) for row in rows)
        assert usage(control, step).get("train.rl", 0) == sum(len(row["tokens"]) for row in rows if row["trained"])
    (warning,) = notices(control, "nothing_trained")
    assert "3" in warning["message"]


def test_a_failed_rollout_is_neither_trained_nor_billed_nor_compared_with(make_job: MakeJob) -> None:
    body = "number = sum(map(ord, text))\nif number % 3 == 0:\n    raise ValueError('no')\nreturn number % 2"
    control = trained(rl_job(make_job, python_grader(body), samples_per_prompt=8, min_graded=0.1))
    assert ended(control) == JobReason.COMPLETED
    failed = 0
    for step in (1, 2, 3):
        rows = control.rollouts(step)
        for group in range(2):
            members = [row for row in rows if row["group"] == group]
            graded = [row for row in members if row["failure"] is None]
            mean = sum(row["reward"] for row in graded) / len(graded)
            spread = math.sqrt(sum((row["reward"] - mean) ** 2 for row in graded) / max(1, len(graded) - 1))
            for row in graded:
                assert row["advantage"] == pytest.approx((row["reward"] - mean) / spread if spread else 0.0, abs=1e-9)
        lost = [row for row in rows if row["failure"]]
        failed += len(lost)
        assert all(row["advantage"] is None and not row["trained"] and row["reward"] is None for row in lost)
        assert usage(control, step)["rollout.generated"] == sum(
            len(row["tokens"]) for row in rows if not row["failure"]
        )
        assert control.steps[step - 1].metrics["failed_rollouts"] == len(lost)
    assert failed > 3
    warnings = notices(control, "reward_failed")
    assert sum(one["details"][0]["count"] for one in warnings) == failed
    assert warnings[0]["details"][0]["grader"] == "python"
    assert "no" in warnings[0]["message"]


def test_too_many_failures_end_the_job_and_are_kept(make_job: MakeJob) -> None:
    control = trained(rl_job(make_job, python_grader("return float('nan')")))
    assert ended(control) == JobReason.REWARDS_FAILED
    assert control.finished is not None
    assert control.finished.error is not None
    assert "found 0" in control.finished.error.message
    assert "invalid_reward" in control.finished.error.message
    (step,) = control.steps
    assert not step.usage
    assert all(row["failure"]["code"] == "invalid_reward" for row in control.rollouts(1))


def test_what_was_trained_before_the_rewards_failed_is_published(make_job: MakeJob) -> None:
    bad = sorted(int(n) for n in RlPlan(6, hyper(steps=3), 0).step(3).prompts)
    grader = python_grader(f"if item['number'] in {bad}:\n    raise ValueError('no')\nreturn len(set(text))")
    control = trained(rl_job(make_job, grader, rl_rows(6)))
    assert ended(control) == JobReason.REWARDS_FAILED
    assert "train.rl" not in usage(control, 3)
    assert [(one.step, one.final) for one in control.checkpoints] == [(2, False)]
    assert last_manifest(control)["metrics"]["step"] == 2


def test_c02_a_step_that_is_not_finite_ends_the_job_as_failed(make_job: MakeJob) -> None:
    control, calls = rl_job(make_job, SHARE_OF_A, seed=4), iter(range(100))
    terms = policy.policy_terms

    def breaking(*args: Any, **kwargs: Any) -> Any:
        found = terms(*args, **kwargs)
        return found if next(calls) < 1 else policy.PolicyTerms(found.losses * math.nan, found.ratios, found.clipped)

    with mock.patch.object(rl_update, "policy_terms", breaking):
        trained(control)
    assert ended(control) == JobReason.NON_FINITE_LOSS
    assert control.finished is not None
    assert control.finished.error is not None
    assert control.finished.error.code == "non_finite_loss"
    assert "train.rl" not in usage(control, control.steps[-1].step)
    assert not control.checkpoints


def test_logits_that_are_not_finite_end_the_job_as_failed(make_job: MakeJob) -> None:
    def broken(*_args: Any) -> Any:
        raise WorkerError("non_finite_logits", "expected finite logits of the model, found NaN or infinity")

    with mock.patch.object(engine, "draw", broken):
        control = trained(rl_job(make_job))
    assert ended(control) == JobReason.NON_FINITE_LOSS


def test_c14_special_tokens_that_were_sampled_are_trained_as_they_are(make_job: MakeJob) -> None:
    """With random weights special tokens come up; their ids are what the learner's targets are."""
    targets: list[list[int]] = []
    packed = rl_terms.packed

    def spying(rollouts: Any) -> Any:
        batch = packed(rollouts)
        scored = batch.targets[batch.weights > 0].split(batch.scored_counts)
        targets.extend(part.tolist() for part in scored)
        return batch

    control = rl_job(make_job, SHARE_OF_A, samples_per_prompt=16, max_new_tokens=12, seed=1)
    with mock.patch.object(rl_update, "packed", spying):
        trained(control)
    rows = [row for step in (1, 2, 3) for row in control.rollouts(step) if row["trained"]]
    assert targets == [row["tokens"] for row in rows]
    assert any(token >= 256 for ids in targets for token in ids)


def test_messages_are_rendered_once_and_kept(make_job: MakeJob) -> None:
    rows = [{"messages": [{"role": "user", "content": f"Say {n}."}], "answer": str(n)} for n in range(4)]
    grader = HAS_A | {"reference": "{{ item.answer }}"}
    control = trained(rl_job(make_job, grader, rows))
    assert ended(control) == JobReason.COMPLETED
    row = control.rollouts(1)[0]
    assert row["messages"] == row["item"]["messages"]
    assert row["prompt_text"] is None
    rendered = f"<|im_start|>user\n{row['messages'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert len(row["prompt_tokens"]) == len(rendered.replace("<|im_start|>", "s").replace("<|im_end|>", "e"))
    samples = [json.loads(one.data_json) for one in control.steps[0].notices if one.type == "rollout"]
    assert 1 <= len(samples) <= 2
    assert samples[0]["prompt"].startswith("Say ")


@pytest.mark.parametrize(
    "algorithm", ["dapo", "gspo", *(pytest.param(a, marks=SLOW) for a in ("dr_grpo", "rloo", "cispo"))]
)
def test_every_algorithm_runs_with_what_goes_with_it(make_job: MakeJob, algorithm: str) -> None:
    options: dict[str, Any] = {"algorithm": algorithm, "updates_per_step": 2, "kl_coefficient": 0.01, "top_p": 0.9}
    control = trained(rl_job(make_job, SHARE_OF_A, samples_per_prompt=8, **options))
    assert ended(control) == JobReason.COMPLETED
    assert all(math.isfinite(value) for step in control.steps for value in step.metrics.values())
    assert any(step.metrics["updates"] == 2 for step in control.steps)
    assert any(step.metrics.get("kl", 0) > 0 for step in control.steps)
    # The sampler's distribution holds 0.9 of the learner's or more: its tokens are that much likelier in it.
    weights = [step.metrics["importance_mean"] for step in control.steps if "importance_mean" in step.metrics]
    assert all(0.9 < weight < 0.98 for weight in weights)
    penalised = algorithm in ("dapo", "cispo")
    assert all(("overlong" in row["parts"]) == penalised for row in control.rollouts(1) if row["reward"] is not None)


@pytest.mark.parametrize("start", ["adapter", "merge", "full"])
def test_b08_the_reference_is_the_checkpoint_that_the_job_goes_on_from(make_job: MakeJob, start: str) -> None:
    """The divergence from it is 0 to the last bit before the first update, and not later."""
    adapter: dict[str, Any] = {"adapter": FullWeights(type="full")} if start == "full" else {}
    options: dict[str, Any] = {"learning_rate": 3e-2, "samples_per_prompt": 16}
    first = trained(rl_job(make_job, SHARE_OF_A, **options, **adapter))
    assert ended(first) == JobReason.COMPLETED
    assert any(step.metrics["updates"] for step in first.steps)
    onto = goes_on(first) if start == "adapter" else stands_on(first, "full" if start == "full" else "merge")
    second = trained(rl_job(make_job, SHARE_OF_A, onto=onto, kl_coefficient=0.1, steps=4, **options, **adapter))
    assert ended(second) == JobReason.COMPLETED
    divergences = [step.metrics["kl"] for step in second.steps if "kl" in step.metrics]
    assert divergences[0] == 0.0
    assert all(divergence > 0 for divergence in divergences[1:])
    assert len(divergences) > 1


def test_c16_rollouts_that_are_lost_are_named_and_the_job_goes_on(make_job: MakeJob) -> None:
    class Loses(engine.Engine):
        """The third answer of the second group, and again when it is asked for alone."""

        def generate(self, groups: Any, *given: Any) -> Any:
            lost = (1, 2) if len(groups) > 1 else (1, 0)
            return (one for one in super().generate(groups, *given) if (one.group, one.sample) != lost)

    with mock.patch.object(rl_run, "Engine", Loses):
        control = trained(rl_job(make_job, SHARE_OF_A))
    assert ended(control) == JobReason.COMPLETED
    for step in control.steps:
        rows = control.rollouts(step.step)
        (lost,) = [row for row in rows if row["failure"]]
        assert (lost["group"], lost["sample"], lost["finish"], lost["failure"]["code"]) == (1, 2, "lost", "lost")
        assert (lost["tokens"], lost["reward"], lost["advantage"], lost["trained"]) == ([], None, None, False)
        assert (step.metrics["rollouts"], step.metrics["failed_rollouts"]) == (8, 1)
        prompts = {row["group"]: len(row["prompt_tokens"]) for row in rows}
        assert usage(control, step.step)["rollout.prefill_cached"] == 3 * prompts[0] + 2 * prompts[1]
    warnings = notices(control, "rollout_lost")
    assert [one["details"][0]["prompt"] for one in warnings] == [
        next(row["prompt"] for row in control.rollouts(step) if row["group"] == 1) for step in (1, 2, 3)
    ]


def test_answers_end_where_the_checkpoint_that_goes_on_ends_its_turns(make_job: MakeJob, tmp_path: Path) -> None:
    """A model that ends at one token only, taught by SFT to end turns at another."""
    model = make_tiny_model(tmp_path / "base")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    first = trained(make_job(model=model))
    assert ended(first) == JobReason.COMPLETED
    control = trained(rl_job(make_job, SHARE_OF_A, samples_per_prompt=16, model=model, onto=goes_on(first)))
    assert ended(control) == JobReason.COMPLETED
    answers = [row for step in (1, 2, 3) for row in control.rollouts(step)]
    assert any(IM_END in row["tokens"] for row in answers)
    assert not any(IM_END in row["tokens"][:-1] for row in answers)
