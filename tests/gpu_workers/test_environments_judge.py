"""Score models: a real HTTP server that answers well, badly, late or not at all."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from finery.types.ids import new_id
from finery_gpu_workers.environments.http import OverdueError, Post
from finery_gpu_workers.environments.rewards import open_rewards
from finery_gpu_workers.environments.types import Answer, Grade
from finery_gpu_workers.errors import WorkerError

from .test_environments import SPEC, failed

SECRET = "what another customer sent"
Reply = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """Answers as `replies` say, the last one for ever; keeps what it was asked."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.over = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                reply = outer.replies.pop(0) if len(outer.replies) > 1 else outer.replies[0]
                try:
                    reply(self)
                except OSError:
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def raw(status: int, body: bytes, **headers: str) -> Reply:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return reply


def says(content: Any, **usage: int) -> Reply:
    answer = {"choices": [{"message": {"role": "assistant", "content": content}}], "usage": usage}
    return raw(200, json.dumps(answer).encode())


def hangs(server: Server) -> Reply:
    return lambda _: (server.over.wait(60), None)[1]


def drips(server: Server) -> Reply:
    """A header that never ends, one byte at a time: no single read waits long."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Drip: ")
        while not server.over.wait(0.05):
            handler.wfile.write(b"x")

    return reply


def breaks(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.close()


def grader(server: Server, **fields: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": "{{ item.question }} {{ sample.output_text }}"},
    ]
    return {"type": "score_model", "base_url": server.url, "model": "judge", "input": messages} | fields


def graded(server: Server, folder: Path, **fields: Any) -> Grade:
    spec = SPEC.validate_python({"type": "prompts", "file": new_id("file", 2), "grader": grader(server, **fields)})
    rewards = open_rewards(spec, folder, workers=1, score_models={server.url: "key-of-the-operator"})
    try:
        return rewards.submit(Answer("Four.", {"question": "2 + 2?"})).result(30)
    finally:
        rewards.close()


def test_it_is_asked_and_its_number_is_the_reward(server: Server, tmp_path: Path) -> None:
    server.replies = [says("0.75", prompt_tokens=21, completion_tokens=3)]
    grade = graded(server, tmp_path)
    assert (grade.reward, grade.llm_input, grade.llm_output) == (0.75, 21, 3)
    [(path, headers, body)] = server.asked
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer key-of-the-operator"
    assert body["model"] == "judge"
    assert body["messages"] == [
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": "2 + 2? Four."},
    ]


@pytest.mark.parametrize(
    ("content", "reward"),
    [("0.5", 0.5), (" 1\n", 1.0), ("Score: 0.25.", 0.25), ('{"result": 1, "why": "2 of 2"}', 1.0), ("-0", 0.0)],
)
def test_numbers_that_are_read(server: Server, tmp_path: Path, content: str, reward: float) -> None:
    server.replies = [says(content)]
    assert graded(server, tmp_path).reward == reward


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (f"no number, {SECRET}", "invalid_reward", "found none"),
        ("7 of 10", "invalid_reward", "found 2"),
        ("2", "invalid_reward", "from 0 to 1, found one outside"),
        ('{"result": NaN}', "invalid_reward", "finite"),
        ('{"result": "1"}', "invalid_reward", "found something else"),
        ("1e999", "invalid_reward", "finite"),
        ("1.2.3", "invalid_reward", "found none"),
        (None, "error", "a chat completion"),
        ([SECRET], "error", "a chat completion"),
    ],
)
def test_what_is_no_reward(server: Server, tmp_path: Path, content: Any, code: str, message: str) -> None:
    server.replies = [says(content, prompt_tokens=5, completion_tokens=2)]
    grade = graded(server, tmp_path)
    found, shown = failed(grade)
    assert found == code
    assert message in shown
    assert SECRET not in shown
    assert (grade.llm_input, grade.llm_output) == (5, 2)  # it did work, and is to be paid


@pytest.mark.parametrize(
    ("reply", "code", "message", "tries"),
    [
        (raw(302, SECRET.encode(), Location="http://127.0.0.1:1/secret"), "error", "found 302", 1),
        (raw(401, SECRET.encode()), "error", "found 401", 1),
        (raw(500, SECRET.encode()), "unreachable", "found 500", 2),
        (raw(429, SECRET.encode()), "unreachable", "found 429", 2),
        (raw(200, SECRET.encode()), "error", "a chat completion", 1),
        (raw(200, b"[" * 100_000), "error", "a chat completion", 1),
        (raw(200, b"x" * (2**20 + 10)), "error", "at most 1048576 bytes", 1),
        (breaks, "unreachable", "not reached", 2),
    ],
)
def test_servers_that_answer_badly(
    server: Server, tmp_path: Path, reply: Reply, code: str, message: str, tries: int
) -> None:
    server.replies = [reply]
    found, shown = failed(graded(server, tmp_path))
    assert (found, message in shown) == (code, True), shown
    assert SECRET not in shown
    assert len(server.asked) == tries


def test_a_failure_that_passes_is_tried_again(server: Server, tmp_path: Path) -> None:
    server.replies = [raw(503, b""), says("1", prompt_tokens=4, completion_tokens=1)]
    grade = graded(server, tmp_path)
    assert (grade.reward, grade.llm_input) == (1.0, 4)
    assert len(server.asked) == 2


@pytest.mark.parametrize("slow", [hangs, drips])
def test_a_server_that_never_ends_is_a_timeout(server: Server, tmp_path: Path, slow: Callable[[Server], Reply]) -> None:
    server.replies = [slow(server)]
    grade = graded(server, tmp_path, timeout_seconds=0.5)
    assert failed(grade)[0] == "timeout"
    assert 0.5 <= grade.seconds < 3.5


def test_nobody_there(server: Server, tmp_path: Path) -> None:
    server.close()
    assert failed(graded(server, tmp_path))[0] == "unreachable"


def test_only_addresses_that_the_operator_allows(server: Server, tmp_path: Path) -> None:
    """H06: compared as they are, so no other spelling of a host gets through, and nothing is asked."""
    for base in ("http://127.0.0.1:1/v1", server.url.replace("127.0.0.1", "[::ffff:127.0.0.1]"), server.url + "x"):
        spec = SPEC.validate_python(
            {"type": "prompts", "file": new_id("file", 2), "grader": grader(server, base_url=base)}
        )
        with pytest.raises(WorkerError, match="that the operator allows") as found:
            open_rewards(spec, tmp_path, workers=1, score_models={server.url: None})
        assert found.value.code == "invalid_environment"
    assert server.asked == []


def test_closing_does_not_wait_for_a_server(server: Server, tmp_path: Path) -> None:
    server.replies = [hangs(server)]
    spec = SPEC.validate_python(
        {"type": "prompts", "file": new_id("file", 2), "grader": grader(server, timeout_seconds=60)}
    )
    rewards = open_rewards(spec, tmp_path, workers=1, score_models={server.url + "/": None})
    future = rewards.submit(Answer("Four.", {"question": "2 + 2?"}))
    while not server.asked:
        time.sleep(0.01)
    began = time.monotonic()
    rewards.close()
    assert time.monotonic() - began < 5
    assert failed(future.result(0))[0] in ("timeout", "lost")
    assert "authorization" not in server.asked[0][1]


def test_all_addresses_of_a_host_share_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for one in (first, second):  # whoever comes after them waits
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        found = socket.getaddrinfo("127.0.0.1", full.getsockname()[1], type=socket.SOCK_STREAM)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found * 4)
        began = time.monotonic()
        with pytest.raises(OverdueError):
            Post("http://judge.example/v1", {}, max_bytes=100).send({}, began + 0.5)
        assert 0.5 <= time.monotonic() - began < 1.0


def test_a_handshake_that_never_ends_is_overdue() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(bytes([22, 3, 3, 16, 0]))  # the head of a long record
                while True:
                    connection.sendall(b"x")
                    time.sleep(0.05)

        threading.Thread(target=drip, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(OverdueError):
            Post(f"https://127.0.0.1:{server.getsockname()[1]}", {}, max_bytes=100).send({}, began + 0.5)
        assert 0.4 <= time.monotonic() - began < 1.5
