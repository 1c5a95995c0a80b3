"""Environments: prompts, and what rewards an answer to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, Unpack

from finery import _calls
from finery._call import given
from finery._paging import AsyncPages, Pages
from finery._poll import Poll, ready
from finery._transport import AsyncTransport, SyncTransport
from finery.errors import InvalidArgumentError
from finery.types.environments import (
    Environment,
    EnvironmentRun,
    EnvironmentSpec,
    Grader,
    SampleAnswer,
)
from finery.types.files import File

Answer = str | tuple[int, str] | Mapping[str, Any] | SampleAnswer
"""A text answers prompt 0; a pair says which prompt."""


class EnvironmentFields(TypedDict, total=False):
    """The fields of all types of environment; which belong to which is in `finery.types.environments`."""

    type: str
    task: str
    config: Mapping[str, Any]
    seed: int
    size: int
    system_prompt: str | None
    answer_pattern: str | None
    file: File | str
    held_out_file: File | str | None
    grader: Grader | Mapping[str, Any]


class Environments:
    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport

    def create(
        self,
        spec: EnvironmentSpec | Mapping[str, Any] | None = None,
        /,
        *,
        name: str | None = None,
        project: str | None = None,
        idempotency_key: str | None = None,
        **fields: Unpack[EnvironmentFields],
    ) -> Environment:
        """Keep an environment under an id: `create(type="reasoning_gym", task="chain_sum")`.

        `create(type="prompts", file=file, grader={…})`; `finery.graders.python("reward.py")` makes a grader of a file.
        The server decides what is valid and names the field that is not. `project`: its id; by default that of the key.
        """
        key = idempotency_key or self._transport.config.runtime.new_key()
        return self._transport.send(_calls.create_environment(_body(spec, name, project, fields), key))

    def list(self, *, project: str | None = None, limit: int | None = None) -> Pages[Environment]:
        """All environments, or those of a project, newest first, fetched `limit` (≤ 100) at a time."""
        return Pages(self._transport.send, _calls.list_environments(project, limit))

    def retrieve(self, environment: Environment | str) -> Environment:
        return self._transport.send(_calls.retrieve_environment(environment))

    get = retrieve

    def delete(self, environment: Environment | str) -> None:
        """Delete it for good. Jobs keep the environment as it was when they were made."""
        self._transport.send(_calls.delete_environment(environment))

    def run(
        self,
        environment: Environment | str,
        answers: Iterable[Answer] | Answer | None = None,
        *,
        prompts: int = 5,
        timeout: float = 300.0,
    ) -> EnvironmentRun:
        """Show its first prompts and grade answers to them, before a job is started: print what comes back.

        `answers`: texts (they answer prompt 0), pairs such as `(3, "text")` for prompt 3, or `SampleAnswer`s. An answer
        without a reward has a `failure`. Raises `EnvironmentRunFailedError` (with `.run`), `WaitTimeoutError` after
        `timeout` seconds.
        """
        config = self._transport.config
        body = {"answers": _answers(answers), "prompts": prompts}
        found = self._transport.send(_calls.create_run(environment, body, config.runtime.new_key()))
        poll = Poll(config, timeout)
        while not ready(found):
            config.runtime.sleep(poll.pause(found))
            found = self._transport.send(_calls.retrieve_run(found))
        return found


class AsyncEnvironments:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(
        self,
        spec: EnvironmentSpec | Mapping[str, Any] | None = None,
        /,
        *,
        name: str | None = None,
        project: str | None = None,
        idempotency_key: str | None = None,
        **fields: Unpack[EnvironmentFields],
    ) -> Environment:
        """Keep an environment under an id: `create(type="reasoning_gym", task="chain_sum")`.

        `create(type="prompts", file=file, grader={…})`; `finery.graders.python("reward.py")` makes a grader of a file.
        The server decides what is valid and names the field that is not. `project`: its id; by default that of the key.
        """
        key = idempotency_key or self._transport.config.runtime.new_key()
        return await self._transport.send(_calls.create_environment(_body(spec, name, project, fields), key))

    def list(self, *, project: str | None = None, limit: int | None = None) -> AsyncPages[Environment]:
        """All environments, or those of a project, newest first, fetched `limit` (≤ 100) at a time."""
        return AsyncPages(self._transport.send, _calls.list_environments(project, limit))

    async def retrieve(self, environment: Environment | str) -> Environment:
        return await self._transport.send(_calls.retrieve_environment(environment))

    get = retrieve

    async def delete(self, environment: Environment | str) -> None:
        """Delete it for good. Jobs keep the environment as it was when they were made."""
        await self._transport.send(_calls.delete_environment(environment))

    async def run(
        self,
        environment: Environment | str,
        answers: Iterable[Answer] | Answer | None = None,
        *,
        prompts: int = 5,
        timeout: float = 300.0,  # noqa: ASYNC109 (the same signature as the sync one)
    ) -> EnvironmentRun:
        """Show its first prompts and grade answers to them, before a job is started: print what comes back.

        `answers`: texts (they answer prompt 0), pairs such as `(3, "text")` for prompt 3, or `SampleAnswer`s. An answer
        without a reward has a `failure`. Raises `EnvironmentRunFailedError` (with `.run`), `WaitTimeoutError` after
        `timeout` seconds.
        """
        config = self._transport.config
        body = {"answers": _answers(answers), "prompts": prompts}
        found = await self._transport.send(_calls.create_run(environment, body, config.runtime.new_key()))
        poll = Poll(config, timeout)
        while not ready(found):
            await config.runtime.sleep_async(poll.pause(found))
            found = await self._transport.send(_calls.retrieve_run(found))
        return found


def _body(
    spec: EnvironmentSpec | Mapping[str, Any] | None, name: str | None, project: str | None, fields: Mapping[str, Any]
) -> dict[str, Any]:
    if spec is not None and fields:
        raise TypeError(f"expected a spec or its fields, found both: {', '.join(sorted(fields))}")
    if spec is None and not fields:
        raise TypeError('expected a spec, or fields such as type="reasoning_gym", task="chain_sum"; found neither')
    return given({"name": name, "project": project, "spec": fields if spec is None else spec})


def _answers(answers: Iterable[Answer] | Answer | None) -> list[Any]:
    match answers:
        case str() | Mapping() | SampleAnswer() | (int(), str()):
            return [_answer(answers)]
    return [_answer(one) for one in answers or ()]


def _answer(answer: Any) -> Any:
    match answer:
        case str():
            return {"output_text": answer}
        case (int(prompt), str(text)):
            return {"prompt": prompt, "output_text": text}
        case SampleAnswer() | Mapping():
            return answer
    raise InvalidArgumentError(
        'expected an answer as a text, a pair such as (3, "text"), a SampleAnswer or a dict, '
        f"found {type(answer).__name__}: {answer!r:.80}"
    )
