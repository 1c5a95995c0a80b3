"""RL jobs for tests: prompts, graders, rollouts as the loop holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from finery.types.environments import RewardFailure
from finery.types.ids import new_id
from finery.types.rl import RlHyperparameters
from finery.types.rl_algorithms import resolved
from finery_gpu_workers.data.prompts import Prompt
from finery_gpu_workers.environments.types import Answer, Grade
from finery_gpu_workers.methods.rl_sampling import Rollout, ids_digest
from finery_gpu_workers.rollout.types import Completion, Group, Sampling
from finery_testing.control_plane import FakeControlPlane

from .conftest import MakeJob

PROMPTS_FILE = new_id("file", 1)
CONSTANT: dict[str, Any] = {"type": "string_check", "operation": "ne", "reference": "never"}
"""1 for every answer."""
HAS_A: dict[str, Any] = {"type": "string_check", "operation": "ilike", "reference": "a"}
"""1 where there is an a, which a random byte is at 2 in 261."""


def rl_rows(count: int = 12) -> list[Any]:
    return [{"prompt": f"Say {n}.", "number": n} for n in range(count)]


def python_grader(body: str) -> dict[str, Any]:
    """`body`: lines of `grade(sample, item)`; `text` is the answer."""
    lines = "\n".join(f"    {line}" for line in ("text = sample['output_text']", *body.splitlines()))
    return {"type": "python", "source": f"def grade(sample, item):\n{lines}\n", "timeout_seconds": 5.0}


SHARE_OF_A = python_grader("return sum(c in 'aA' for c in text) / max(1, len(text))")


def rl_job(make_job: MakeJob, grader: dict[str, Any] = HAS_A, rows: Any = None, **options: Any) -> FakeControlPlane:
    """A small one: 3 steps of 2 prompts, 4 rollouts each, 6 tokens at most."""
    small = {"steps": 3, "prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 6, "checkpoint_every": 100}
    environment = {"type": "prompts", "file": PROMPTS_FILE, "grader": grader}
    spec = {"environment": environment} | options.pop("spec", {})
    return make_job(rl_rows() if rows is None else rows, method="rl", spec=spec, **(small | options))


def hyper(**changes: Any) -> RlHyperparameters:
    small = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 8}
    return resolved(RlHyperparameters(**(small | changes)))


def prompt(place: int = 0, tokens: Sequence[int] = (1, 2, 3)) -> Prompt:
    return Prompt(place, np.array(tokens, dtype=np.int32), (), f"prompt {place}", {"prompt": f"prompt {place}"})


def rollout(
    group: int, sample: int, reward: float | None, tokens: Sequence[int] = (5, 6), *, finish: Any = "stop", **more: Any
) -> Rollout:
    """Graded with `reward`; None: it failed."""
    done = Completion(group, sample, list(tokens), [-1.0] * len(tokens), [0] * len(tokens), finish)
    failure = None if reward is not None else RewardFailure(code="timeout", message="too late", grader="python")
    grade = Grade(reward=reward, failure=failure)
    one = Rollout(group, sample, prompt(group), 0, done, ids_digest(list(tokens)), "text", grade)
    for name, value in more.items():
        setattr(one, name, value)
    return one


@dataclass
class Scripted:
    """A sampler and rewards in one: token ids say group and sample; it drops what it is told to, so many times.

    The text of an answer is its ids, and the reward of the answer is looked up in `rewards` by (prompt, sample).
    """

    rewards: dict[tuple[int, int], float | None] = field(default_factory=dict)
    dropped: dict[tuple[int, int], int] = field(default_factory=dict)
    """(prompt, sample) → how many times its rollout is lost."""
    late: dict[tuple[int, int], int] = field(default_factory=dict)
    """The same for its grade."""
    asked: list[tuple[int, int]] = field(default_factory=list)
    """(prompt, seed) of every rollout, in order."""
    closed: bool = False

    def generate(self, groups: Iterable[Group], sampling: Sampling, version: int) -> Iterator[Completion]:
        for group in groups:
            place = group.prompt[0]
            for n, seed in enumerate(group.seeds):
                self.asked.append((place, seed))
                if not take(self.dropped, (place, seed)):
                    yield Completion(group.key, n, [place, seed], [-1.0] * 2, [version] * 2, "stop")

    def submit(self, answer: Answer) -> Future[Grade]:
        key, future = key_of(answer.output_text), Future[Grade]()
        if not take(self.late, key):
            reward = self.rewards.get(key, 0.0)
            failure = None if reward is not None else RewardFailure(code="error", message="broken", grader="g")
            future.set_result(Grade(reward=reward, failure=failure))
        return future

    def close(self) -> None:
        self.closed = True


def text_of(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def key_of(text: str) -> tuple[int, int]:
    first, second = text.split()
    return int(first), int(second)


def take(budget: dict[tuple[int, int], int], key: tuple[int, int]) -> bool:
    budget[key] = budget.get(key, 0) - 1
    return budget[key] >= 0
