"""What customers' code, models and rows say reaches a terminal as text: no escape sequence, no markup of rich."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from finery._job_view import brief
from finery.errors import EnvironmentRunFailedError, JobFailedError, PreviewFailedError
from finery.progress import JobProgress
from finery.types.environments import EnvironmentRun
from finery.types.jobs import Event, Job
from finery.types.previews import Preview

from .cli_api import PREVIEW, Api
from .support import event_json, file_json, job_json, page_json
from .test_cli_environments import ENVIRONMENT, RUN

HOSTILE = 'Traceback:\n  File "grader.py", line 1\nValueError: \x1b[2J\x1b]0;title\x07 [/red][bold]loud[/bold]'
SHOWN = "ValueError: ␛[2J␛]0;title␇ [/red][bold]loud[/bold]"
ERROR = {"code": "rewards_failed", "message": HOSTILE, "type": "job_error"}
FAULT = {"line": 1, "code": "invalid_json", "path": "a", "message": HOSTILE, "hint": "Mend it."}
EVENTS = [
    event_json(1, "state", to="failed", message=HOSTILE),
    event_json(2, "warning", code="reward_failed", message=HOSTILE),
    event_json(3, "rollout", step=1, kind="train", prompt="q", text=HOSTILE, reward=1.0),
]


@pytest.fixture
def hostile(api: Api) -> Api:
    job = job_json(state="failed", name=HOSTILE, error=ERROR)
    named: dict[str, Any] = {**ENVIRONMENT, "name": HOSTILE, "spec": {"type": "prompts", "grader": HOSTILE}}
    failed: dict[str, Any] = {
        **RUN,
        "status": "failed",
        "prompts": [],
        "answers": [],
        "error": {**ERROR, "code": "invalid_environment"},
    }
    api.upload = file_json(status="invalid", name=HOSTILE, errors=[FAULT], error_count=1)
    api.answers = {
        "GET /v1/jobs": (200, page_json([job])),
        "GET /v1/jobs/job_1": (200, job),
        "GET /v1/jobs/job_1/events": (200, page_json(EVENTS)),
        "GET /v1/files/file_1": (200, api.upload),
        "GET /v1/environments": (200, page_json([named])),
        "GET /v1/environments/env_1": (200, named),
        "POST /v1/environments/env_1/runs": (201, failed),
    }
    return api


@pytest.mark.parametrize(
    "command",
    [
        "jobs get job_1",
        "jobs list",
        "jobs events job_1",
        "jobs watch job_1",
        "files get file_1",
        "environments list",
        "environments get env_1",
        "environments run env_1 4",
    ],
)
def test_no_command_lets_others_write_to_the_terminal(hostile: Api, finery: Any, command: str) -> None:
    if "watch" in command:
        del hostile.answers["GET /v1/jobs/job_1/events"]  # what is streamed instead ends
    result = finery(*command.split())
    written = result.out + result.err
    assert not {"\x1b", "\x07"} & set(written)
    assert SHOWN in " ".join(written.split()).replace("\\n", " ")


def test_a_path_is_no_markup(finery: Any, api: Api) -> None:
    result = finery("files", "preview", "file_1", "--model", "m", "--html", "/nowhere/[/red][bold]x.html")
    assert result.code == 1
    assert "/nowhere/[/red][bold]x.html" in result.err


def test_progress_shows_news_and_obeys_none() -> None:
    screen = io.StringIO()
    progress = JobProgress(Console(file=screen, width=400), label=HOSTILE)
    for event in EVENTS:
        progress(Event.model_validate(event))
    assert "\x1b" not in screen.getvalue()
    assert screen.getvalue().count(SHOWN) == 2, "the state and the warning; samples in training are no news"


def test_errors_are_text() -> None:
    run = EnvironmentRun.model_validate({**RUN, "status": "failed", "error": ERROR})
    preview = Preview.model_validate({**PREVIEW, "status": "failed", "error": ERROR})
    job = Job.model_validate(job_json(state="failed", error=ERROR))
    for error in (EnvironmentRunFailedError(run), PreviewFailedError(preview), JobFailedError(job)):
        assert str(error).endswith(SHOWN)


def test_an_event_is_one_line_whatever_a_traceback_has(hostile: Api, finery: Any) -> None:
    assert len(finery("jobs", "events", "job_1").out.splitlines()) == len(EVENTS)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("All is well.", "All is well."),
        ("", ""),
        ("No reward: Traceback (most recent call last):\n  File\nKeyError: 'a'\n", "No reward: KeyError: 'a'"),
        ("First.\nSecond.", "First. … Second."),
    ],
)
def test_of_a_traceback_the_error_is_kept(message: str, shown: str) -> None:
    assert brief(message) == shown
