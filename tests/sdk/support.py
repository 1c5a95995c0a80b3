"""What the SDK's tests share: answers as the server gives them, a client on a mock transport, a real HTTP server."""

from __future__ import annotations

import hashlib
import inspect
import json
import threading
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from finery import AsyncFinery, Finery, Runtime

KEY = "fny_s3cr3ts3cr3ts3cr3t"
NOW = "2026-11-30T12:00:00.000000Z"
Client = type[Finery] | type[AsyncFinery]
BOTH: list[Client] = [Finery, AsyncFinery]


def job_json(**changes: Any) -> dict[str, Any]:
    job = {
        "object": "job",
        "id": "job_1",
        "project": "proj_1",
        "method": "sft",
        "model": "smollm2-135m-instruct",
        "training_file": "file_1",
        "seed": 0,
        "adapter": {"type": "lora"},
        "hyperparameters": {},
        "resources": {},
        "priority": "normal",
        "state": "running",
        "progress": {"step": 3, "total_steps": 9, "trained_tokens": 120},
        "usage": {"train.sft": 120},
        "cost": "0.00012",
        "created_at": NOW,
    }
    return {**job, **changes}


def event_json(seq: int, type_: str = "metric", job: str = "job_1", **data: Any) -> dict[str, Any]:
    data = data or {"step": seq, "loss": 1.0}
    return {"object": "event", "job": job, "seq": seq, "type": type_, "data": data, "created_at": NOW}


def file_json(**changes: Any) -> dict[str, Any]:
    file = {"id": "file_1", "project": "proj_1", "name": "a.jsonl", "bytes": 3, "sha256": "00", "status": "valid"}
    return {"object": "file", **file, "format": "chat", "rows": 1, "created_at": NOW, **changes}


def checkpoint_json(files: dict[str, bytes], **changes: Any) -> dict[str, Any]:
    listed = [{"path": p, "bytes": len(b), "sha256": _sha256(b)} for p, b in files.items()]
    checkpoint = {"id": "ckpt_1", "job": "job_1", "project": "proj_1", "step": 3, "final": True, "model": "m"}
    total = sum(map(len, files.values()))
    return {"object": "checkpoint", **checkpoint, "files": listed, "bytes": total, "created_at": NOW, **changes}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def page_json(data: list[dict[str, Any]], *, has_more: bool = False, last_id: str | None = None) -> dict[str, Any]:
    return {"object": "list", "data": data, "has_more": has_more, "last_id": last_id}


def error_json(code: str, message: str = "No.", type_: str = "invalid_request_error", **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": type_, "code": code, "param": None, **more}}


def sse(*events: dict[str, Any], done: bool = False) -> bytes:
    text = "".join(f"id: {e['seq']}\nevent: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events)
    return (text + ("event: done\ndata: {}\n\n" if done else "")).encode()


@dataclass
class Time:
    """A clock that only sleeping moves."""

    now: float = 0.0
    slept: list[float] = field(default_factory=list)
    on_sleep: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self.on_sleep()

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)

    def runtime(self) -> Runtime:
        return Runtime(sleep=self.sleep, sleep_async=self.sleep_async, random=lambda: 1.0, monotonic=lambda: self.now)


def mocked(kind: Client, handler: Callable[[httpx.Request], httpx.Response], time: Time | None = None) -> Any:
    """A client whose requests `handler` answers. Any, so that one test can drive both kinds."""
    runtime = (time or Time()).runtime()
    return kind(KEY, "http://finery.test", transport=httpx.MockTransport(handler), runtime=runtime)


def client_of(kind: Client, server: HttpServer, time: Time | None = None, **options: Any) -> Any:
    """A client of a real server. Any, so that one test can drive both kinds."""
    return kind(KEY, server.url, runtime=(time or Time()).runtime(), **options)


async def value(result: Any) -> Any:
    """What a call of either client gives."""
    return await result if inspect.isawaitable(result) else result


async def items(result: AsyncIterable[Any] | Iterable[Any]) -> list[Any]:
    """What an iteration of either client gives."""
    return [item async for item in result] if isinstance(result, AsyncIterable) else list(result)


@dataclass
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Handler(BaseHTTPRequestHandler):
    """One request on a real socket; `reply` is the test's."""

    protocol_version = "HTTP/1.1"
    server: HttpServer

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name.lower(): text for name, text in self.headers.items()}
        seen = Seen(self.command, self.path, headers, body)
        with self.server.lock:
            self.server.seen.append(seen)
        try:
            self.server.reply(self, seen)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815

    def json(self, status: int, document: dict[str, Any], **headers: str) -> None:
        self.whole(status, json.dumps(document).encode(), **{"Content-Type": "application/json", **headers})

    def whole(self, status: int, body: bytes, **headers: str) -> None:
        self.head(status, **{"Content-Length": str(len(body)), **headers})
        self.wfile.write(body)

    def head(self, status: int, **headers: str) -> None:
        self.send_response(status)
        self.send_header("x-request-id", "req_1")
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()

    def stream(self) -> None:
        """An event stream whose end is the end of the connection, as a proxy's cut looks."""
        self.head(200, **{"Content-Type": "text/event-stream", "Connection": "close"})
        self.close_connection = True

    def cut(self) -> None:
        """End the connection without another byte."""
        self.close_connection = True


class HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, reply: Callable[[Handler, Seen], None], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.reply = reply
        self.seen: list[Seen] = []
        self.lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def to(self, prefix: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.path.startswith(prefix)]


@contextmanager
def serving(reply: Callable[[Handler, Seen], None], port: int = 0) -> Iterator[HttpServer]:
    server = HttpServer(reply, port)
    try:
        yield server
    finally:
        server.stop()
