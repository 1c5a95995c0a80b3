"""CommitSteps: progress, metrics and usage of contiguous steps in one fenced transaction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, cast

from finery.types.jobs import EventType
from finery.types.money import plain
from finery_protos.v1 import worker_pb2 as pb
from finery_service.jobs import store
from finery_service.jobs.tables import AttemptRow, JobRow
from finery_service.rollouts import store as rollouts
from finery_service.rpc import checks, fence, step_checks
from finery_service.rpc.begin import output_prefix
from finery_service.rpc.fence import Call
from finery_service.usage import ledger, prices
from finery_service.usage.ledger import Record

_COUNTS = frozenset({"trained_tokens", "tokens", "memory_bytes"})
_NewEvent = tuple[EventType, dict[str, Any]]


async def commit_steps(call: Call, request: pb.CommitStepsRequest) -> pb.Orders:
    """Steps that are committed already are passed over, so a repeated call changes nothing."""
    step_checks.check(request.steps)
    job, attempt = await fence.find(call, request.attempt_id, request.fence)
    fence.must_run(job, attempt, "train")
    step_checks.check_against_job(request.steps, job.method, output_prefix(attempt))
    # Step 0 moves no counter: what of it is recorded already is passed over row by row.
    fresh = [step for step in request.steps if step.step > attempt.step or step.step == attempt.step == 0]
    if fresh:
        _follows(fresh, attempt)
        await _write(call, job, attempt, fresh)
    return await fence.renew(call, job, attempt)


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
    await _keep_rollouts(call, job, attempt, fresh)
    if events:
        await store.append_events(call.session, tenant=job.tenant_id, job=job.id, events=events, now=call.now)


async def _keep_rollouts(call: Call, job: JobRow, attempt: AttemptRow, fresh: Sequence[pb.Step]) -> None:
    """Also of steps that are done again: what is trained on is what is kept."""
    for step in fresh:
        if step.HasField("rollouts"):
            await rollouts.put(call.session, job, attempt, "train", step.step, step.rollouts, call.now)
        if step.HasField("evaluation_rollouts"):
            await rollouts.put(call.session, job, attempt, "eval", step.step, step.evaluation_rollouts, call.now)


def _events(
    job: JobRow,
    fresh: Sequence[pb.Step],
    usage: dict[str, int],
    added: Sequence[Record],
    book: dict[str, Decimal],
) -> list[_NewEvent]:
    """Of steps that the history does not show yet; `usage` is that before the first of them."""
    events: list[_NewEvent] = []
    for step in fresh:
        usage = ledger.plus(usage, *(record for record in added if record.step == step.step))
        if step.step > job.reported_step:
            events += _events_of(job, step, plain(prices.cost_usd(usage, book)))
    return events


def _events_of(job: JobRow, step: pb.Step, cost: str) -> list[_NewEvent]:
    events: list[_NewEvent] = []
    if step.step > 0:
        head = {"step": step.step, "total_steps": job.total_steps}
        events.append(("metric", {**head, **_finite(step.metrics), "cost": cost}))
    if step.HasField("evaluation"):
        found = dict(step.evaluation.metrics)
        if step.evaluation.HasField("loss"):
            found["loss"] = step.evaluation.loss
        events.append(("eval", {"step": step.step, **_finite(found), "tokens": step.evaluation.tokens}))
    for notice in step.notices:
        data = checks.json_object(notice.data_json, "data_json")
        events.append((cast(EventType, notice.type), {**data, "step": step.step}))
    return events


def _finite(values: Mapping[str, float]) -> dict[str, Any]:
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
