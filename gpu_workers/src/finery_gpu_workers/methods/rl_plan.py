"""Which prompts a step samples, and with which seeds: pure functions of the job's seed, so that a resumed run goes on.

Every epoch shuffles the prompts by (seed, epoch) and gives each step `prompts_per_step` of them, all different; what is
left over at its end waits for another epoch's order. Fewer prompts than a step wants are repeated, as groups of their
own. Further rounds of a step (dynamic sampling) take prompts that it has not had, in an order of the step's own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from finery.types.rl import RlHyperparameters
from finery_gpu_workers.data.packing import Ints
from finery_gpu_workers.schedules import learning_rate
from finery_gpu_workers.seeds import derive


@dataclass(frozen=True)
class StepPrompts:
    epoch: int
    """From 0."""
    position: int
    """Prompts of the epoch that came before."""
    prompts: tuple[int, ...]


@dataclass(frozen=True)
class RlPlan:
    """All steps of a job over `count` prompts."""

    count: int
    hyper: RlHyperparameters
    seed: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError("expected at least one prompt, found none")
        prompts, updates = self.hyper.prompts_per_step, self.hyper.updates_per_step
        if prompts % updates:
            raise ValueError(f"updates_per_step: expected a divisor of {prompts} prompts_per_step, found {updates}")

    @property
    def total_steps(self) -> int:
        return self.hyper.steps

    def step(self, number: int) -> StepPrompts:
        """The first round of step 1 … total_steps."""
        if not 1 <= number <= self.hyper.steps:
            raise ValueError(f"step: expected 1 to {self.hyper.steps}, found {number}")
        wanted = self.hyper.prompts_per_step
        epoch, place = divmod(number - 1, max(1, self.count // wanted))
        order = np.resize(_shuffled(self.count, self.seed, epoch), max(self.count, wanted))
        prompts = order[place * wanted : (place + 1) * wanted]
        return StepPrompts(epoch, place * wanted, tuple(prompts.tolist()))

    def further(self, number: int, wanted: int, used: Collection[int]) -> tuple[int, ...]:
        """Up to `wanted` prompts for another round of a step that has used some."""
        order = _shuffled(self.count, derive(self.seed, "further", number), 0).tolist()
        had = set(used)
        return tuple([prompt for prompt in order if prompt not in had][:wanted])

    def seeds(self, number: int, round_: int, group: int) -> tuple[int, ...]:
        """Of a group's rollouts; `group` counts over all rounds of the step."""
        samples = range(self.hyper.samples_per_prompt)
        return tuple(derive(self.seed, "rollout", number, round_, group, sample) for sample in samples)

    def evaluation_seeds(self, prompt: int) -> tuple[int, ...]:
        """The same in every evaluation: what differs between two of them is the policy."""
        return tuple(derive(self.seed, "evaluation", prompt, sample) for sample in range(self.hyper.eval_samples))

    def learning_rate(self, number: int, update: int) -> float:
        """Of update 0 … updates_per_step - 1 of a step; updates that were skipped count."""
        hyper, each = self.hyper, self.hyper.updates_per_step
        shape = hyper.schedule, hyper.warmup_ratio, hyper.decay_ratio
        return learning_rate((number - 1) * each + update + 1, hyper.steps * each, hyper.learning_rate, *shape)


def _shuffled(count: int, seed: int, number: int) -> Ints:
    # As in data/packing.py: raw Philox bits are the same in every numpy.
    bits = np.random.Philox(key=[seed, number]).random_raw(count)
    order: Ints = np.argsort(bits, kind="stable")
    return order
