"""Preparation, before any accelerator is taken: download, render, count, store, quote.

Rendering runs in a child (`data/render.py`) that is killed when it is stuck in a row or takes far too long, when the
customer cancels, and when this process dies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from finery.types.errors import ErrorDetail
from finery.types.jobs import Intent
from finery.types.reasons import JobReason
from finery_gpu_workers import storage
from finery_gpu_workers.data import prepared
from finery_gpu_workers.data.chat import template_sha256
from finery_gpu_workers.data.packing import Plan
from finery_gpu_workers.data.render import PROGRESS, RESULT, Phase, Progress, Request
from finery_gpu_workers.data.tokens import tokenizer_sha256
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.config import read_config
from finery_gpu_workers.work import Ending, Work, stopped_by_customer

_PARAMS = {"train": "training_file", "validation": "validation_file"}


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    row: float = 30.0
    """Without progress."""
    start: float = 300.0
    total: float = 600.0
    """Plus what the size of the files allows at `bytes_per_second`."""
    bytes_per_second: float = 50_000.0


def prepare(work: Work, now: datetime, limits: Limits | None = None) -> Ending | None:
    """None when the data is prepared, stored and reported; otherwise why the job ends."""
    output = work.folder / "prepared"
    output.mkdir()
    request = Request(
        model_folder=work.model_folder,
        files=_download(work),
        output=output,
        train_on=work.spec.hyperparameters.train_on,
        max_length=work.spec.hyperparameters.max_length,
        now=now,
        parent=os.getpid(),
    )
    result = _render(work, request, limits or Limits())
    if isinstance(result, Ending):
        return result
    if ending := _refused(result):
        return ending
    _report(work, output)
    return None


def _download(work: Work) -> dict[str, Path]:
    assignment = work.assignment
    keys = {"train": (assignment.training_key, assignment.training_sha256)}
    if assignment.validation_key:
        keys["validation"] = (assignment.validation_key, assignment.validation_sha256)
    files = {name: work.folder / f"{name}.jsonl" for name in keys}
    for name, (key, sha256) in keys.items():
        storage.download(work.store, key, files[name], sha256)
    return files


def _render(work: Work, request: Request, limits: Limits) -> dict[str, Any] | Ending:
    """Runs the child to its end, or kills it; its result."""
    progress = Progress(request.output / PROGRESS, create=True)
    errors = work.folder / "render.log"
    with errors.open("wb") as log:
        command = [sys.executable, "-m", "finery_gpu_workers.data.render"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=_environment())
    try:
        _send(child, request)
        if ending := _watch(work, child, progress, limits, sum(f.stat().st_size for f in request.files.values())):
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


def _watch(work: Work, child: subprocess.Popen[bytes], progress: Progress, limits: Limits, size: int) -> Ending | None:
    """Returns when the child has ended by itself, or with the ending that follows from why it must be killed."""
    started = moved = time.monotonic()
    seen = progress.get()
    while True:
        try:
            child.wait(0.1)
            return None
        except subprocess.TimeoutExpired:
            pass
        if (intent := work.control.intent) is not Intent.RUN:
            return stopped_by_customer(intent)
        now = time.monotonic()
        if (current := progress.get()) != seen:
            seen, moved = current, now
        allowed = limits.start if seen[0] is Phase.STARTING else limits.row
        if now - moved > allowed:
            return _stuck(seen, now - moved)
        if now - started > limits.total + size / limits.bytes_per_second:
            # It moves, so no row is at fault: a busy machine, perhaps; another attempt may do better.
            raise TimeoutError(f"rendering {size} bytes did not end in {now - started:.0f} s; it is at {seen}")


def _stuck(place: tuple[Phase, int, int], seconds: float) -> Ending:
    phase, file, line = place
    if phase is not Phase.TEMPLATE:
        raise TimeoutError(f"rendering made no progress for {seconds:.0f} s in phase {phase.name}")
    message = f"The model's chat template did not render line {line} in {seconds:.0f} s; it may loop."
    param = list(_PARAMS.values())[file]
    return _invalid("invalid_chat_template", message, param if line else "model", [{"line": line}] if line else None)


def _refused(result: dict[str, Any]) -> Ending | None:
    if error := result.get("error"):
        return _invalid(error["code"], error["message"], "model")
    if problems := result.get("problems"):
        first = problems[0]
        message = (
            f"{result['count']} of the file's lines cannot be used; line {first['line']}"
            f"{', ' + first['path'] if first['path'] else ''}: {first['message']}."
        )
        return _invalid(first["code"], message, _PARAMS[result["set"]], problems)
    for name, entry in result["sets"].items():
        if not entry["rows"]:
            return Ending(JobReason.NO_TRAINABLE_TOKENS, _nothing_left(entry, _PARAMS[name]))
    return None


def _invalid(code: str, message: str, param: str, details: list[dict[str, Any]] | None = None) -> Ending:
    error = ErrorDetail(message=message, type="invalid_request_error", code=code, param=param, details=details)
    return Ending(JobReason.INVALID_DATA, error)


def _nothing_left(entry: dict[str, Any], param: str) -> ErrorDetail:
    return ErrorDetail(
        message=f"Expected rows with tokens to train on, found none: all {entry['dropped_rows']} rows lose them where "
        "they are cut at max_length; raise hyperparameters.max_length or shorten the prompts.",
        type="invalid_request_error",
        code="no_trainable_tokens",
        param=param,
        details=[{"dropped_rows": entry["dropped_rows"], "lines": entry["dropped_lines"]}],
    )


def _report(work: Work, output: Path) -> None:
    data = prepared.load(output)
    _check_ids(data, work.model_folder)
    plan = Plan(data.train.lengths, work.spec.hyperparameters, work.spec.seed)
    prefix = work.assignment.output_prefix + "prepared/"
    storage.upload_all(work.store, output, prefix)
    sets = {
        name: {key: value for key, value in entry.items() if key != "files"}
        for name, entry in data.index["sets"].items()
    }
    digests = {key: data.index[key] for key in ("template_sha256", "tokenizer_sha256")}
    train = sets["train"]
    work.control.report_prepared(
        prepared_prefix=prefix,
        rows=train["rows"],
        tokens=train["tokens"],
        trained_tokens=train["trained_tokens"],
        dropped_rows=train["dropped_rows"],
        truncated_rows=train["truncated_rows"],
        total_steps=plan.total_steps,
        total_trained_tokens=plan.total(data.train.trained),
        statistics_json=json.dumps({**digests, "sets": sets}),
    )


def _check_ids(data: prepared.Prepared, model_folder: Path) -> None:
    """Here, and not by a fault on an accelerator."""
    vocabulary = read_config(model_folder).vocab
    sets = [data.train, *([data.validation] if data.validation else [])]
    highest = max(int(shard["tokens"].max()) for rows in sets for shard in rows.shards)
    if highest >= vocabulary:
        expected = f"token ids below {vocabulary}, the rows of the embedding matrix"
        raise WorkerError("invalid_model", f"{model_folder.name}: expected {expected}, found {highest} in the data")


def load_prepared(work: Work) -> prepared.Prepared:
    """The prepared data on a training worker; it must be of this worker's tokenizer and template."""
    folder = work.folder / "prepared"
    prefix = work.assignment.prepared_prefix
    index = json.loads(storage.read(work.store, prefix + prepared.INDEX))
    files = [(file["path"], file["sha256"]) for entry in index["sets"].values() for file in entry["files"]]
    storage.download_all(work.store, prefix, [(prepared.INDEX, None), *files], folder)
    expected = {"template": template_sha256(work.model_folder), "tokenizer": tokenizer_sha256(work.model_folder)}
    for name, digest in expected.items():
        if index[f"{name}_sha256"] != digest:
            message = f"{name}: expected {digest}, found data prepared with {index[f'{name}_sha256']}"
            raise WorkerError("model_changed", message)
    return prepared.load(folder)
