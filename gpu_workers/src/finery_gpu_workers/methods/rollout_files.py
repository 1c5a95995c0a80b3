"""Rollouts as they are kept: JSON lines in the store, and what the customer hears of in between."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from finery.types.rollouts import Rollout as Row
from finery_gpu_workers import storage
from finery_gpu_workers.methods.rl_sampling import Rollout
from finery_gpu_workers.methods.rl_terms import by_group
from finery_gpu_workers.work import Work
from finery_protos.v1 import worker_pb2 as pb

Kind = Literal["train", "eval"]
_SHORT = 500
"""Characters of a text in an event."""
_WARNINGS = 5
"""Of failures and losses, each, in a step; the rollouts hold all."""


def store(work: Work, step: int, kind: Kind, rollouts: Sequence[Rollout]) -> pb.RolloutFile:
    """Uploads them under the attempt's prefix; the file's place and digest."""
    rows = (row(work.assignment.job_id, step, kind, n, one) for n, one in enumerate(rollouts))
    # Half a character of a customer's text is no UTF-8, but can be written as an escape.
    text = "".join(json.dumps(one.model_dump(mode="json"), allow_nan=False) + "\n" for one in rows)
    name = f"{kind}-{step:08d}.jsonl"
    prefix = f"{work.assignment.output_prefix}rollouts/"
    stored = storage.upload_text(work.store, text, prefix, name)
    return pb.RolloutFile(key=prefix + name, sha256=stored.sha256, bytes=stored.bytes, count=len(rollouts))


def row(job: str, step: int, kind: Kind, number: int, one: Rollout) -> Row:
    """As it is stored and shown."""
    done, grade = one.completion, one.grade
    parts = {name: value if value is not None and math.isfinite(value) else None for name, value in _parts(one)}
    return Row(
        id=f"roll_{'e' if kind == 'eval' else ''}{step}_{number}",
        job=job,
        step=step,
        kind=kind,
        group=one.group,
        sample=one.sample,
        prompt=one.prompt.place,
        messages=one.prompt.messages,
        prompt_text=one.prompt.text,
        item=one.prompt.item,
        prompt_tokens=tuple(one.prompt.tokens.tolist()),
        tokens=tuple(one.tokens),
        text=one.text,
        log_probs=tuple(done.log_probs) if done else (),
        versions=tuple(done.versions) if done else (),
        finish=one.finish,
        reward=one.reward,
        parts=parts,
        failure=one.failure,
        advantage=one.advantage,
        trained=one.trained,
        seconds={"generate": done.seconds if done else 0.0, "reward": grade.seconds if grade else 0.0},
    )


def _parts(one: Rollout) -> list[tuple[str, float | None]]:
    """The graders', and what was added to the reward before it was compared."""
    return [*(one.grade.parts if one.grade else {}).items(), *one.parts.items()]


def samples(kind: Kind, rollouts: Sequence[Rollout]) -> list[pb.Notice]:
    """The best and the worst of the first group that has a reward, shortened."""
    for group in by_group(rollouts):
        graded = sorted((one for one in group if one.reward is not None), key=_reward)
        if graded:
            shown = graded[-1:] if graded[0].reward == graded[-1].reward else [graded[-1], graded[0]]
            return [_notice("rollout", _sample(kind, one)) for one in shown]
    return [_notice("rollout", _sample(kind, one)) for one in rollouts[:1]]


def _reward(one: Rollout) -> float:
    return one.reward or 0.0


def _sample(kind: Kind, one: Rollout) -> dict[str, Any]:
    failure = one.failure
    return {
        "kind": kind,
        "prompt": _short(_asked(one)),
        "place": one.prompt.place,
        "text": _short(one.text),
        "reward": one.reward,
        "failure": None if failure is None else failure.code,
    }


def _asked(one: Rollout) -> str:
    """What the prompt ends with."""
    if one.prompt.text is not None:
        return one.prompt.text
    content = one.prompt.messages[-1].get("content") if one.prompt.messages else None
    return content if isinstance(content, str) else ""


def warnings(rollouts: Sequence[Rollout], lost: Sequence[Rollout]) -> list[pb.Notice]:
    """Failures by grader and code, and what had to be asked for again; a few of them."""
    failures = [(one, one.failure) for one in rollouts]
    named = [(one, failure) for one, failure in failures if failure is not None]
    counts = Counter((failure.grader, failure.code) for _, failure in named)
    notices = []
    for (grader, code), count in counts.most_common(_WARNINGS):
        first, failure = next((one, f) for one, f in named if (f.grader, f.code) == (grader, code))
        by = f"Grader {grader}" if grader else "The environment"
        message = f"{by} gave no reward to {count} of {len(rollouts)} rollouts ({code}): {_short(failure.message)}"
        details = [{"grader": grader, "code": code, "count": count, "prompt": first.prompt.place}]
        notices.append(_warning("reward_failed", message, details))
    for one in lost[:_WARNINGS]:
        what = "its grade" if one.completion else "the rollout"
        message = f"A rollout of prompt {one.prompt.place}: {what} did not come back in time; it was asked for again."
        notices.append(_warning("rollout_lost", message, [{"prompt": one.prompt.place, "sample": one.sample}]))
    return notices


def nothing_trained(steps: int) -> pb.Notice:
    message = (
        f"No step of {steps} changed anything: in every group all rewards were equal. The weights are those that the "
        "job began with; look at the rollouts, and let the grader tell better answers from worse ones. With "
        "dynamic_sampling such groups are replaced, and not billed as trained."
    )
    return _warning("nothing_trained", message, [])


def _warning(code: str, message: str, details: list[dict[str, Any]]) -> pb.Notice:
    return _notice("warning", {"code": code, "message": message, "param": "environment", "details": details})


def _notice(type_: str, data: dict[str, Any]) -> pb.Notice:
    return pb.Notice(type=type_, data_json=json.dumps(data))


def _short(text: str) -> str:
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"
