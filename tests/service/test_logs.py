"""Logs are one JSON object a line, and no secret gets into them by any way."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from finery_service.auth.secrets import new_secret
from finery_service.logs import redact_text


def lines_of(code: str) -> list[dict[str, object]]:
    """Run `code` in a process that logs, and parse what it wrote."""
    head = "import logging, structlog\nfrom finery_service import logs\nlogs.configure('test')\n"
    result = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert result.stdout == ""
    return [json.loads(line) for line in result.stderr.splitlines()]


def test_both_loggers_write_json_with_time_level_logger_and_process() -> None:
    structured, standard = lines_of("""
        structlog.get_logger("ours").info("moved", job="job_1", tokens=3)
        logging.getLogger("theirs").warning("%s happened", "it", extra={"port": 1})
    """)
    assert structured["event"] == "moved"
    assert (structured["job"], structured["tokens"], structured["level"]) == ("job_1", 3, "info")
    assert (standard["event"], standard["port"], standard["level"]) == ("it happened", 1, "warning")
    assert [line["logger"] for line in (structured, standard)] == ["ours", "theirs"]
    assert all(line["process"] == "test" and str(line["timestamp"]).endswith("Z") for line in (structured, standard))


def test_secrets_are_blotted_out_of_fields_messages_and_tracebacks() -> None:
    key = new_secret("fny")
    lines = lines_of(f"""
        log = structlog.get_logger()
        log.info("started", attempt_token="abcdef0123", FINERY_OWNER_DSN="x", password="hunter22", tokens=5)
        logging.getLogger("uvicorn").info("GET / authorization: Bearer abc.def-ghi123 {key}")
        try:
            raise ValueError("cannot connect to postgresql://finery_app:hunter22@127.0.0.1:5/finery with {key}")
        except ValueError:
            log.exception("failed")
    """)
    text = json.dumps(lines)
    for secret in ("abcdef0123", "hunter22", key, key[8:], "abc.def-ghi123"):
        assert secret not in text
    assert lines[0]["tokens"] == 5, "counts are no secrets"
    assert key[:8] in text, "the prefix tells keys apart"
    assert "postgresql://finery_app:…@127.0.0.1:5/finery" in str(lines[2]["exception"])


@pytest.mark.parametrize("text", ["job_0123456789", "http://127.0.0.1:8700/v1", "trained 5 tokens", "ratio 3:4@5"])
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact_text(text) == text
