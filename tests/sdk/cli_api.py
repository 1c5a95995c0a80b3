"""A server with one of each noun, for the tests of the command."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .support import Handler, HttpServer, Seen, checkpoint_json, event_json, file_json, job_json, page_json, sse

FILES = {"adapter_config.json": b"{}", "sub/a.bin": b"0123456789"}
HISTORY = [
    event_json(1, "state", to="queued", message="All accelerators are in use."),
    event_json(2, "state", to="running"),
    event_json(3, step=1, total_steps=2, loss=3.94, tokens_per_second=99.0, step_seconds=1.5, cost="0.000012"),
    event_json(4, step=2, total_steps=2, loss=3.48, tokens_per_second=99.0, step_seconds=1.5, cost="0.000024"),
    event_json(5, "checkpoint", checkpoint="ckpt_1", step=2, final=True),
    event_json(6, "state", to="succeeded"),
]


TRAINED = {"id": 1, "text": "<ok>\x1b[31m", "trained": True}
PREVIEW = {
    "id": "pv_1",
    "file": "file_1",
    "model": "m",
    "status": "ready",
    "rows": [{"line": 3, "tokens": [TRAINED], "trained_tokens": 1}],
    "created_at": "2026-11-30T12:00:00Z",
}


@dataclass
class Api:
    """A server with one of each; `answers` overrides by method and path."""

    server: HttpServer | None = None
    state: str = "succeeded"
    upload: dict[str, Any] = field(default_factory=file_json)
    answers: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)

    def reply(self, handler: Handler, seen: Seen) -> None:
        path = seen.path.partition("?")[0]
        job = job_json(state=self.state, name="bot")
        checkpoint = checkpoint_json(FILES)
        usage = {"object": "usage", "sku": "train.sft", "quantity": 9, "billable": 9, "provisional": 0, "void": 0}
        model = {"id": "mdl_1", "name": "smollm2", "max_length": 2048, "prices": {"train.sft": "0.5"}}
        documents = {
            "POST /v1/files": self.upload,
            "GET /v1/files": page_json([file_json()]),
            "GET /v1/files/file_1": file_json(),
            "POST /v1/jobs": job,
            "GET /v1/jobs": page_json([job]),
            "GET /v1/jobs/job_1": job,
            "POST /v1/jobs/job_1/cancel": job_json(state="cancelled"),
            "POST /v1/jobs/job_1/pause": job_json(intent="pause"),
            "POST /v1/jobs/job_1/resume": job_json(state="queued"),
            "POST /v1/files/file_1/previews": PREVIEW,
            "DELETE /v1/files/file_1": {"object": "file", "id": "file_1", "deleted": True},
            "DELETE /v1/checkpoints/ckpt_1": {"object": "checkpoint", "id": "ckpt_1", "deleted": True},
            "GET /v1/jobs/job_1/events": page_json(HISTORY),
            "GET /v1/checkpoints": page_json([checkpoint_json({}, id="ckpt_0"), checkpoint]),
            "GET /v1/checkpoints/ckpt_1": checkpoint,
            "GET /v1/models": page_json([{**model, "created_at": "2026-11-30T12:00:00Z"}]),
            "GET /v1/usage": page_json([{**usage, "cost": "0.0000045"}]),
        }
        call = f"{seen.method} {path}"
        if call in self.answers:
            return handler.json(*self.answers[call])
        if seen.headers.get("accept") == "text/event-stream":
            handler.stream()
            return self._send(handler, sse(*HISTORY, done=True))
        if "/files/" in path and path.startswith("/v1/checkpoints"):
            return handler.whole(200, FILES[path.partition("/files/")[2]])
        return handler.json(200, documents[call])

    def _send(self, handler: Handler, content: bytes) -> None:
        handler.wfile.write(content)

    def sent(self, call: str) -> Seen:
        assert self.server is not None
        (seen,) = [seen for seen in self.server.seen if f"{seen.method} {seen.path}" == call]
        return seen


@dataclass
class Result:
    code: int
    out: str
    err: str
