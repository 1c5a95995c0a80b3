"""What the steps of CommitSteps are held to, before the database and against the job. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from finery.types.usage import Sku
from finery_protos.v1 import worker_pb2 as pb
from finery_service.rpc import checks

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_OF_METRICS = frozenset({"step", "total_steps", "cost", "non_finite"})
_OF_EVALUATIONS = frozenset({"step", "loss", "tokens", "non_finite"})
_MAX_METRICS = 64
_MAX_QUANTITY = 2**53
_UNITS = {"train": ("step",), "rollout": ("step",), "reward": ("step", "eval"), "eval": ("eval",)}
"""First part of a SKU -> kinds of its units of work."""
_SKUS = {
    "sft": (Sku.TRAIN_SFT, Sku.EVAL_SFT),
    "dpo": (Sku.TRAIN_DPO, Sku.EVAL_DPO),
    "rl": (
        *(Sku.TRAIN_RL, Sku.ROLLOUT_PREFILL, Sku.ROLLOUT_PREFILL_CACHED, Sku.ROLLOUT_GENERATED),
        *(Sku.REWARD_CPU_SECONDS, Sku.REWARD_LLM_INPUT, Sku.REWARD_LLM_OUTPUT, Sku.EVAL_RL),
    ),
}
_NOTICES = ("warning", "rollout")
_MAX_NOTICES = 32
_MAX_NOTICE = 16_384


def check(steps: Sequence[pb.Step]) -> None:
    """Everything about the steps that can be told without the job."""
    if not steps:
        checks.invalid("steps: expected at least one, found none")
    for index, step in enumerate(steps):
        where, expected = f"steps[{index}]", steps[0].step + index
        if step.step != expected or step.step < 0:
            checks.invalid(f"{where}.step: expected {max(expected, 0)} (contiguous), found {step.step}")
        if step.step == 0 and (step.metrics or step.HasField("rollouts")):
            checks.invalid(f"{where}: step 0 holds only the evaluation before training")
        _check_names(step.metrics, _OF_METRICS, f"{where}.metrics")
        _check_usage(step, f"{where}.usage")
        _check_evaluation(step, where)
        _check_notices(step, f"{where}.notices")


def check_against_job(steps: Sequence[pb.Step], method: str, prefix: str) -> None:
    """`prefix`: where the attempt may write."""
    skus = _SKUS[method]
    for index, step in enumerate(steps):
        where = f"steps[{index}]"
        for usage in step.usage:
            if usage.sku not in skus:
                checks.invalid(f"{where}.usage.sku: expected one of {', '.join(skus)}, found {usage.sku[:80]!r}")
        if step.HasField("evaluation") and step.evaluation.HasField("loss") != (method != "rl"):
            expected = "none of an RL job" if method == "rl" else "one"
            checks.invalid(f"{where}.evaluation.loss: expected {expected}")
        for name in ("rollouts", "evaluation_rollouts"):
            if step.HasField(name):
                _check_rollouts(getattr(step, name), method, prefix, f"{where}.{name}")


def _check_names(names: Iterable[str], ours: frozenset[str], where: str) -> None:
    given = list(names)
    if len(given) > _MAX_METRICS:
        checks.invalid(f"{where}: expected at most {_MAX_METRICS}, found {len(given)}")
    for name in given:
        if not _NAME.fullmatch(name) or name in ours:
            checks.invalid(f"{where}: expected a name like learning_rate, none of ours, found {name[:80]!r}")


def _check_usage(step: pb.Step, where: str) -> None:
    seen: set[tuple[str, str]] = set()
    for usage in step.usage:
        if usage.sku not in set(Sku):
            checks.invalid(f"{where}.sku: expected one of {', '.join(Sku)}, found {usage.sku[:80]!r}")
        units = [f"{kind}:{step.step}" for kind in _UNITS[usage.sku.partition(".")[0]]]
        if usage.unit not in units or usage.unit == "step:0":
            expected = " or ".join(units)
            checks.invalid(
                f"{where}.unit: expected {expected} (steps from 1) for {usage.sku}, found {usage.unit[:80]!r}"
            )
        if not 0 <= usage.quantity <= _MAX_QUANTITY:
            checks.invalid(f"{where}.quantity: expected 0 to 2^53 units, found {usage.quantity}")
        if (usage.sku, usage.unit) in seen:
            checks.invalid(f"{where}: expected each SKU once in a step, found {usage.sku} twice")
        seen.add((usage.sku, usage.unit))


def _check_evaluation(step: pb.Step, where: str) -> None:
    if not step.HasField("evaluation"):
        if step.HasField("evaluation_rollouts"):
            checks.invalid(f"{where}.evaluation_rollouts: expected the evaluation next to them, found none")
        return
    if step.evaluation.tokens < 0:
        checks.invalid(f"{where}.evaluation.tokens: expected >= 0, found {step.evaluation.tokens}")
    _check_names(step.evaluation.metrics, _OF_EVALUATIONS, f"{where}.evaluation.metrics")


def _check_notices(step: pb.Step, where: str) -> None:
    if len(step.notices) > _MAX_NOTICES:
        checks.invalid(f"{where}: expected at most {_MAX_NOTICES} in a step, found {len(step.notices)}")
    for index, notice in enumerate(step.notices):
        if notice.type not in _NOTICES:
            checks.invalid(f"{where}[{index}].type: expected one of {', '.join(_NOTICES)}, found {notice.type[:80]!r}")
        size = len(notice.data_json.encode())
        if size > _MAX_NOTICE:
            checks.invalid(f"{where}[{index}].data_json: expected at most {_MAX_NOTICE} bytes, found {size}")
        data = checks.json_object(notice.data_json, f"{where}[{index}].data_json")
        if notice.type == "warning" and not all(isinstance(data.get(name), str) for name in ("code", "message")):
            checks.invalid(f"{where}[{index}].data_json: expected a warning with code and message")


def _check_rollouts(file: pb.RolloutFile, method: str, prefix: str, where: str) -> None:
    if method != "rl":
        checks.invalid(f"{where}: expected none, as the job is no RL job")
    checks.key_below(file.key, prefix, f"{where}.key")
    checks.sha256(file.sha256, f"{where}.sha256")
    for name in ("bytes", "count"):
        if getattr(file, name) < 0:
            checks.invalid(f"{where}.{name}: expected >= 0, found {getattr(file, name)}")
