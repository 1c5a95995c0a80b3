"""What the steps of an RL run share: one step, one evaluation, one checkpoint taken."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Tokenizer

from finery.types.rl import RlHyperparameters
from finery_gpu_workers import checkpoints, resume
from finery_gpu_workers.checkpoints import Facts, Staged
from finery_gpu_workers.data.folder import end_tokens
from finery_gpu_workers.data.prepared import Prepared
from finery_gpu_workers.data.prompts import Prompt, PromptSet
from finery_gpu_workers.environments.types import Rewards
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.methods import gates
from finery_gpu_workers.methods.opening import Opened
from finery_gpu_workers.methods.rl_eval import Evaluation, evaluate
from finery_gpu_workers.methods.rl_plan import RlPlan
from finery_gpu_workers.methods.rl_report import CpuSeconds, step_metrics
from finery_gpu_workers.methods.rl_sample import Sampled, enough_graded, sample_step
from finery_gpu_workers.methods.rl_sampling import Collector, Deadlines
from finery_gpu_workers.methods.rl_terms import shape_rewards
from finery_gpu_workers.methods.rl_update import Updated, Updater
from finery_gpu_workers.metrics import Clock, StepMetrics, memory_bytes
from finery_gpu_workers.resume import Cursor, Known
from finery_gpu_workers.rollout.engine import Engine
from finery_gpu_workers.rollout.types import Sampling, Spent
from finery_gpu_workers.start import TOKENIZER, start_settings
from finery_gpu_workers.work import Work

MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
ROWS = {"cpu": 64, "cuda": 256}
"""Rollouts that are decoded together."""


@dataclass(frozen=True)
class Result:
    """Of one step."""

    cursor: Cursor
    sampled: Sampled
    updated: Updated
    train_seconds: float
    graded: bool
    """Enough rollouts got a reward; else nothing was trained."""

    @property
    def usable(self) -> bool:
        return self.graded and self.updated.finite


@dataclass
class Run:
    work: Work
    data: Prepared
    plan: RlPlan
    opened: Opened
    rewards: Rewards
    deadlines: Deadlines
    common: dict[str, Any]
    """The manifest's part that all checkpoints share."""
    clock: Clock = field(default_factory=Clock)
    spent: Spent = field(default_factory=Spent)
    known: Known = field(init=False)
    cpu: CpuSeconds = field(default_factory=CpuSeconds)

    def __post_init__(self) -> None:
        self.hyper: RlHyperparameters = self.plan.hyper
        self.learner: Learner = self.opened.learner
        folder = self.opened.start.tokenizer
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        folders = filter(None, (folder, start_settings(self.work)))
        self.ends = list(dict.fromkeys(end for one in folders for end in end_tokens(one, tokenizer)))
        self.sampling = _sampling(self.hyper, self.ends)

        def text_of(ids: Any) -> str:
            return tokenizer.decode(list(ids), skip_special_tokens=False)

        self.prompts = PromptSet(self.data)
        self.held_out: list[Prompt] = []
        if self.data.validation is not None and len(self.data.validation):
            held_out = PromptSet(self.data, "validation")
            self.held_out = [held_out.prompt(n) for n in range(len(held_out))]
        rows = ROWS[self.work.device]
        engine = Engine(self.opened.model, text_of=text_of, max_rows=rows, spent=self.spent)
        self.collector = Collector(engine, self.rewards, text_of, self.deadlines)
        micro = self.hyper.micro_batch_tokens or MICRO_BATCH_TOKENS[self.work.device]
        self.updater = Updater(self.learner, self.hyper, micro, self.clock.in_learner)
        self.parameters = tuple(self.learner.without_gradient())  # before the first step that is all
        self.known = Known(untouched=self.parameters)

    def step(self, number: int, before: Cursor) -> Result:
        """Sampled, graded, trained. Where too few rollouts got a reward, nothing is trained."""
        generated = self.spent.generated
        sampled = sample_step(
            number, self.plan, self.prompts.prompt, self.collector, self.sampling, self.learner.version
        )
        found = sum(len(one.tokens) for one in sampled.rollouts)
        if not sampled.lost and self.spent.generated - generated != found:
            raise RuntimeError(f"generated tokens: expected {self.spent.generated - generated}, found {found}")
        begun, graded = time.monotonic(), enough_graded(sampled.rollouts, self.hyper)
        updated = self._train(number, sampled) if graded else Updated()
        prompts = self.plan.step(number)
        cursor = Cursor(
            step=number,
            epoch=prompts.epoch,
            position=prompts.position + len(prompts.prompts),
            rows=before.rows + len(sampled.rollouts),
            trained_tokens=before.trained_tokens + updated.sums.tokens,
        )
        silent = set(self.learner.without_gradient())
        untouched = tuple(name for name in self.known.untouched if name in silent)
        self.known = replace(self.known, untouched=untouched)
        return Result(cursor, sampled, updated, time.monotonic() - begun, graded)

    def _train(self, number: int, sampled: Sampled) -> Updated:
        shape_rewards(sampled.rollouts, self.hyper)
        updated = self.updater.run(sampled.kept, lambda update: self.plan.learning_rate(number, update))
        trained = sum(len(one.tokens) for one in sampled.rollouts if one.trained)
        if updated.finite and trained != updated.sums.tokens:
            raise RuntimeError(f"trained tokens: expected {trained}, found {updated.sums.tokens}")
        return updated

    def metrics(self, number: int, result: Result) -> dict[str, float]:
        """Of the step that ends here; the next one starts."""
        step_seconds, learner_seconds = self.clock.restart()
        updated, rollouts = result.updated, result.sampled.rollouts
        groups = {one.group: len(one.prompt.tokens) for one in rollouts}
        speed = StepMetrics(
            loss=updated.loss,
            trained_tokens=updated.sums.tokens,
            tokens=sum(groups.values()) + sum(len(one.tokens) for one in rollouts),
            learning_rate=self.plan.learning_rate(number, self.hyper.updates_per_step - 1),
            grad_norm=updated.grad_norm,
            step_seconds=step_seconds,
            learner_seconds=learner_seconds,
            memory_bytes=memory_bytes(self.work.device),
        )
        found = step_metrics(result.sampled, updated, reference=self.updater.uses_reference)
        metrics = speed.as_dict() | found | {"train_seconds": result.train_seconds}
        self.known = replace(self.known, metrics={"step": number} | _lasting(metrics))
        return metrics

    def evaluate(self, step: int) -> Evaluation:
        """The held-out prompts; changes nothing."""
        return evaluate(step, self.held_out, self.plan, self.sampling, self.collector, self.learner.version)

    def remember(self, evaluation: Evaluation) -> None:
        patience = self.known.patience.after(-evaluation.reward, self.hyper.early_stopping_min_delta)
        self.known = replace(self.known, evaluation=evaluation.as_dict(), patience=patience)

    def is_over(self, cursor: Cursor) -> bool:
        """No step is left, the held-out reward is where it should be, or it has not risen for too long."""
        if cursor.step == self.plan.total_steps:
            return True
        last, target = self.known.evaluation or {}, self.hyper.target_reward
        # Not that before the first step: a job ends with a checkpoint, and there is none yet.
        reached = target is not None and cursor.step > 0 and last.get("step") == cursor.step
        if reached and last.get("reward", float("-inf")) >= target:
            return True
        return cursor.step > 0 and self.known.patience.is_over(self.hyper)

    def evaluation_due(self, step: int) -> bool:
        """Every checkpoint has one, so that all of them can be compared."""
        every = self.hyper.eval_every
        due = step in (0, self.plan.total_steps) or step % self.hyper.checkpoint_every == 0
        return bool(self.held_out) and (due or (every is not None and step % every == 0))

    def checkpoint_due(self, cursor: Cursor) -> bool:
        return self.is_over(cursor) or cursor.step % self.hyper.checkpoint_every == 0

    def stage(self, cursor: Cursor) -> Staged:
        """The checkpoint of a step that is done, on disk."""
        final = self.is_over(cursor)
        if final:
            self.check(cursor)
        return self._stage(cursor, final, self.known.evaluation)

    def stage_stop(self, cursor: Cursor) -> Staged:
        """The same where the customer stops the run; its evaluation is not billed, and forgotten when it goes on."""
        evaluation = self.known.evaluation
        if self.held_out and (evaluation or {}).get("step") != cursor.step:
            evaluation = self.evaluate(cursor.step).as_dict()
        return self._stage(cursor, False, evaluation)

    def stage_failed(self, cursor: Cursor) -> Staged:
        """The last step that was trained, where the rewards of what came after it failed: it is not lost with that."""
        return self._stage(cursor, cursor.step == self.plan.total_steps, self.known.evaluation)

    def _stage(self, cursor: Cursor, final: bool, evaluation: dict[str, Any] | None) -> Staged:
        known = replace(self.known, extra={"reward_cpu_seconds": self.cpu.waiting})
        taken = resume.snapshot(self.learner, cursor, known, self.common["compute"])
        facts = Facts(final, self.plan.total_steps, self.ends, evaluation)
        return checkpoints.stage(self.work, self.learner, self.opened.start, taken, facts, self.common)

    def check(self, cursor: Cursor) -> None:
        """A run that did not do what was planned is a fault, whatever its rewards look like."""
        if self.learner.version and (untouched := self.known.untouched):
            deepest = int(self.prompts.lengths.max()) + self.hyper.max_new_tokens
            gates.check_gradients(self.learner, self.parameters, untouched, deepest=deepest, steps=cursor.step)


def _sampling(hyper: RlHyperparameters, ends: list[int]) -> Sampling:
    return Sampling(
        max_new_tokens=hyper.max_new_tokens,
        temperature=hyper.temperature,
        top_p=hyper.top_p,
        top_k=hyper.top_k,
        min_p=hyper.min_p,
        stop_ids=frozenset(ends),
        stop_texts=hyper.stop,
    )


def _lasting(metrics: dict[str, float]) -> dict[str, float | None]:
    """Those that another attempt would find too; None for what is not finite."""
    return {
        name: value if math.isfinite(value) else None
        for name, value in metrics.items()
        if not name.endswith(("_seconds", "_per_second", "_bytes"))
    }


def graders() -> int:
    """Grades at a time."""
    return min(8, os.cpu_count() or 1)
