from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from finery import APIConnectionError, APIError, APITimeoutError
from finery._retry import backoff

from .support import BOTH, KEY, Client, Handler, Seen, Time, error_json, file_json, job_json, mocked, serving, value

Answer = httpx.Response | type[httpx.HTTPError]


class Script:
    """Answers in order, the last for ever; keeps the requests."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, httpx.Response):
            return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)
        raise answer("lost")

    @property
    def keys(self) -> list[str | None]:
        return [request.headers.get("idempotency-key") for request in self.requests]


def failure(status: int, code: str = "x", **headers: str) -> httpx.Response:
    return httpx.Response(status, json=error_json(code), headers={k.replace("_", "-"): v for k, v in headers.items()})


def success() -> httpx.Response:
    return httpx.Response(200, json=job_json())


async def create(kind: Client, script: Callable[[httpx.Request], httpx.Response], time: Time | None = None) -> Any:
    return await value(mocked(kind, script, time).jobs.create(method="sft", model="m", training_file="file_1"))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "first",
    [
        failure(500),
        failure(503),
        failure(429),
        failure(408),
        failure(409, "request_in_progress"),
        httpx.ConnectError,
        httpx.ReadTimeout,
        httpx.RemoteProtocolError,
        httpx.ReadError,
    ],
    ids=repr,
)
async def test_e19_one_idempotency_key_and_one_body_over_all_attempts_of_a_call(kind: Client, first: Answer) -> None:
    script = Script(first, first, success())
    assert (await create(kind, script)).id == "job_1"
    assert len(script.requests) == 3
    assert len({request.content for request in script.requests}) == 1
    assert script.keys[0]
    assert len(set(script.keys)) == 1


@pytest.mark.parametrize("kind", BOTH)
async def test_e19_two_calls_have_two_keys_and_a_callers_own_is_kept(kind: Client) -> None:
    script = Script(success())
    client = mocked(kind, script)
    for _ in range(2):
        await value(client.jobs.create(method="sft"))
    await value(client.jobs.create(method="sft", idempotency_key="mine"))
    await value(client.jobs.cancel("job_1"))
    assert len(set(script.keys)) == 4
    assert script.keys[2] == "mine"
    assert b"idempotency_key" not in script.requests[2].content


@pytest.mark.parametrize("kind", BOTH)
async def test_e19_at_most_three_attempts(kind: Client) -> None:
    for answer, error in (
        (failure(503), APIError),
        (httpx.ConnectError, APIConnectionError),
        (httpx.ReadTimeout, APITimeoutError),
    ):
        script = Script(answer)
        with pytest.raises(error):
            await create(kind, script)
        assert len(script.requests) == 3


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
async def test_e19_a_refusal_is_never_retried(kind: Client, status: int) -> None:
    script = Script(failure(status, x_should_retry="true", retry_after="0"))
    with pytest.raises(APIError):
        await create(kind, script)
    assert len(script.requests) == 1


@pytest.mark.parametrize("kind", BOTH)
async def test_a_conflict_is_retried_only_while_its_twin_is_in_flight(kind: Client) -> None:
    script = Script(failure(409, "job_already_terminal"))
    with pytest.raises(APIError):
        await create(kind, script)
    assert len(script.requests) == 1


@pytest.mark.parametrize("kind", BOTH)
async def test_the_servers_word_on_retrying_counts(kind: Client) -> None:
    no, yes = Script(failure(503, x_should_retry="false")), Script(failure(409, x_should_retry="true"), success())
    with pytest.raises(APIError):
        await create(kind, no)
    await create(kind, yes)
    assert (len(no.requests), len(yes.requests)) == (1, 2)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("status", [429, 503])
async def test_e19_retry_after_is_honoured(kind: Client, status: int) -> None:
    date = {"Date": "Mon, 30 Nov 2026 12:00:00 GMT", "Retry-After": "Mon, 30 Nov 2026 12:00:17 GMT"}
    time = Time()
    await create(kind, Script(failure(status, retry_after="60"), failure(status, **date), success()), time)
    assert time.slept == [60.0, 17.0]


@pytest.mark.parametrize("kind", BOTH)
async def test_a_wait_of_more_than_a_minute_is_the_callers_to_decide(kind: Client) -> None:
    time, script = Time(), Script(failure(429, retry_after="61"))
    with pytest.raises(APIError) as caught:
        await create(kind, script, time)
    assert (time.slept, len(script.requests), caught.value.retry_after) == ([], 1, 61.0)


def test_waits_double_up_to_a_bound_with_jitter_in_their_upper_half() -> None:
    assert [backoff(n, lambda: 1.0) for n in (1, 2, 3, 4, 5, 6, 400)] == [0.5, 1, 2, 4, 8, 8, 8]
    assert [backoff(n, lambda: 0.0) for n in (1, 2)] == [0.25, 0.5]


@pytest.mark.parametrize("kind", BOTH)
async def test_no_retries_if_none_are_wanted(kind: Client) -> None:
    script = Script(failure(503))
    client: Any = kind(KEY, "http://h", max_retries=0, transport=httpx.MockTransport(script))
    with pytest.raises(APIError):
        await value(client.jobs.retrieve("job_1"))
    assert len(script.requests) == 1


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("noun", "verb", "fields"),
    [
        ("jobs", "create", {"method": "sft", "model": "m", "training_file": "file_1"}),
        ("files", "upload", {"file": b"{}"}),
        ("files", "preview", {"file": "file_1", "model": "m"}),
    ],
)
async def test_e19_a_server_that_creates_and_then_drops_the_connection_has_one_of_it(
    kind: Client, noun: str, verb: str, fields: dict[str, Any]
) -> None:
    made: dict[str, str] = {}
    preview = {"file": "file_1", "model": "m", "status": "ready", "created_at": "2026-11-30T12:00:00Z"}
    answers: dict[str, Any] = {"create": job_json, "upload": file_json, "preview": lambda id: {**preview, "id": id}}  # noqa: A006

    def reply(handler: Handler, seen: Seen) -> None:
        known = len(made)
        id_ = made.setdefault(seen.headers["idempotency-key"], f"new_{known + 1}")
        if len(made) > known:
            return handler.cut()
        return handler.json(201, answers[verb](id=id_))

    with serving(reply) as server:
        client: Any = kind(KEY, server.url, runtime=Time().runtime())  # as it comes: two retries
        found = await value(getattr(getattr(client, noun), verb)(**fields))
        assert len(server.seen) == 2
        await value(client.close())
    assert (found.id, list(made.values())) == ("new_1", ["new_1"])
