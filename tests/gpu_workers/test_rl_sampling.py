"""What a step samples: which prompts, with which seeds; what is lost; cases C04 and C16."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finery.types.environments import PromptsEnvironment, ReasoningGymEnvironment
from finery_gpu_workers.environments.types import Grade
from finery_gpu_workers.methods import rollout_files
from finery_gpu_workers.methods.rl_plan import RlPlan
from finery_gpu_workers.methods.rl_report import step_metrics
from finery_gpu_workers.methods.rl_sample import Sampled, enough_graded, sample_step
from finery_gpu_workers.methods.rl_sampling import Asked, Collected, Collector, Deadlines, grade_seconds
from finery_gpu_workers.methods.rl_update import Updated
from finery_gpu_workers.rollout.types import Sampling

from .rl_jobs import CONSTANT, PROMPTS_FILE, Scripted, hyper, prompt, python_grader, rollout, text_of

SAMPLING = Sampling(max_new_tokens=8)
SOON = Deadlines(grade_seconds=0.0, workers=1, margin_seconds=0.05)


def collect(scripted: Scripted, prompts: Sequence[int], samples: int = 2) -> Collected:
    asked = [Asked(n, prompt(place, (place,)), tuple(range(samples))) for n, place in enumerate(prompts)]
    return Collector(scripted, scripted, text_of, SOON).collect(asked, SAMPLING, 0)


class ByPrompt(RlPlan):
    """Seeds are the samples' numbers, so that scripted rewards can name them."""

    def seeds(self, number: int, round_: int, group: int) -> tuple[int, ...]:
        return tuple(range(self.hyper.samples_per_prompt))


def one_step(scripted: Scripted, count: int, **changes: object) -> Sampled:
    plan = ByPrompt(count, hyper(**changes), seed=3)
    collector = Collector(scripted, scripted, text_of, SOON)
    return sample_step(1, plan, lambda n: prompt(n, (n,)), collector, SAMPLING, 0)


# ---- the plan


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**63 - 1), st.integers(1, 60))
def test_prompts_of_a_step_are_different_ones_while_there_are_enough(
    count: int, wanted: int, seed: int, step: int
) -> None:
    plan = RlPlan(count, hyper(prompts_per_step=wanted, steps=60), seed)
    found = plan.step(step)
    assert len(found.prompts) == wanted
    assert len(set(found.prompts)) == min(count, wanted)
    assert set(found.prompts) <= set(range(count))
    assert plan.step(step) == found
    further = plan.further(step, wanted, set(found.prompts))
    assert len(further) == min(wanted, max(0, count - wanted))
    assert not set(further) & set(found.prompts)


