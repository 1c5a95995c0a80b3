"""Reinforcement learning.

The loop, top to bottom (`train`, `_steps`; one step, one evaluation and one checkpoint are in `rl_run.py`):

    rewards             graders and environments, in processes of their own (environments/rewards.py)
    data, plan          prompts; which of them each step samples, with which seeds (rl_plan.py)
    base, learner       as in SFT; the reference is the starting point (opening.py); the engine samples from the
                        learner's own model, so there is one copy of the weights (rollout/engine.py)
    cursor              fresh, or exactly where the last attempt's checkpoint was (resume.py)
    step 0              evaluate before training
    while not over      wait until the next step is granted; stop here if the customer cancelled or paused
        sample          groups of rollouts; each is graded while others are still sampled (rl_sample.py, rl_sampling.py)
                        dynamic sampling: further prompts for groups whose rewards say nothing
        compare         advantages within groups; which rollouts have a part in the loss (rl_terms.py)
        update          micro-batches with shared prompts → the loss → optim_step, `updates_per_step` times
                        (rl_update.py, losses/policy.py); a step without any advantage leaves the weights alone
        evaluate        every `eval_every` steps and at every checkpoint (rl_eval.py); when the target is reached or
                        patience is over this step is the last
        stage           every `checkpoint_every` steps and after the last: write the checkpoint's files
        rollouts        all of them, to the store (rollout_files.py)
        commit          metrics, usage and notices (rl_report.py), through the outbox
        publish         hash, upload, row: through the outbox too, so behind all of its steps
    gates               groups, ids, tokens and modules must be what was asked for

A loss or gradient that is not finite ends the job, and so does a step in which too few rollouts got a reward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from pydantic import TypeAdapter

from finery.types.environments import EnvironmentSpec
from finery.types.errors import ErrorDetail
from finery.types.jobs import Intent
from finery.types.reasons import JobReason
from finery.types.rl import RlHyperparameters
from finery.types.rl_algorithms import resolved
from finery_gpu_workers import checkpoints
from finery_gpu_workers.environments.rewards import open_rewards
from finery_gpu_workers.environments.types import Rewards
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.manifest import manifest_of
from finery_gpu_workers.methods import rollout_files
from finery_gpu_workers.methods.opening import open_learner, restore
from finery_gpu_workers.methods.prepare import load_prepared
from finery_gpu_workers.methods.rl_eval import Evaluation
from finery_gpu_workers.methods.rl_plan import RlPlan
from finery_gpu_workers.methods.rl_report import add_evaluation, add_usage, step_usage
from finery_gpu_workers.methods.rl_run import Result, Run, graders
from finery_gpu_workers.methods.rl_sample import enough_graded
from finery_gpu_workers.methods.rl_sampling import Deadlines, Rollout, grade_seconds
from finery_gpu_workers.outbox import Outbox
from finery_gpu_workers.resume import Cursor
from finery_gpu_workers.work import Ending, Work, stopped_by_customer
from finery_protos.v1 import worker_pb2 as pb

_SPEC: TypeAdapter[EnvironmentSpec] = TypeAdapter(EnvironmentSpec)


def train(work: Work) -> Ending:
    """Runs the job to its end, to the customer's stop, or to a step that cannot be used."""
    environment = _SPEC.validate_json(work.assignment.environment_json)
    folder = work.folder / "environment"
    folder.mkdir()
    rewards = open_rewards(environment, folder, workers=graders(), score_models=work.score_models)
    try:
        return _train(work, rewards, Deadlines(grade_seconds(environment), graders()))
    except WorkerError as error:
        if error.code != "non_finite_logits":
            raise
        return _not_finite(f"While answers were sampled: {error.message}.")
    finally:
        rewards.close()


def _train(work: Work, rewards: Rewards, deadlines: Deadlines) -> Ending:
    hyper = work.spec.hyperparameters
    assert isinstance(hyper, RlHyperparameters)
    data = load_prepared(work)
    plan = RlPlan(len(data.train), resolved(hyper), work.spec.seed)
    opened = open_learner(work, reference=hyper.kl_coefficient > 0)
    parts = opened.start, data.index, opened.model, opened.learner, opened.compute
    run = Run(work, data, plan, opened, rewards, deadlines, manifest_of(work, *parts))
    cursor = _start(run)
    with Outbox(work.control) as outbox:
        return _steps(run, cursor, outbox)


