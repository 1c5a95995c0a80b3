"""A preview is asked for, waited for, and shown; what a row holds never runs."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from typing import Any

import httpx
import pytest

from finery import InternalServerError, PreviewFailedError, WaitTimeoutError
from finery.types.models import Model
from finery.types.previews import Preview, PreviewRow, PreviewToken

from .html import Tags
from .support import Client, Time, error_json, mocked, value

NOW = "2026-11-30T12:00:00Z"
EVIL = "<script>alert(1)</script>\x1b[31m\u202e'\"&"


def token(text: str, *, trained: bool = False) -> dict[str, Any]:
    return {"id": 7, "text": text, "trained": trained}


# F-CHAT: user "hi", assistant "ok"; only o, k and <|im_end|> are trained.
CHAT = [token(text) for text in ("<|im_start|>", *"user", "\n", *"hi", "<|im_end|>", "\n")]
CHAT += [token(text) for text in ("<|im_start|>", *"assistant", "\n")]
CHAT += [token(text, trained=True) for text in ("o", "k", "<|im_end|>")] + [token("\n")]
FAULT = {"line": 3, "path": "messages[0].role", "code": "x", "message": "Expected a role.", "hint": "Add one."}
ROWS = [
    {"line": 1, "tokens": CHAT, "trained_tokens": 3, "truncated": True},
    {"line": 2, "dropped": "no_trainable_tokens", "tokens": [token(EVIL)]},
    {"line": 3, "problem": FAULT},
    {"line": 4, "tokens": [token("a", trained=True)], "trained_tokens": 1},
    {"line": 4, "tokens": [token("b\nc", trained=True), token("", trained=True)], "trained_tokens": 2},
]


def preview_json(status: str = "ready", **more: Any) -> dict[str, Any]:
    rows = ROWS if status == "ready" else []
    return {"id": "pv_1", "file": "file_1", "model": "m", "status": status, "rows": rows, "created_at": NOW, **more}


PREVIEW = Preview.model_validate(preview_json())


class Worker:
    """Answers pending `looks` times, then with what it made."""

    def __init__(self, looks: int, answer: dict[str, Any]) -> None:
        self.looks, self.answer = looks, answer
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if request.method == "POST":
            return httpx.Response(202, json=preview_json("pending"))
        self.looks -= 1
        return httpx.Response(200, json=preview_json("pending") if self.looks > 0 else self.answer)


async def test_a_preview_is_asked_for_once_and_looked_at_ever_less_often(kind: Client) -> None:
    time, worker = Time(), Worker(12, preview_json())
    model = Model(id="mdl_1", name="m", max_length=8, created_at=NOW)
    options = {"train_on": "last", "max_length": 64, "truncation": "left", "added_tokens": ("<t>",), "first_line": 3}
    found = await value(mocked(kind, worker, time).files.preview("file_1", model=model, rows=5, **options))
    assert found == PREVIEW
    assert [f"{one.method} {one.url.path}" for one in worker.requests] == [
        "POST /v1/files/file_1/previews",
        *["GET /v1/files/file_1/previews/pv_1"] * 12,
    ]
    sent = {**options, "model": "mdl_1", "rows": 5, "added_tokens": ["<t>"]}
    assert json.loads(worker.requests[0].content) == sent
    assert worker.requests[0].headers["idempotency-key"]
    assert time.slept[:4] == pytest.approx([0.2, 0.3, 0.45, 0.675])
    assert time.slept == sorted(time.slept)
    assert max(time.slept) == 5.0


async def test_one_that_is_there_at_once_is_not_looked_at_again(kind: Client) -> None:
    time = Time()
    found = await value(
        mocked(kind, lambda request: httpx.Response(201, json=preview_json()), time).files.preview("file_1", model="m")
    )
    assert (found.status, time.slept) == ("ready", [])


async def test_a_preview_that_fails_raises_why(kind: Client) -> None:
    error = {"message": "The model is gone.", "type": "x", "code": "invalid_model"}
    worker = Worker(1, preview_json("failed", error=error))
    with pytest.raises(PreviewFailedError, match=r"with m failed \(invalid_model\): The model is gone.") as caught:
        await value(mocked(kind, worker).files.preview("file_1", model="m"))
    assert caught.value.preview.status == "failed"


async def test_a_preview_that_does_not_come_is_given_up_at_the_timeout(kind: Client) -> None:
    time = Time()
    with pytest.raises(WaitTimeoutError, match="not ready within 10 s") as caught:
        await value(mocked(kind, Worker(99, {}), time).files.preview("file_1", model="m", timeout=10))
    assert isinstance(caught.value, TimeoutError)
    assert time.now == pytest.approx(10)


async def test_a_server_that_is_away_for_a_look_is_asked_again_and_one_that_stays_away_is_not(kind: Client) -> None:
    worker, failures = Worker(1, preview_json()), [503, 500]

    def flaky(request: httpx.Request) -> httpx.Response:
        if request.method == "GET" and failures:
            return httpx.Response(failures.pop(), json=error_json("away"))
        return worker(request)

    assert (await value(mocked(kind, flaky).files.preview("file_1", model="m"))).status == "ready"
    failures += [500] * 9
    with pytest.raises(InternalServerError):
        await value(mocked(kind, flaky).files.preview("file_1", model="m"))


def test_plain_text_marks_the_trained_tokens_and_shows_line_ends_and_counts() -> None:
    shown = PREVIEW.text(color=False)
    assert shown.split("\n\n")[1].splitlines() == [
        "line 1: 25 tokens, 3 trained, truncated",
        "<|im_start|>user⏎",
        "hi<|im_end|>⏎",
        "<|im_start|>assistant⏎",
        "⟦ok<|im_end|>⟧⏎",
    ]
    for said in (
        "line 2: 1 tokens, 0 trained\nleft out of training: no_trainable_tokens",
        "line 3: 0 tokens, 0 trained\na job would refuse this row: messages[0].role: Expected a role. Add one.",
        "line 4, part 1 of 2: 1 tokens, 1 trained\n⟦a⟧",
        "line 4, part 2 of 2: 2 tokens, 2 trained\n⟦b⏎⟧\n⟦c⟧",
    ):
        assert said in shown


def test_colours_mark_the_same_characters() -> None:
    shown = PREVIEW.text(color=True)
    assert "\x1b[30;42mok<|im_end|>\x1b[0m⏎" in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert plain == PREVIEW.text(color=False).replace("⟦", "").replace("⟧", "")


def test_a_row_cannot_command_the_terminal() -> None:
    for color in (False, True):
        shown = re.sub(r"\x1b\[(0|1|2|31|35|30;42)m", "", PREVIEW.text(color=color))
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown)
        assert "<script>alert(1)</script>␛[31m<U+202E>'\"&" in shown


def test_html_marks_the_trained_tokens_and_a_script_in_a_row_is_text() -> None:
    hostile = preview_json(file=EVIL, model=EVIL)
    hostile["rows"] = [*ROWS, {"line": 9, "problem": {**FAULT, "message": EVIL, "path": EVIL}, "dropped": EVIL}]
    preview = Preview.model_validate(hostile)
    for document in (preview.html(), preview._repr_html_()):
        found = Tags(document)
        assert found.tags <= {"html", "head", "meta", "title", "body", "div", "style", "h4", "pre", "mark", "i", "span"}
        assert found.attributes <= {"lang", "charset", "http-equiv", "content", "class", "title", "dir"}
        assert found.marked == ["trained", "o", "k", "<|im_end|>", "a", "b⏎\nc"]
        assert "<script>alert(1)</script>␛[31m<U+202E>'\"&" in found.text
        assert "\x1b" not in document
        assert "src=" not in document
    assert preview.html().startswith("<!doctype html>")
    assert "default-src 'none'" in preview.html()


def test_a_preview_of_nothing_and_a_failed_one_say_so() -> None:
    empty = Preview.model_validate({**preview_json(), "rows": []})
    error = {"message": "Gone.", "type": "x", "code": "y"}
    failed = Preview.model_validate(preview_json("failed", error=error))
    for preview, said in ((empty, "The file has no row at this place"), (failed, "Gone.")):
        for shown in (preview.text(color=False), preview.html()):
            assert said in shown


def test_warnings_are_shown_as_text_and_command_nothing() -> None:
    warning = {"code": "tools_not_rendered", "message": f"The template leaves out tools. {EVIL}"}
    preview = Preview.model_validate(preview_json(warnings=[warning]))
    for shown in (preview.text(color=False), Tags(preview.html()).text):
        assert "warning: The template leaves out tools. <script>alert(1)</script>␛[31m<U+202E>'\"&" in shown
    assert "script" not in Tags(preview.html()).tags
    assert "warning" not in PREVIEW.text(color=False)


PROGRAM = f"""
from finery.types.previews import Preview
print(Preview.model_validate_json({json.dumps(preview_json())!r}))
"""


def printed(terminal: bool, **environment: str) -> str:
    variables = {**{k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM")}, "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", PROGRAM]
    variables |= {"TERM": "xterm", **environment}
    if not terminal:
        return subprocess.run(command, env=variables, capture_output=True, check=True, timeout=60).stdout.decode()
    lead, end = pty.openpty()
    running = subprocess.Popen(command, env=variables, stdout=end)
    os.close(end)
    written = b""
    try:
        while chunk := os.read(lead, 65536):
            written += chunk
    except OSError:  # Linux's way to say that the other end is closed
        pass
    os.close(lead)
    assert running.wait(60) == 0
    return written.decode().replace("\r\n", "\n")


def test_print_is_coloured_in_a_terminal_only_and_where_nobody_minds() -> None:
    assert printed(True).strip() == PREVIEW.text(color=True)
    for terminal, environment in ((False, {}), (True, {"NO_COLOR": "1"}), (True, {"TERM": "dumb"})):
        assert printed(terminal, **environment).strip() == PREVIEW.text(color=False)


def test_the_sides_of_a_pair_are_named() -> None:
    side = PreviewRow(line=5, tokens=(PreviewToken(id=1, text="a", trained=True),), trained_tokens=1)
    pair = tuple(side.model_copy(update={"answer": name}) for name in ("chosen", "rejected"))
    shown = PREVIEW.model_copy(update={"rows": pair}).text(color=False)
    for name in ("chosen", "rejected"):
        assert f"line 5, {name}: 1 tokens, 1 trained\n⟦a⟧" in shown


def test_prompts_are_asked_not_trained() -> None:
    row = {"line": 1, "tokens": [token("2 + 2 =")], "trained_tokens": 0}
    prompts = Preview.model_validate({**preview_json(), "rows": [row]})
    assert prompts.text(color=False) == "file_1 as m is asked\n\nline 1: 1 tokens\n2 + 2 ="
    assert "trained</mark>" not in prompts.html()
    dropped = Preview.model_validate({**preview_json(), "rows": [{**row, "dropped": "no_trainable_tokens"}]})
    assert "marked: ⟦trained⟧\n\nline 1: 1 tokens, 0 trained" in dropped.text(color=False)
