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
from typing import Any

from finery.types.data import DataReport
from finery.types.errors import ErrorDetail
from finery.types.files import FileEncoding
from finery.types.jobs import Intent
from finery.types.reasons import JobReason
from finery_gpu_workers import storage
from finery_gpu_workers.data import prepared
from finery_gpu_workers.data.chat import template_sha256
from finery_gpu_workers.data.cutting import NO_TRAINABLE_TOKENS, TOO_LONG
from finery_gpu_workers.data.packing import Plan
from finery_gpu_workers.data.render import PARAMS, PROGRESS, RESULT, Progress, Request, Upload
from finery_gpu_workers.data.rendering import Phase
from finery_gpu_workers.data.tokens import tokenizer_sha256
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.catalog import longest_row
from finery_gpu_workers.start import check_bases, tokenizer_folder, vocabulary
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


def prepare(work: Work, now: datetime, limits: Limits | None = None) -> Ending | None:
    """None when the data is prepared, stored and reported; otherwise why the job ends."""
    hyper = work.spec.hyperparameters
    request = request_of(work, now, train_on=hyper.train_on, max_length=hyper.max_length, truncation=hyper.truncation)
    result = run_child(work, request, limits or Limits())
    if isinstance(result, Ending):
        return result
    if ending := refused(result) or _nothing_to_train(result, hyper.max_length):
        return ending
    _report(work, request, result)
    return None


def request_of(work: Work, now: datetime, **settings: Any) -> Request:
    """What the child is to do; `settings` are train_on, max_length, truncation and perhaps preview, added_tokens."""
    check_bases(work)
    output = work.folder / "prepared"
    output.mkdir()
    return Request(
        **{"added_tokens": work.spec.added_tokens, "preview": None} | settings,
        tokenizer_folder=tokenizer_folder(work),
        vocabulary=vocabulary(work).rows,
        files=_download(work),
        output=output,
        now=now,
        parent=os.getpid(),
    )


def _download(work: Work) -> dict[str, Upload]:
    given = work.assignment
    files = {"train": (given.training_key, given.training_sha256, given.training_encoding)}
    if given.validation_key:
        files["validation"] = (given.validation_key, given.validation_sha256, given.validation_encoding)
    uploads = {}
    for name, (key, sha256, encoding) in files.items():
        read_as: FileEncoding = "parquet" if encoding == "parquet" else "jsonl"
        uploads[name] = Upload(path=work.folder / f"{name}.{read_as}", encoding=read_as)
        storage.download(work.store, key, uploads[name].path, sha256)
    return uploads


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
        if ending := _watch(work, child, progress, limits, size):
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
        # A pause takes effect before an accelerator is taken; the preparation goes on.
        if (intent := work.control.intent) is Intent.CANCEL:
            return stopped_by_customer(intent)
        now = time.monotonic()
        if (current := progress.get()) != seen:
            seen, moved = current, now
        allowed = limits.row if seen[0] is Phase.TEMPLATE else limits.start
        if now - moved > allowed:
            return _stuck(seen, now - moved)
        if now - started > limits.total + size / limits.bytes_per_second:
            # It moves, so no row is at fault: a busy machine, perhaps; another attempt may do better.
            raise TimeoutError(f"rendering {size} bytes did not end in {now - started:.0f} s; it is at {seen}")


def _stuck(place: tuple[Phase, int, int, int], seconds: float) -> Ending:
    phase, file, line, _ = place
    if phase is not Phase.TEMPLATE:
        raise TimeoutError(f"rendering made no progress for {seconds:.0f} s in phase {phase.name}")
    message = f"The model's chat template did not render line {line} in {seconds:.0f} s; it may loop."
    param = list(PARAMS.values())[file]
    return _invalid("invalid_chat_template", message, param if line else "model", [{"line": line}] if line else None)


def refused(result: dict[str, Any]) -> Ending | None:
    """The ending of a job whose rows or template cannot be used."""
    if error := result.get("error"):
        return _invalid(error["code"], error["message"], error["param"] or "model")
    if problems := result.get("problems"):
        first = problems[0]
        place = f"line {first['line']}" if first["line"] else "the file"
        message = (
            f"{result['count']} of the file's lines cannot be used; {place}"
            f"{', ' + first['path'] if first['path'] else ''}: {first['message']}."
        )
        return _invalid(first["code"], message, PARAMS[result["set"]], problems)
    return None


