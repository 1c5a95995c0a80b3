"""Rollouts of a step: sampled by the engine, graded while others are still being sampled, and none waited for for ever.

A rollout that the engine never yields, and a grade that does not come in time, is `lost`: asked for once more, and
recorded as failed when that does not help either.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from finery.types.environments import EnvironmentSpec, RewardFailure, SingleGrader
from finery_gpu_workers.data.prompts import Prompt
from finery_gpu_workers.environments.types import Answer, Grade, Rewards
from finery_gpu_workers.rollout.types import Completion, Group, Sampling

_QUICK_SECONDS = 10.0
"""Allowed to a grader that runs nobody's code."""


class Sampler(Protocol):
    def generate(self, groups: Iterable[Group], sampling: Sampling, version: int) -> Iterator[Completion]: ...


@dataclass(frozen=True)
class Asked:
    """A group that is wanted."""

    number: int
    """Within the step, over all its rounds."""
    prompt: Prompt
    seeds: tuple[int, ...]
    first_sample: int = 0
    """The number of the first rollout in its group."""


@dataclass
class Rollout:
    """One rollout, from its seed to what became of it."""

    group: int
    sample: int
    prompt: Prompt
    seed: int
    completion: Completion | None = None
    """None: it never came back."""
    digest: bytes = b""
    """Of the ids that were sampled."""
    text: str = ""
    """Without the end token."""
    grade: Grade | None = None
    """None: it never came."""
    parts: dict[str, float] = field(default_factory=dict)
    """What was added to the reward before it was compared: a penalty, a divergence."""
    advantage: float | None = None
    trained: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.completion.tokens if self.completion else []

    @property
    def finish(self) -> str:
        return self.completion.finish if self.completion else "lost"

    @property
    def reward(self) -> float | None:
        return None if self.failure else self.grade.reward if self.grade else None

    @property
    def failure(self) -> RewardFailure | None:
        """Why there is no reward."""
        if self.grade is None:
            what = "the grade" if self.completion else "the rollout"
            return RewardFailure(code="lost", message=f"Twice {what} did not come back in time.")
        if self.grade.failure is None and (self.grade.reward is None or not math.isfinite(self.grade.reward)):
            message = f"expected a finite reward, found {self.grade.reward}"
            return RewardFailure(code="invalid_reward", message=message)
        return self.grade.failure


@dataclass(frozen=True)
class Deadlines:
    """How long a batch of grades may take once the last answer is sampled."""

    grade_seconds: float
    """Of one grade, by its own deadline."""
    workers: int
    """Grades at a time."""
    margin_seconds: float = 30.0

    def allowed(self, count: int) -> float:
        return math.ceil(count / self.workers) * self.grade_seconds + self.margin_seconds


def grade_seconds(spec: EnvironmentSpec) -> float:
    """The longest that one grade may take."""
    if spec.type == "reasoning_gym":
        return _QUICK_SECONDS
    if spec.grader.type == "multi":
        return sum(_seconds(grader) for grader in spec.grader.graders.values())
    return _seconds(spec.grader)


def _seconds(grader: SingleGrader) -> float:
    return getattr(grader, "timeout_seconds", _QUICK_SECONDS)


@dataclass
class Collected:
    rollouts: list[Rollout]
    """In the order of their groups and samples: all that were asked for."""
    lost: list[Rollout]
    """Those that had to be asked for twice, or whose grade had."""
    rollout_seconds: float
    reward_seconds: float
    """Waited for grades after the last answer."""


class Collector:
    """Samples and grades. `text_of` gives the text of an answer's tokens."""

    def __init__(
        self,
        sampler: Sampler,
        rewards: Rewards,
        text_of: Callable[[Sequence[int]], str],
        deadlines: Deadlines,
    ) -> None:
        self._sampler = sampler
        self._rewards = rewards
        self._text_of = text_of
        self._deadlines = deadlines

    def collect(self, asked: Sequence[Asked], sampling: Sampling, version: int) -> Collected:
        """Every rollout that is asked for comes back, perhaps without an answer or a grade."""
        rollouts = [
            Rollout(one.number, one.first_sample + n, one.prompt, seed)
            for one in asked
            for n, seed in enumerate(one.seeds)
        ]
        begun = time.monotonic()
        grades = self._sample(rollouts, sampling, version)
        lost = [one for one in rollouts if one.completion is None]
        if lost:
            grades += self._sample(lost, sampling, version)
        sampled = time.monotonic()
        late = self._wait(grades)
        if late:
            self._wait([(one, self._submit(one)) for one in late])
        ended = time.monotonic()
        return Collected(rollouts, lost + late, sampled - begun, ended - sampled)

    def _sample(
        self, wanted: Sequence[Rollout], sampling: Sampling, version: int
    ) -> list[tuple[Rollout, Future[Grade]]]:
        """Fills in completions; a grade is on its way for each."""
        by_group: dict[int, list[Rollout]] = {}
        for one in wanted:
            by_group.setdefault(one.group, []).append(one)
        groups = [
            Group(key=number, prompt=tuple(members[0].prompt.tokens.tolist()), seeds=tuple(one.seed for one in members))
            for number, members in by_group.items()
        ]
        grades = []
        for completion in self._sampler.generate(groups, sampling, version):
            one = by_group[completion.group][completion.sample]
            if one.completion is not None:
                raise RuntimeError(f"group {one.group}, sample {one.sample}: expected one rollout, found another")
            one.completion = completion
            one.digest = ids_digest(completion.tokens)
            ended = completion.tokens[-1] in sampling.stop_ids
            one.text = self._text_of(completion.tokens[:-1] if ended else completion.tokens)
            grades.append((one, self._submit(one)))
        return grades

    def _submit(self, one: Rollout) -> Future[Grade]:
        return self._rewards.submit(Answer(one.text, one.prompt.item, one.prompt.messages))

    def _wait(self, grades: Sequence[tuple[Rollout, Future[Grade]]]) -> list[Rollout]:
        """Fills in grades; those that are late. Raises what a grade raises: a fault of ours."""
        wait([future for _, future in grades], timeout=self._deadlines.allowed(len(grades)))
        late = []
        for one, future in grades:
            if future.done():
                one.grade = future.result()
            else:
                future.cancel()
                late.append(one)
        return late


def ids_digest(tokens: Sequence[int]) -> bytes:
    """Of token ids: what was sampled and what is trained must have the same."""
    return hashlib.sha256(np.asarray(tokens, dtype="<i8").tobytes()).digest()