def test_an_epoch_has_every_prompt_once_and_the_next_another_order() -> None:
    plan = RlPlan(12, hyper(prompts_per_step=4, steps=9), seed=0)
    epochs = [[p for step in range(first, first + 3) for p in plan.step(step).prompts] for first in (1, 4, 7)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [(plan.step(s).epoch, plan.step(s).position) for s in (1, 3, 4)] == [(0, 0), (0, 8), (1, 0)]


def test_every_rollout_has_a_seed_of_its_own() -> None:
    plan = RlPlan(4, hyper(samples_per_prompt=8, eval_samples=8), seed=0)
    seeds = [s for step in (1, 2) for round_ in (0, 1) for group in (0, 1) for s in plan.seeds(step, round_, group)]
    seeds += [seed for place in range(4) for seed in plan.evaluation_seeds(place)]
    assert len(set(seeds)) == len(seeds) == 2 * 2 * 2 * 8 + 4 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert RlPlan(4, plan.hyper, seed=1).seeds(1, 0, 0) != plan.seeds(1, 0, 0)


def test_the_learning_rate_counts_updates() -> None:
    """2 steps of 2 updates, linear without a warm-up: 1, 3/4, 1/2, 1/4 of the peak."""
    given = {"steps": 2, "updates_per_step": 2, "schedule": "linear", "warmup_ratio": 0.0, "learning_rate": 0.4}
    plan = RlPlan(4, hyper(**given), seed=0)
    assert [plan.learning_rate(s, u) for s in (1, 2) for u in (0, 1)] == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_a_plan_refuses_what_is_not_there() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        RlPlan(0, hyper(), 0)
    with pytest.raises(ValueError, match="divisor of 3 prompts_per_step, found 2"):
        RlPlan(4, hyper(prompts_per_step=3, updates_per_step=2), 0)
    for step in (0, 51):
        with pytest.raises(ValueError, match="expected 1 to 50"):
            RlPlan(4, hyper(steps=50), 0).step(step)


# ---- what is lost


def test_every_rollout_that_is_asked_for_comes_back_graded() -> None:
    scripted = Scripted({(7, 0): 1.0, (7, 1): 0.25, (9, 1): None})
    found = collect(scripted, [7, 9])
    assert [(one.group, one.sample, one.reward) for one in found.rollouts] == [
        (0, 0, 1.0), (0, 1, 0.25), (1, 0, 0.0), (1, 1, None),
    ]  # fmt: skip
    assert found.lost == []
    assert found.rollouts[3].failure is not None
    assert found.rollouts[3].failure.code == "error"


def test_c16_a_lost_rollout_is_asked_for_again_with_the_same_seed() -> None:
    scripted = Scripted({(5, 1): 0.5}, dropped={(5, 1): 1})
    found = collect(scripted, range(8))
    assert scripted.asked.count((5, 1)) == 2
    assert len(scripted.asked) == 17
    assert [(one.prompt.place, one.sample) for one in found.lost] == [(5, 1)]
    assert found.rollouts[11].reward == 0.5
    assert all(one.failure is None for one in found.rollouts)


def test_c16_a_rollout_that_never_comes_back_is_recorded_and_the_others_go_on() -> None:
    scripted, begun = Scripted(dropped={(5, 0): 99, (5, 1): 99}), time.monotonic()
    found = collect(scripted, range(8))
    assert time.monotonic() - begun < 5
    failed = [one for one in found.rollouts if one.failure]
    assert [(one.prompt.place, one.finish, one.tokens) for one in failed] == [(5, "lost", [])] * 2
    assert {one.failure.code for one in failed if one.failure} == {"lost"}
    assert len(found.rollouts) == 16
    row = rollout_files.row("job", 1, "train", 10, failed[0])
    assert (row.id, row.finish, row.reward, row.log_probs) == ("roll_1_10", "lost", None, ())
    notices = [one.data_json for one in rollout_files.warnings(found.rollouts, found.lost)]
    assert '"rollout_lost"' in notices[1]
    assert '"prompt": 5' in notices[1]


def test_c16_a_grade_that_does_not_come_is_asked_for_again_then_given_up() -> None:
    once, begun = collect(Scripted({(3, 0): 1.0}, late={(3, 0): 1}), [3]), time.monotonic()
    assert (once.rollouts[0].reward, [one.sample for one in once.lost]) == (1.0, [0])
    never = collect(Scripted(late={(3, 0): 99}), [3])
    assert time.monotonic() - begun < 5
    assert never.rollouts[0].failure is not None
    assert never.rollouts[0].failure.code == "lost"
    assert never.rollouts[1].reward == 0.0


def test_deadlines_grow_with_what_waits_for_a_grader() -> None:
    assert Deadlines(grade_seconds=2.0, workers=4, margin_seconds=30.0).allowed(9) == 3 * 2 + 30
    grader = python_grader("return 1")
    one = PromptsEnvironment.model_validate({"type": "prompts", "file": PROMPTS_FILE, "grader": grader})
    both = {
        "type": "multi",
        "graders": {"a": grader, "b": grader | {"timeout_seconds": 7.0}},
        "calculate_output": "a+b",
    }
    several = PromptsEnvironment.model_validate({"type": "prompts", "file": PROMPTS_FILE, "grader": both})
    assert (grade_seconds(one), grade_seconds(several)) == (5.0, 12.0)
    assert grade_seconds(ReasoningGymEnvironment(type="reasoning_gym", task="chain_sum")) > 0
    plain = PromptsEnvironment.model_validate({"type": "prompts", "file": PROMPTS_FILE, "grader": CONSTANT})
    assert grade_seconds(plain) > 0


@pytest.mark.parametrize("reward", [math.nan, math.inf, None])
def test_c02_a_reward_that_is_no_number_is_a_failure_never_a_reward(reward: float | None) -> None:
    one = rollout(0, 0, 1.0, grade=Grade(reward=reward))
    assert one.reward is None
    assert one.failure is not None
    assert one.failure.code == "invalid_reward"


# ---- dynamic sampling


GROUPS = [(0.5, 0.5), (0.0, 1.0), (1.0, 1.0)]


def test_c04_of_three_groups_one_is_kept() -> None:
    scripted = Scripted({(p, s): reward for p, pair in enumerate(GROUPS) for s, reward in enumerate(pair)})
    found = one_step(scripted, 3, prompts_per_step=3, dynamic_sampling=True)
    assert [one.prompt.place for one in found.kept] == [1, 1]
    assert len(found.rollouts) == 6
    dropped = [one for one in found.rollouts if one.prompt.place != 1]
    assert [(one.advantage, one.trained) for one in dropped] == [(0.0, False)] * 4
    metrics = step_metrics(found, Updated(), reference=False)
    assert (metrics["groups"], metrics["zero_variance_groups"], metrics["kept_groups"]) == (3, 2, 1)


def test_c04_further_prompts_replace_groups_that_say_nothing() -> None:
    """Of 8 prompts only 2 and 5 have different rewards; a step wants 2 groups."""
    scripted = Scripted({(2, 1): 1.0, (5, 0): 1.0})
    found = one_step(scripted, 8, dynamic_sampling=True, max_resampling=16)
    assert {one.prompt.place for one in found.kept} == {2, 5}
    groups = [one.group for one in found.rollouts if one.sample == 0]
    assert groups == list(range(len(groups)))
    places = [one.prompt.place for one in found.rollouts if one.sample == 0]
    assert len(set(places)) == len(places)


def test_rounds_are_bounded_and_a_step_may_keep_nothing() -> None:
    scripted = Scripted()
    found = one_step(scripted, 100, dynamic_sampling=True, max_resampling=3)
    assert found.kept == []
    assert len(found.rollouts) == (1 + 3) * 2 * 2


def test_without_dynamic_sampling_every_group_is_kept() -> None:
    found = one_step(Scripted(), 8)
    assert found.kept == found.rollouts
    assert len(found.rollouts) == 4


def test_a_step_whose_graders_fail_asks_for_no_more() -> None:
    scripted = Scripted({(p, s): None for p in range(8) for s in range(2)})
    found = one_step(scripted, 8, dynamic_sampling=True)
    assert len(found.rollouts) == 4
    assert not enough_graded(found.rollouts, hyper())


@pytest.mark.parametrize(("min_graded", "enough"), [(0.55, True), (0.550001, False), (1.0, False)])
def test_what_is_enough_is_the_same_for_steps_and_evaluations(min_graded: float, enough: bool) -> None:
    """11 of 20 are 0.55, though 0.55 × 20 is 11.000000000000002."""
    rollouts = [rollout(0, n, 1.0 if n < 11 else None) for n in range(20)]
    assert enough_graded(rollouts, hyper(min_graded=min_graded)) == enough
