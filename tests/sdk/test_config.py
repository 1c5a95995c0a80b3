from __future__ import annotations

import pickle
import traceback

import httpx
import pytest

from finery import APIError, AsyncFinery, ConfigurationError, Finery, JobFailedError, NotFoundError
from finery.errors import from_response
from finery.types.jobs import Job

from .support import BOTH, KEY, Client, error_json, job_json, mocked, value


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FINERY_API_KEY", raising=False)
    monkeypatch.delenv("FINERY_BASE_URL", raising=False)


@pytest.mark.parametrize("kind", BOTH)
def test_a_missing_key_says_where_one_is_looked_for(kind: Client) -> None:
    with pytest.raises(ConfigurationError, match="FINERY_API_KEY"):
        kind()


@pytest.mark.parametrize("kind", BOTH)
def test_key_and_url_come_from_the_environment(kind: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind("k").base_url == "http://127.0.0.1:8700"
    monkeypatch.setenv("FINERY_API_KEY", KEY)
    monkeypatch.setenv("FINERY_BASE_URL", "https://finery.example/")
    assert kind().base_url == "https://finery.example"
    assert kind(base_url="http://other:1").base_url == "http://other:1"


@pytest.mark.parametrize(
    "url", ["finery.example", "ftp://a", "http://", "http://h:x", "http://h:99999", "http://h?a=1"]
)
def test_a_base_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="Expected a base URL such as http"):
        Finery("k", url)


def test_a_password_in_the_base_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Finery("k", "http://user:hunter2@finery.example")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("key", [f"{KEY}\r\nX-Evil: 1", f"{KEY} a", f"{KEY}é", f"{KEY}\x00"])
def test_a_key_that_cannot_be_a_header_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Finery(key)
    assert "s3cr3t" not in str(caught.value)


async def test_white_space_around_a_key_does_not_matter() -> None:
    sent: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers["authorization"])
        return httpx.Response(200, json=job_json())

    Finery(f" {KEY}\n", "http://h", transport=httpx.MockTransport(handler)).jobs.retrieve("job_1")
    assert sent == [f"Bearer {KEY}"]


@pytest.mark.parametrize("kind", BOTH)
async def test_the_key_is_in_no_repr_and_no_traceback(kind: Client) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    client = mocked(kind, handler)
    with pytest.raises(APIError) as caught:
        await value(client.jobs.retrieve("job_1"))
    shown = [
        repr(client),
        repr(vars(client)),
        repr(client._transport.config),
        repr(caught.value),
        repr(vars(caught.value)),
    ]
    shown += traceback.format_exception(caught.value)
    assert repr(client) == f"{kind.__name__}(base_url='http://finery.test')"
    assert "s3cr3t" not in "".join(shown)


async def test_clients_close_with_their_block() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=job_json())

    with Finery(KEY, transport=httpx.MockTransport(handler)) as client:
        client.jobs.retrieve("job_1")
    with pytest.raises(RuntimeError, match="closed"):
        client.jobs.retrieve("job_1")
    async with AsyncFinery(KEY, transport=httpx.MockTransport(handler)) as aclient:
        await aclient.jobs.retrieve("job_1")
    with pytest.raises(RuntimeError, match="closed"):
        await aclient.jobs.retrieve("job_1")


STATUSES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "APIError",
    409: "ConflictError",
    413: "PayloadTooLargeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "InternalServerError",
}


@pytest.mark.parametrize(("status", "name"), STATUSES.items())
@pytest.mark.parametrize("kind", BOTH)
async def test_an_error_carries_all_that_the_server_said(kind: Client, status: int, name: str) -> None:
    details = [{"line": 3, "message": "bad"}]
    body = error_json(
        "invalid_value", "Expected > 0, found -1.", param="hyperparameters.learning_rate", details=details
    )

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json=body, headers={"x-request-id": "req_7"})

    with pytest.raises(APIError) as caught:
        await value(mocked(kind, handler).jobs.create(method="sft"))
    error = caught.value
    assert type(error).__name__ == name
    assert (error.status, error.code, error.type) == (status, "invalid_value", "invalid_request_error")
    assert (error.param, error.details, error.request_id) == ("hyperparameters.learning_rate", details, "req_7")
    assert error.message == "Expected > 0, found -1."
    assert str(error) == (
        f"Expected > 0, found -1. (HTTP {status}, invalid_value, param hyperparameters.learning_rate, request req_7)"
    )


def test_an_answer_that_is_not_finerys_is_shown_for_what_it_is() -> None:
    error = from_response(502, {"content-type": "text/html"}, b"<html>\n<h1>Bad  Gateway</h1>")
    assert (error.status, error.code) == (502, "http_502")
    assert "text/html: '<html> <h1>Bad Gateway</h1>'" in error.message


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("body", [b"<html>welcome to the hotel", b"", b'{"object": "job"}', b"[]"])
async def test_a_success_that_is_no_job_is_an_error_and_not_retried(kind: Client, body: bytes) -> None:
    calls: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        return httpx.Response(200, content=body, headers={"content-type": "text/html"})

    with pytest.raises(APIError, match="Expected a Job from /v1/jobs/job_1, found text/html") as caught:
        await value(mocked(kind, handler).jobs.retrieve("job_1"))
    assert (caught.value.code, len(calls)) == ("unexpected_response", 1)


def test_redirects_are_not_followed_with_the_key() -> None:
    calls: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        calls.append(request.url.host)
        return httpx.Response(307, headers={"location": "http://evil.example/"})

    with pytest.raises(APIError) as caught:
        mocked(Finery, handler).jobs.retrieve("job_1")
    assert (caught.value.status, calls) == (307, ["finery.test"])


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(from_response(404, {"x-request-id": "req_1"}, b"")))
    assert isinstance(error, NotFoundError)
    assert (error.status, error.request_id, error.code) == (404, "req_1", "http_404")
    failed = pickle.loads(pickle.dumps(JobFailedError(Job.model_validate(job_json(state="failed")))))
    assert (failed.job.id, failed.job.state) == ("job_1", "failed")


@pytest.mark.parametrize("kind", BOTH)
async def test_answers_tolerate_what_they_do_not_know(kind: Client) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=job_json(state="hibernating", shiny="new", reason="because"))

    job = await value(mocked(kind, handler).jobs.retrieve("job_1"))
    assert (job.state, job.reason, job.shiny) == ("hibernating", "because", "new")
    assert (job.usage, job.progress.step, str(job.cost)) == ({"train.sft": 120}, 3, "0.00012")