def _nothing_to_train(result: dict[str, Any], max_length: int) -> Ending | None:
    for name, report in result["report"]["sets"].items():
        if not report["rows"]:
            return Ending(JobReason.NO_TRAINABLE_TOKENS, _nothing_left(report, PARAMS[name], max_length))
    return None


def _invalid(code: str, message: str, param: str, details: list[dict[str, Any]] | None = None) -> Ending:
    error = ErrorDetail(message=message, type="invalid_request_error", code=code, param=param, details=details)
    return Ending(JobReason.INVALID_DATA, error)


def _nothing_left(report: dict[str, Any], param: str, max_length: int) -> ErrorDetail:
    reasons = ", ".join(f"{count} {reason}" for reason, count in report["dropped"].items())
    longest, limit = report["longest"], f"hyperparameters.max_length, {max_length}"
    why = []
    if TOO_LONG in report["dropped"]:
        why.append(f"Rows longer than {limit}, are left out by truncation drop; the longest has {longest} tokens.")
    if NO_TRAINABLE_TOKENS in report["dropped"]:
        why.append(
            "Rows have nothing to train where weights are 0, labels are -100, a row is a single token, or train_on "
            "means none of their parts."
        )
        if longest > max_length and TOO_LONG not in report["dropped"]:
            why.append(f"Rows also lose their tokens where they are cut at {limit}; the longest has {longest} tokens.")
    return ErrorDetail(
        message=f"Expected rows with tokens to train on, found none: all {report['dropped_rows']} rows are left out "
        f"({reasons or 'no rows'}). {' '.join(why)}",
        type="invalid_request_error",
        code="no_trainable_tokens",
        param=param,
        details=[{"dropped_rows": report["dropped_rows"], "lines": report["dropped_lines"]}],
    )


def _report(work: Work, request: Request, result: dict[str, Any]) -> None:
    for name, entry in result["sets"].items():
        _check_ids(name, entry["highest_token"], request)
    data = prepared.load(request.output)
    _check_lengths(work, data)
    plan = Plan(data.train.lengths, work.spec.hyperparameters, work.spec.seed)
    prefix = work.assignment.output_prefix + "prepared/"
    storage.upload_all(work.store, request.output, prefix)
    report = DataReport.model_validate(result["report"])
    train = report.sets["train"]
    work.control.report_prepared(
        prepared_prefix=prefix,
        rows=train.rows,
        tokens=train.tokens,
        trained_tokens=train.trained_tokens,
        dropped_rows=train.dropped_rows,
        truncated_rows=train.truncated_rows,
        total_steps=plan.total_steps,
        total_trained_tokens=plan.total(data.train.trained),
        statistics_json=report.model_dump_json(),
    )


def _check_ids(name: str, highest: int, request: Request) -> None:
    """Here, and not by a fault on an accelerator."""
    if highest >= request.vocabulary:
        expected = f"token ids below {request.vocabulary}, the rows of the embedding matrix"
        folder = request.tokenizer_folder.name
        raise WorkerError("invalid_model", f"{folder}: expected {expected}, found {highest} in the {name} data")


def _check_lengths(work: Work, data: prepared.Prepared) -> None:
    """Here, and not after the wait for an accelerator."""
    limit = longest_row(work.model_folder)
    found = max(int(one.lengths.max(initial=0)) for one in (data.train, data.validation) if one)
    if limit is not None and found > limit:
        message = f"expected rows of at most {limit} tokens, which this model sees whole, found one of {found}"
        param = "hyperparameters.max_length"
        raise WorkerError("row_too_long_for_model", f"{message}; lower {param}", param=param)


def load_prepared(work: Work) -> prepared.Prepared:
    """The prepared data on a training worker; it must be of this worker's tokenizer and template."""
    folder, tokenizer = work.folder / "prepared", tokenizer_folder(work)
    prefix = work.assignment.prepared_prefix
    index = json.loads(storage.read(work.store, prefix + prepared.INDEX))
    files = [(file["path"], file["sha256"]) for entry in index["sets"].values() for file in entry["files"]]
    storage.download_all(work.store, prefix, [(prepared.INDEX, None), *files], folder)
    expected = {"tokenizer": tokenizer_sha256(tokenizer)}
    if index["template_sha256"] is not None:
        expected["template"] = template_sha256(tokenizer)
    for name, digest in expected.items():
        if index[f"{name}_sha256"] != digest:
            message = f"{name}: expected {digest}, found data prepared with {index[f'{name}_sha256']}"
            raise WorkerError("model_changed", message)
    return prepared.load(folder)
