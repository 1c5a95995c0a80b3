"""CommitSteps: progress, metrics and usage of contiguous steps in one fenced transaction."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from finery.types.jobs import EventType
from finery.types.money import plain
from finery.types.usage import Sku
from finery_protos.v1 import worker_pb2 as pb
from finery_service.jobs import store
from finery_service.jobs.tables import AttemptRow, JobRow
from finery_service.rpc import checks, fence
from finery_service.rpc.fence import Call
from finery_service.usage import ledger, prices
from finery_service.usage.ledger import Record

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_RESERVED = frozenset({"step", "total_steps", "cost", "non_finite"})
_COUNTS = frozenset({"trained_tokens", "tokens", "memory_bytes"})
_MAX_METRICS = 64
_MAX_QUANTITY = 2**53
_UNITS = {"train": "step", "eval": "eval"}
"""First part of a SKU -> kind of its unit of work."""


async def commit_steps(call: Call, request: pb.CommitStepsRequest) -> pb.Orders:
    """Steps that are committed already are passed over, so a repeated call changes nothing."""
    check(request.steps)
    job, attempt = await fence.find(call, request.attempt_id, request.fence)
    fence.must_run(job, attempt, "train")
    # Step 0 moves no counter: what of it is recorded already is passed over row by row.
    fresh = [step for step in request.steps if step.step > attempt.step or step.step == attempt.step == 0]
    if fresh:
        _follows(fresh, attempt)
        await _write(call, job, attempt, fresh)
    return await fence.renew(call, job, attempt)


def check(steps: Sequence[pb.Step]) -> None:
    """Everything about the steps that can be told without the database."""
    if not steps:
        checks.invalid("steps: expected at least one, found none")
    for index, step in enumerate(steps):
        expected = steps[0].step + index
        if step.step != expected or step.step < 0:
            checks.invalid(f"steps[{index}].step: expected {max(expected, 0)} (contiguous), found {step.step}")
        if step.step == 0 and step.metrics:
            checks.invalid(f"steps[{index}].metrics: step 0 holds only the evaluation before training")
        _check_metrics(step, f"steps[{index}].metrics")
        _check_usage(step, f"steps[{index}].usage")
        if step.HasField("evaluation") and step.evaluation.tokens < 0:
            checks.invalid(f"steps[{index}].evaluation.tokens: expected >= 0, found {step.evaluation.tokens}")


def _check_metrics(step: pb.Step, where: str) -> None:
    if len(step.metrics) > _MAX_METRICS:
        checks.invalid(f"{where}: expected at most {_MAX_METRICS}, found {len(step.metrics)}")
    for name in step.metrics:
        if not _NAME.fullmatch(name) or name in _RESERVED:
            checks.invalid(f"{where}: expected a name like learning_rate, none of ours, found {name[:80]!r}")


def _check_usage(step: pb.Step, where: str) -> None:
    seen: set[str] = set()
    for usage in step.usage:
        if usage.sku not in set(Sku):
            checks.invalid(f"{where}.sku: expected one of {', '.join(Sku)}, found {usage.sku[:80]!r}")
        unit = f"{_UNITS[usage.sku.partition('.')[0]]}:{step.step}"
        if usage.unit != unit or unit == "step:0":
            checks.invalid(f"{where}.unit: expected {unit} (steps from 1) for {usage.sku}, found {usage.unit[:80]!r}")
        if not 0 <= usage.quantity <= _MAX_QUANTITY:
            checks.invalid(f"{where}.quantity: expected 0 to 2^53 units, found {usage.quantity}")
        if usage.sku in seen:
            checks.invalid(f"{where}: expected each SKU once in a step, found {usage.sku} twice")
        seen.add(usage.sku)


def _follows(fresh: Sequence[pb.Step], attempt: AttemptRow) -> None:
    first, last = fresh[0].step, fresh[-1].step
    if first > attempt.step + 1:
        checks.not_now(f"steps: expected {attempt.step + 1} next, found {first}: a gap is not committed")
    if last > attempt.granted_through:
        checks.not_now(f"steps: granted through {attempt.granted_through}, found {last}: wait for the grant")


async def _write(call: Call, job: JobRow, attempt: AttemptRow, fresh: Sequence[pb.Step]) -> None:
    book = await prices.pinned(call.session, job.price_book_id)
    records = [Record(usage.sku, usage.unit, step.step, usage.quantity) for step in fresh for usage in step.usage]
    unpriced = {record.sku for record in records} - set(book)
    if unpriced:
        checks.not_now(f"usage: no price of {', '.join(sorted(unpriced))} in price book {job.price_book_id}")
    before = job.usage
    added = await ledger.record(call.session, job, attempt.id, records, call.now)
    events = _events(job, fresh, before, added, book)
    attempt.step = job.step = fresh[-1].step
    job.reported_step = max(job.reported_step, fresh[-1].step)
    await call.session.flush()
    if events:
        await store.append_events(call.session, tenant=job.tenant_id, job=job.id, events=events, now=call.now)


def _events(
    job: JobRow,
    fresh: Sequence[pb.Step],
    usage: dict[str, int],
    added: Sequence[Record],
    book: dict[str, Decimal],
) -> list[tuple[EventType, dict[str, Any]]]:
    """Metrics and evaluations of steps that the history does not show yet; `usage` is that before the first of them."""
    events: list[tuple[EventType, dict[str, Any]]] = []
    for step in fresh:
        usage = ledger.plus(usage, *(record for record in added if record.step == step.step))
        if step.step <= job.reported_step:
            continue
        if step.step > 0:
            cost = plain(prices.cost_usd(usage, book))
            head = {"step": step.step, "total_steps": job.total_steps}
            events.append(("metric", {**head, **_finite(dict(step.metrics)), "cost": cost}))
        if step.HasField("evaluation"):
            loss = _finite({"loss": step.evaluation.loss})
            events.append(("eval", {"step": step.step, **loss, "tokens": step.evaluation.tokens}))
    return events


def _finite(values: dict[str, float]) -> dict[str, Any]:
    """JSON numbers; what is not finite is null and named in `non_finite`."""
    data: dict[str, Any] = {}
    odd: dict[str, str] = {}
    for name, value in sorted(values.items()):
        if math.isfinite(value):
            data[name] = int(value) if name in _COUNTS and value.is_integer() else value
        else:
            data[name] = None
            odd[name] = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return {**data, "non_finite": odd} if odd else data
