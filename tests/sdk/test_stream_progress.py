"""What `stream` and `wait` draw: on stderr, only where asked or where it is a terminal, and never what was printed."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from .support import KEY, Client, Handler, Seen, client_of, event_json, items, job_json, serving, sse, value

EVENTS = [
    event_json(1, "state", to="running"),
    event_json(2, step=1, total_steps=1, loss=3.94, tokens_per_second=99.0, step_seconds=1.5, cost="0.000012"),
    event_json(3, "state", to="succeeded"),
]
PROGRAM = """
from finery import Finery
for event in Finery().jobs.retrieve("job_1").stream({options}):
    print("seen", event.seq)
"""


def reply(handler: Handler, seen: Seen) -> None:
    if "/events" in seen.path:
        handler.stream()
        handler.wfile.write(sse(*EVENTS, done=True))
    else:
        handler.json(200, job_json(state="succeeded", name="bot"))


async def test_a_stream_that_is_asked_to_draws_lines_where_there_is_no_terminal(
    kind: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(reply) as server:
        client = client_of(kind, server)
        job = await value(client.jobs.retrieve("job_1"))
        assert [event.seq for event in await items(job.stream(progress=True))] == [1, 2, 3]
        drawn = capsys.readouterr()
        assert "step 1/1  loss 3.940" in drawn.err
        assert drawn.out == ""
        assert (await value(job.wait(progress=True))).state == "succeeded"
        assert "step 1/1  loss 3.940" in capsys.readouterr().err
        await items(job.stream())
        await value(job.wait())
        assert capsys.readouterr() == ("", "")


def in_terminal(options: str, url: str, out: Path) -> str:
    """What the program writes to its stderr, a terminal; stdout is a file."""
    lead, end = pty.openpty()
    environment = {**os.environ, "FINERY_API_KEY": KEY, "FINERY_BASE_URL": url, "TERM": "xterm", "COLUMNS": "100"}
    with out.open("wb") as file:
        program = [sys.executable, "-c", PROGRAM.format(options=options)]
        running = subprocess.Popen(program, stdout=file, stderr=end, env=environment)
        os.close(end)
        written = b""
        try:
            while chunk := os.read(lead, 65536):
                written += chunk
        except OSError:  # Linux's way to say that the other end is closed
            pass
    os.close(lead)
    assert running.wait(60) == 0, written
    return written.decode()


def test_a_stream_draws_in_a_terminal_and_leaves_what_is_printed_to_a_file_alone(tmp_path: Path) -> None:
    with serving(reply) as server:
        drawn = in_terminal("", server.url, tmp_path / "out")
        assert (tmp_path / "out").read_text() == "seen 1\nseen 2\nseen 3\n"
        assert "bot" in drawn
        assert "loss 3.940" in drawn
        assert "seen" not in drawn
        assert in_terminal("progress=False", server.url, tmp_path / "out") == ""


def test_without_rich_a_stream_draws_only_if_it_is_told_to_and_then_says_what_is_missing() -> None:
    code = """
import sys
for name in ("rich", "rich.console", "rich.progress"): sys.modules[name] = None
from finery._display import display
with display(None, "x") as show: show(None)
try: display(True, "x")
except ImportError as error: assert 'pip install "finery[cli]"' in str(error); sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