def _steps(run: Run, cursor: Cursor, outbox: Outbox) -> Ending:
    """From the step behind the cursor to the last."""
    work, stored = run.work, cursor.step
    if cursor.step == 0 and run.evaluation_due(0):
        first = run.evaluate(0)
        run.remember(first)
        outbox.commit(_message(run, 0, None, None, first))
        if ending := _too_few(run, 0, first.rollouts):
            outbox.drain()
            return ending
    run.clock.restart()
    while not run.is_over(cursor):
        step = cursor.step + 1
        if (intent := outbox.wait_for_grant(step)) is not Intent.RUN:
            if cursor.step > stored:
                outbox.then(partial(checkpoints.publish, work, run.stage_stop(cursor)))
            outbox.drain()
            return stopped_by_customer(intent)
        before = cursor, run.known
        result = run.step(step, cursor)
        cursor = result.cursor
        evaluation = run.evaluate(step) if result.usable and run.evaluation_due(step) else None
        if evaluation:
            run.remember(evaluation)
        message = _message(run, step, result, run.metrics(step, result), evaluation)
        ending = _unusable(run, step, result, evaluation)
        staged = run.stage(cursor) if not ending and run.checkpoint_due(cursor) else None
        outbox.commit(message)
        if ending:
            trained, run.known = (cursor, run.known) if result.graded else before
            if ending.reason is JobReason.REWARDS_FAILED and trained.step > stored:
                outbox.then(partial(checkpoints.publish, work, run.stage_failed(trained)))
            outbox.drain()
            return ending
        if staged:
            outbox.then(partial(checkpoints.publish, work, staged))
            stored = step
    outbox.drain()
    return Ending(JobReason.COMPLETED if cursor.step == run.plan.total_steps else JobReason.STOPPED_EARLY)


def _start(run: Run) -> Cursor:
    """Where the run goes on from; the learner is put there."""

    def place_after(step: int) -> tuple[int, int]:
        prompts = run.plan.step(step)
        return prompts.epoch, prompts.position + len(prompts.prompts)

    if bundle := run.opened.bundle:
        run.known = bundle.known
        run.cpu.waiting = bundle.known.extra["reward_cpu_seconds"]
    return restore(run.work, run.opened, place_after)


def _message(
    run: Run, step: int, result: Result | None, metrics: dict[str, float] | None, evaluation: Evaluation | None
) -> pb.Step:
    """Of a step, with its rollouts in the store."""
    message = pb.Step(step=step, metrics=metrics or {})
    if result:
        rollouts = result.sampled.rollouts
        message.rollouts.CopyFrom(rollout_files.store(run.work, step, "train", rollouts))
        add_usage(message, step_usage(rollouts, run.cpu), "step")
        message.notices.extend(rollout_files.warnings(rollouts, result.sampled.lost))
        message.notices.extend(rollout_files.samples("train", rollouts))
        if run.is_over(result.cursor) and not run.learner.version:
            message.notices.append(rollout_files.nothing_trained(step))
    if evaluation:
        message.evaluation_rollouts.CopyFrom(rollout_files.store(run.work, step, "eval", evaluation.rollouts))
        add_evaluation(message, evaluation, run.cpu)
        message.notices.extend(rollout_files.warnings(evaluation.rollouts, evaluation.lost))
        message.notices.extend(rollout_files.samples("eval", evaluation.rollouts))
    return message


def _unusable(run: Run, step: int, result: Result, evaluation: Evaluation | None) -> Ending | None:
    """The end of a job whose rewards or numbers cannot be used."""
    if not result.graded:
        return _too_few(run, step, result.sampled.rollouts)
    if not result.updated.finite:
        updated = result.updated
        found = f"expected a finite loss and gradient, found loss {updated.loss} and gradient norm {updated.grad_norm}"
        return _not_finite(f"Step {step}: {found}. Nothing of this step was kept.")
    return _too_few(run, step, evaluation.rollouts) if evaluation else None


def _too_few(run: Run, step: int, rollouts: Sequence[Rollout]) -> Ending | None:
    """The end of a job whose rollouts get no rewards; the customer reads why in the first failures."""
    if enough_graded(rollouts, run.hyper):
        return None
    graded, wanted = sum(one.reward is not None for one in rollouts), run.hyper.min_graded
    failures = Counter(failure.code for one in rollouts if (failure := one.failure))
    first = next(failure for one in rollouts if (failure := one.failure))
    codes = ", ".join(f"{code} {count} times" for code, count in failures.most_common())
    message = (
        f"Step {step}: expected rewards for at least {wanted:.0%} of {len(rollouts)} rollouts, found {graded} ({codes})"
        f". The first failure: {first.message[:1000]} Try the environment with client.environments.run before training."
    )
    return Ending(JobReason.REWARDS_FAILED, _error("rewards_failed", message, "environment"))


def _not_finite(found: str) -> Ending:
    message = f"{found} Try a lower learning rate."
    return Ending(JobReason.NON_FINITE_LOSS, _error("non_finite_loss", message, "hyperparameters.learning_rate"))


def _error(code: str, message: str, param: str) -> ErrorDetail:
    return ErrorDetail(message=message, type="invalid_request_error", code=code, param=param)
