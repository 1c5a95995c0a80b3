"""The only module that knows httpx. Sends a `Call`, parses its answer, turns every failure into an `APIError`."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from finery._call import Call, Nothing
from finery._config import Config
from finery._multipart import Multipart
from finery._retry import retry_delay
from finery.errors import APIConnectionError, APIError, APITimeoutError, from_response
from finery.types.base import link

M = TypeVar("M", bound=BaseModel)
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

SyncHttp = httpx.BaseTransport
AsyncHttp = httpx.AsyncBaseTransport
_CONNECT_SECONDS = 10.0
_UPLOAD_SECONDS = 600.0  # the server checks every row before it answers


@dataclass(frozen=True)
class Stream:
    """An answer whose body is still arriving."""

    status: int
    headers: Mapping[str, str]
    chunks: Iterator[bytes]


@dataclass(frozen=True)
class AsyncStream:
    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]


class SyncTransport:
    def __init__(self, config: Config, http: SyncHttp | None = None) -> None:
        self.config = config
        self.client: Any = None
        """Who made this transport; answers that have verbs know it."""
        self._http = httpx.Client(transport=http, verify=config.tls, trust_env=not config.loopback)

    def send(self, call: Call[M], on_progress: Progress | None = None) -> M:
        """The parsed answer, after at most `max_attempts` tries with one idempotency key."""
        attempt = 1
        while True:
            try:
                return self._once(call, on_progress)
            except APIError as error:
                if attempt > 1 and _gone(call, error):
                    return call.expect()
                delay = _delay(error, attempt, self.config)
                if delay is None:
                    raise
            self.config.runtime.sleep(delay)
            attempt += 1

    def _once(self, call: Call[M], on_progress: Progress | None) -> M:
        content = call.body() if call.file is None else _reported(call.file, on_progress)
        timeout = _timeout(self.config.timeout if call.file is None else _UPLOAD_SECONDS)
        request = self._http.build_request(**_request(self.config, call), content=content, timeout=timeout)
        with _translated(self.config, call):
            response = self._http.send(request)
        return _parsed(call, response, self.client)

    @contextmanager
    def stream(self, call: Call[Any], read_timeout: float) -> Iterator[Stream]:
        """One try. Reading the chunks raises `APIConnectionError` if the connection breaks."""
        timeout = _timeout(read_timeout)
        request = self._http.build_request(**_request(self.config, call), timeout=timeout)
        with _translated(self.config, call):
            response = self._http.send(request, stream=True)
        try:
            if not response.is_success:
                with _translated(self.config, call):
                    response.read()
                raise _error(response)
            with closing(self._chunks(call, response)) as chunks:
                yield Stream(response.status_code, response.headers, chunks)
        finally:
            response.close()

    def _chunks(self, call: Call[Any], response: httpx.Response) -> Generator[bytes, None, None]:
        with _translated(self.config, call):
            yield from response.iter_bytes()

    def close(self) -> None:
        self._http.close()


class AsyncTransport:
    def __init__(self, config: Config, http: AsyncHttp | None = None) -> None:
        self.config = config
        self.client: Any = None
        """Who made this transport; answers that have verbs know it."""
        self._http = httpx.AsyncClient(transport=http, verify=config.tls, trust_env=not config.loopback)

    async def send(self, call: Call[M], on_progress: Progress | None = None) -> M:
        """The parsed answer, after at most `max_attempts` tries with one idempotency key."""
        attempt = 1
        while True:
            try:
                return await self._once(call, on_progress)
            except APIError as error:
                if attempt > 1 and _gone(call, error):
                    return call.expect()
                delay = _delay(error, attempt, self.config)
                if delay is None:
                    raise
            await self.config.runtime.sleep_async(delay)
            attempt += 1

    async def _once(self, call: Call[M], on_progress: Progress | None) -> M:
        content = call.body() if call.file is None else _off_loop(_reported(call.file, None), call.file, on_progress)
        timeout = _timeout(self.config.timeout if call.file is None else _UPLOAD_SECONDS)
        request = self._http.build_request(**_request(self.config, call), content=content, timeout=timeout)
        with _translated(self.config, call):
            response = await self._http.send(request)
        return _parsed(call, response, self.client)

    @asynccontextmanager
    async def stream(self, call: Call[Any], read_timeout: float) -> AsyncIterator[AsyncStream]:
        """One try. Reading the chunks raises `APIConnectionError` if the connection breaks."""
        timeout = _timeout(read_timeout)
        request = self._http.build_request(**_request(self.config, call), timeout=timeout)
        with _translated(self.config, call):
            response = await self._http.send(request, stream=True)
        try:
            if not response.is_success:
                with _translated(self.config, call):
                    await response.aread()
                raise _error(response)
            async with aclosing(self._chunks(call, response)) as chunks:
                yield AsyncStream(response.status_code, response.headers, chunks)
        finally:
            await response.aclose()

    async def _chunks(self, call: Call[Any], response: httpx.Response) -> AsyncGenerator[bytes, None]:
        with _translated(self.config, call):
            async for chunk in response.aiter_bytes():
                yield chunk

    async def close(self) -> None:
        await self._http.aclose()


def _timeout(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS))


@cache
def _user_agent() -> str:
    return f"finery-python/{version('finery')} python/{platform.python_version()}"


def _request(config: Config, call: Call[Any]) -> dict[str, Any]:
    headers = {
        "Authorization": f"Bearer {config.api_key}",
        "Accept": "application/json",
        "Accept-Encoding": "identity",  # offsets, sizes and hashes are those of the bytes themselves
        "User-Agent": _user_agent(),
        **dict(call.headers),
    }
    if call.idempotency_key is not None:
        headers["Idempotency-Key"] = call.idempotency_key
    if call.json is not None:
        headers["Content-Type"] = "application/json"
    if call.file is not None:
        headers["Content-Type"] = call.file.content_type
        headers["Content-Length"] = str(call.file.length)
    return {"method": call.method, "url": config.base_url + call.path, "params": list(call.params), "headers": headers}


def _reported(file: Multipart, on_progress: Progress | None) -> Iterator[bytes]:
    sent = 0
    for chunk in file.chunks():
        yield chunk
        sent += len(chunk)
        if on_progress is not None:
            on_progress(file.file_bytes(sent), file.upload.size)


async def _off_loop(chunks: Iterator[bytes], file: Multipart, on_progress: Progress | None) -> AsyncIterator[bytes]:
    """The disk is read in a thread, progress is reported on the loop."""
    sent = 0
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk
        sent += len(chunk)
        if on_progress is not None:
            on_progress(file.file_bytes(sent), file.upload.size)


@contextmanager
def _translated(config: Config, call: Call[Any]) -> Iterator[None]:
    where = f"{call.method} {config.base_url}{call.path}"
    try:
        yield
    except httpx.TimeoutException as error:
        raise APITimeoutError(f"No answer in time from {where}: {type(error).__name__}", code="timeout") from error
    except httpx.ConnectError as error:
        hint = "is the server running, and is FINERY_BASE_URL right?"
        raise APIConnectionError(f"Could not reach {where}: {error}; {hint}", code="connection_error") from error
    except httpx.HTTPError as error:
        message = f"The connection broke at {where}: {type(error).__name__} {error}".rstrip()
        raise APIConnectionError(message, code="connection_error") from error


def _delay(error: APIError, attempt: int, config: Config) -> float | None:
    return retry_delay(error, attempt, max_attempts=config.max_attempts, random=config.runtime.random)


def _gone(call: Call[Any], error: APIError) -> bool:
    """An earlier attempt deleted it, and its answer was lost."""
    return call.expect is Nothing and error.status == 404


def _error(response: httpx.Response) -> APIError:
    return from_response(response.status_code, response.headers, response.content)


def _parsed(call: Call[M], response: httpx.Response, client: object) -> M:
    if not response.is_success:
        raise _error(response)
    if call.expect is Nothing:
        return call.expect()
    try:
        answer = call.expect.model_validate_json(response.content)
        link(answer, client)
        return answer
    except ValidationError as error:
        kind = response.headers.get("content-type", "no content type")
        message = f"Expected a {call.expect.__name__} from {call.path}, found {kind}: {error.errors()[0]['msg']}"
        raise APIError(
            message,
            status=response.status_code,
            code="unexpected_response",
            request_id=response.headers.get("x-request-id"),
            should_retry=False,
        ) from None
