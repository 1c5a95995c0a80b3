"""The child that renders (`data/render.py`): started, watched, killed where it is stuck in a row or takes far too long,
when the customer cancels, and when this process dies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from finery.types.errors import ErrorDetail
from finery.types.jobs import Intent
from finery.types.reasons import JobReason
from finery_gpu_workers.data.rendering import Phase
from finery_gpu_workers.data.request import PROGRESS, RESULT, Progress, Request, Upload
from finery_gpu_workers.work import Ending, Work, stopped_by_customer

_COMPRESSED = 20


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    row: float = 30.0
    """Of the template, without progress."""
    start: float = 300.0
    """And for what is tokenised at once: a line of 16 MiB without a blank takes a minute, and cannot loop."""
    total: float = 600.0
    """Plus what the size of the files allows at `bytes_per_second`."""
    bytes_per_second: float = 50_000.0


def run_child(work: Work, request: Request, limits: Limits) -> dict[str, Any] | Ending:
    """Runs the child to its end, or kills it; its result."""
    progress = Progress(request.output / PROGRESS, create=True)
    errors = work.folder / "render.log"
    with errors.open("wb") as log:
        command = [sys.executable, "-m", "finery_gpu_workers.data.render"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=_environment())
    try:
        _send(child, request)
        size = sum(map(_size, request.files.values()))
        if ending := _watch(work, child, progress, limits, size, list(request.params.values())):
            return ending
    finally:
        child.kill()
        child.wait()
        progress.close()
        (request.output / PROGRESS).unlink()
    result = request.output / RESULT
    if child.returncode != 0 or not result.exists():
        tail = errors.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"rendering ended with {child.returncode}: {tail}")
    content: dict[str, Any] = json.loads(result.read_text())
    result.unlink()
    return content


def _size(upload: Upload) -> int:
    """About the bytes of its rows as JSONL; parquet is compressed."""
    return upload.path.stat().st_size * (_COMPRESSED if upload.encoding == "parquet" else 1)


def _send(child: subprocess.Popen[bytes], request: Request) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(request.model_dump_json().encode())
        child.stdin.close()
    except BrokenPipeError:
        pass  # it died; its exit status and log say why


def _environment() -> dict[str, str]:
    """Nothing of ours but what Python needs: no address, no token, no store."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG") if name in os.environ}
    # Bounds address space that threads reserve without using.
    return kept | {"MALLOC_ARENA_MAX": "4", "RAYON_NUM_THREADS": str(min(8, os.cpu_count() or 1))}


def _watch(
    work: Work, child: subprocess.Popen[bytes], progress: Progress, limits: Limits, size: int, params: list[str]
) -> Ending | None:
    """Returns when the child has ended by itself, or with the ending that follows from why it must be killed."""
    started = moved = time.monotonic()
    seen = progress.get()
    while True:
        try:
            child.wait(0.1)
            return None
        except subprocess.TimeoutExpired:
            pass
        # A pause takes effect before an accelerator is taken; the preparation goes on.
        if (intent := work.control.intent) is Intent.CANCEL:
            return stopped_by_customer(intent)
        now = time.monotonic()
        if (current := progress.get()) != seen:
            seen, moved = current, now
        allowed = limits.row if seen[0] is Phase.TEMPLATE else limits.start
        if now - moved > allowed:
            return _stuck(seen, now - moved, params)
        if now - started > limits.total + size / limits.bytes_per_second:
            # It moves, so no row is at fault: a busy machine, perhaps; another attempt may do better.
            raise TimeoutError(f"rendering {size} bytes did not end in {now - started:.0f} s; it is at {seen}")


def _stuck(place: tuple[Phase, int, int, int], seconds: float, params: list[str]) -> Ending:
    phase, file, line, _ = place
    if phase is not Phase.TEMPLATE:
        raise TimeoutError(f"rendering made no progress for {seconds:.0f} s in phase {phase.name}")
    message = f"The model's chat template did not render line {line} in {seconds:.0f} s; it may loop."
    param = params[file]
    return invalid("invalid_chat_template", message, param if line else "model", [{"line": line}] if line else None)


def refused(result: dict[str, Any], params: dict[str, str]) -> Ending | None:
    """The ending of a job whose rows or template cannot be used."""
    if error := result.get("error"):
        return invalid(error["code"], error["message"], error["param"] or "model")
    if problems := result.get("problems"):
        first = problems[0]
        place = f"line {first['line']}" if first["line"] else "the file"
        message = (
            f"{result['count']} of the file's lines cannot be used; {place}"
            f"{', ' + first['path'] if first['path'] else ''}: {first['message']}."
        )
        return invalid(first["code"], message, params[result["set"]], problems)
    return None


def invalid(code: str, message: str, param: str, details: list[dict[str, Any]] | None = None) -> Ending:
    error = ErrorDetail(message=message, type="invalid_request_error", code=code, param=param, details=details)
    return Ending(JobReason.INVALID_DATA, error)
