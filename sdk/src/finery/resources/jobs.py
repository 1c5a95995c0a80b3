"""Jobs: create, watch, wait, cancel."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from datetime import datetime
from os import PathLike
from typing import Any, Literal, Unpack

from finery import _calls, _wait
from finery._call import id_of
from finery._display import both, display, label_of
from finery._paging import AsyncPages, Pages
from finery._transport import AsyncTransport, SyncTransport
from finery._wait import Follower, OnEvent, OnEventAsync
from finery.errors import InvalidArgumentError
from finery.forward import Recorder, Sink
from finery.plot import Plot, check_request, curve, picture
from finery.resources._job_fields import JobFields
from finery.types.jobs import Event, Job, JobState
from finery.types.methods import JobCreate
from finery.types.rollouts import Rollout, RolloutKind

_KEEP: Any = object()  # not given


class Jobs:
    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport

    def create(
        self, request: JobCreate | None = None, /, *, idempotency_key: str | None = None, **fields: Unpack[JobFields]
    ) -> Job:
        """Submit a job: `create(method="sft", model=…, training_file=…, hyperparameters={…})`; likewise `dpo`, and
        `create(method="rl", model=…, environment={…}, hyperparameters={…})`.

        The fields are those of `finery.types.methods`, as plain values or as its classes; a `File`, `Checkpoint` or
        `Environment` stands for its id. The server decides what is valid and names the field that is not. Retries keep
        one idempotency key; pass your own to make the call repeatable over restarts of your program.
        """
        key = idempotency_key or self._transport.config.runtime.new_key()
        return self._transport.send(_calls.create_job(_body(request, fields), key))

    def list(
        self,
        *,
        state: JobState | str | Sequence[str] | None = None,
        method: str | Sequence[str] | None = None,
        project: str | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        limit: int | None = None,
    ) -> Pages[Job]:
        """All jobs, or those that fit, newest first, fetched `limit` (≤ 100) at a time.

        Of several states or methods any will do. Created at `created_after` or later, before `created_before`; times
        need a zone: a naive one is a `ValueError`.
        """
        times = {"created_after": created_after, "created_before": created_before}
        call = _calls.list_jobs(state=state, method=method, project=project, **times, limit=limit)
        return Pages(self._transport.send, call)

    def retrieve(self, job: Job | str) -> Job:
        return self._transport.send(_calls.retrieve_job(job))

    def update(self, job: Job | str, *, name: str | None = _KEEP, metadata: Mapping[str, str] = _KEEP) -> Job:
        """Change name (None: no name) or metadata; what is not given stays."""
        return self._transport.send(_calls.update_job(job, _changes(name=name, metadata=metadata)))

    def cancel(self, job: Job | str) -> Job:
        """Ask for an end; a running job stores a checkpoint first. `ConflictError` if it has ended otherwise."""
        return self._turn(job, "cancel")

    def pause(self, job: Job | str) -> Job:
        """Ask for a rest: a running job stores a checkpoint and gives its accelerators back. `resume` goes on."""
        return self._turn(job, "pause")

    def resume(self, job: Job | str) -> Job:
        """Let a paused job go on from where it rested."""
        return self._turn(job, "resume")

    def _turn(self, job: Job | str, verb: Literal["cancel", "pause", "resume"]) -> Job:
        return self._transport.send(_calls.turn_job(job, verb, self._transport.config.runtime.new_key()))

    def events(self, job: Job | str, *, after: int = 0, limit: int | None = None) -> builtins.list[Event]:
        """The history so far, behind seq `after`, oldest first; at most `limit` events."""
        follower = Follower(id_of(job, "job"), after, self._transport.config)
        pages = Pages(self._transport.send, _calls.list_events(job, after))
        fresh = (event for event in pages if follower.advance(event))
        return builtins.list(itertools.islice(fresh, limit))

    def stream(self, job: Job | str, *, after: int = 0, progress: bool | None = None) -> Generator[Event, None, None]:
        """Events as they happen, from behind seq `after` to the job's end: gapless, none twice.

        It reconnects by itself over cuts and server restarts, for up to the client's `reconnect_timeout`.
        `progress` draws a bar on stderr (lines, if it is no terminal); None: if it is a terminal and rich is installed.
        """
        follower = Follower(id_of(job, "job"), after, self._transport.config)
        return _wait.shown(_wait.follow(self._transport, follower), progress, label_of(job))

    def wait(
        self,
        job: Job | str,
        *,
        timeout: float | None = None,
        on_event: OnEvent | None = None,
        after: int = 0,
        raise_on_failure: bool = True,
        progress: bool = False,
    ) -> Job:
        """The job once it has ended. `on_event` sees every event behind seq `after`.

        Raises `JobFailedError` (with `.job`) unless it succeeded, `WaitTimeoutError` after `timeout` seconds.
        `progress`: as in `stream`.
        """
        with display(progress, label_of(job)) as show:
            heard = both(show, on_event) if progress else on_event
            ended = _wait.wait(self._transport, id_of(job, "job"), after, timeout, heard)
        return _wait.settled(ended, raise_on_failure)

    def rollouts(
        self, job: Job | str, step: int | None = None, *, kind: RolloutKind | None = "train", limit: int = 100
    ) -> Pages[Rollout]:
        """What an RL job sampled and how it was rewarded: of one step or (None) of all, oldest first.

        `kind`: rollouts to train on, to evaluate (`eval`), or (None) both; fetched `limit` (≤ 100) at a time.
        """
        return Pages(self._transport.send, _calls.list_rollouts(job, step, kind, limit))

    def plot(self, *jobs: Job | str, path: str | PathLike[str] | None = None) -> Plot:
        """Losses (DPO: accuracy too; RL: rewards), learning rate and best checkpoint of one job or several.

        The answer shows itself in a notebook; `path` (.png or .svg) writes it too. Needs the extra `plot`.
        """
        check_request(jobs, path)
        curves = [curve(self.retrieve(job), self.events(job)) for job in jobs]
        return picture(curves, path)

    def forward(self, job: Job | str, *, to: Sink, after: int = 0) -> Job:
        """Send the job's metrics to a tracker, `to=TensorBoard("runs")`, from the start until it ends.

        Every metric and evaluation is written exactly once, under its step; `to` is closed at the end, with the job's
        state. `after`: a seq, to leave out what an earlier run has written. See `finery.forward`.
        """
        record = Recorder(to, self.retrieve(job), after)
        with record:
            return record.end(self.wait(job, after=after, on_event=record, raise_on_failure=False))


class AsyncJobs:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(
        self, request: JobCreate | None = None, /, *, idempotency_key: str | None = None, **fields: Unpack[JobFields]
    ) -> Job:
        """Submit a job: `create(method="sft", model=…, training_file=…, hyperparameters={…})`; likewise `dpo`, and
        `create(method="rl", model=…, environment={…}, hyperparameters={…})`.

        The fields are those of `finery.types.methods`, as plain values or as its classes; a `File`, `Checkpoint` or
        `Environment` stands for its id. The server decides what is valid and names the field that is not. Retries keep
        one idempotency key; pass your own to make the call repeatable over restarts of your program.
        """
        key = idempotency_key or self._transport.config.runtime.new_key()
        return await self._transport.send(_calls.create_job(_body(request, fields), key))

    def list(
        self,
        *,
        state: JobState | str | Sequence[str] | None = None,
        method: str | Sequence[str] | None = None,
        project: str | None = None,
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        limit: int | None = None,
    ) -> AsyncPages[Job]:
        """All jobs, or those that fit, newest first, fetched `limit` (≤ 100) at a time.

        Of several states or methods any will do. Created at `created_after` or later, before `created_before`; times
        need a zone: a naive one is a `ValueError`.
        """
        times = {"created_after": created_after, "created_before": created_before}
        call = _calls.list_jobs(state=state, method=method, project=project, **times, limit=limit)
        return AsyncPages(self._transport.send, call)

    async def retrieve(self, job: Job | str) -> Job:
        return await self._transport.send(_calls.retrieve_job(job))

    async def update(self, job: Job | str, *, name: str | None = _KEEP, metadata: Mapping[str, str] = _KEEP) -> Job:
        """Change name (None: no name) or metadata; what is not given stays."""
        return await self._transport.send(_calls.update_job(job, _changes(name=name, metadata=metadata)))

    async def cancel(self, job: Job | str) -> Job:
        """Ask for an end; a running job stores a checkpoint first. `ConflictError` if it has ended otherwise."""
        return await self._turn(job, "cancel")

    async def pause(self, job: Job | str) -> Job:
        """Ask for a rest: a running job stores a checkpoint and gives its accelerators back. `resume` goes on."""
        return await self._turn(job, "pause")

    async def resume(self, job: Job | str) -> Job:
        """Let a paused job go on from where it rested."""
        return await self._turn(job, "resume")

    async def _turn(self, job: Job | str, verb: Literal["cancel", "pause", "resume"]) -> Job:
        return await self._transport.send(_calls.turn_job(job, verb, self._transport.config.runtime.new_key()))

    async def events(self, job: Job | str, *, after: int = 0, limit: int | None = None) -> builtins.list[Event]:
        """The history so far, behind seq `after`, oldest first; at most `limit` events."""
        follower = Follower(id_of(job, "job"), after, self._transport.config)
        pages = AsyncPages(self._transport.send, _calls.list_events(job, after))
        events: builtins.list[Event] = []
        async for event in pages:
            if limit is not None and len(events) >= limit:
                break
            if follower.advance(event):
                events.append(event)
        return events

    def stream(self, job: Job | str, *, after: int = 0, progress: bool | None = None) -> AsyncGenerator[Event, None]:
        """Events as they happen, from behind seq `after` to the job's end: gapless, none twice.

        It reconnects by itself over cuts and server restarts, for up to the client's `reconnect_timeout`.
        `progress` draws a bar on stderr (lines, if it is no terminal); None: if it is a terminal and rich is installed.
        """
        follower = Follower(id_of(job, "job"), after, self._transport.config)
        return _wait.shown_async(_wait.follow_async(self._transport, follower), progress, label_of(job))

    async def wait(
        self,
        job: Job | str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 (the same signature as the sync one)
        on_event: OnEventAsync | None = None,
        after: int = 0,
        raise_on_failure: bool = True,
        progress: bool = False,
    ) -> Job:
        """The job once it has ended. `on_event` (plain or async) sees every event behind seq `after`.

        Raises `JobFailedError` (with `.job`) unless it succeeded, `WaitTimeoutError` after `timeout` seconds.
        `progress`: as in `stream`.
        """
        with display(progress, label_of(job)) as show:
            heard = both(show, on_event) if progress else on_event
            ended = await _wait.wait_async(self._transport, id_of(job, "job"), after, timeout, heard)
        return _wait.settled(ended, raise_on_failure)

    def rollouts(
        self, job: Job | str, step: int | None = None, *, kind: RolloutKind | None = "train", limit: int = 100
    ) -> AsyncPages[Rollout]:
        """What an RL job sampled and how it was rewarded: of one step or (None) of all, oldest first.

        `kind`: rollouts to train on, to evaluate (`eval`), or (None) both; fetched `limit` (≤ 100) at a time.
        """
        return AsyncPages(self._transport.send, _calls.list_rollouts(job, step, kind, limit))

    async def plot(self, *jobs: Job | str, path: str | PathLike[str] | None = None) -> Plot:
        """Losses (DPO: accuracy too; RL: rewards), learning rate and best checkpoint of one job or several.

        The answer shows itself in a notebook; `path` (.png or .svg) writes it too. Needs the extra `plot`.
        """
        check_request(jobs, path)
        curves = [curve(await self.retrieve(job), await self.events(job)) for job in jobs]
        return picture(curves, path)

    async def forward(self, job: Job | str, *, to: Sink, after: int = 0) -> Job:
        """Send the job's metrics to a tracker, `to=TensorBoard("runs")`, from the start until it ends.

        Every metric and evaluation is written exactly once, under its step; `to` is closed at the end, with the job's
        state. `after`: a seq, to leave out what an earlier run has written. See `finery.forward`.
        """
        record = Recorder(to, await self.retrieve(job), after)
        with record:
            return record.end(await self.wait(job, after=after, on_event=record, raise_on_failure=False))


def _body(request: JobCreate | None, fields: Mapping[str, Any]) -> JobCreate | Mapping[str, Any]:
    if request is None:
        return fields
    if fields:
        raise TypeError(f"expected a request or fields, found both: {', '.join(sorted(fields))}")
    return request


def _changes(**fields: Any) -> dict[str, Any]:
    changes = {name: value for name, value in fields.items() if value is not _KEEP}
    if not changes:
        raise InvalidArgumentError("expected name or metadata to change, found neither")
    return changes
