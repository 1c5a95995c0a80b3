"""`python -m finery_gpu_workers.data.render`: renders and tokenises uploaded rows in a process that can be killed.

It runs foreign templates, so it holds no credential and does not reach the network for anything: it reads a request as
JSON on stdin, the model's tokenizer and the rows from disk, and writes shards, index and `result.json` into a folder;
or, where only a preview is wanted, just its rows and what is to be warned of. How far it is stands in a small shared
file, so that whoever started it can tell slow from stuck.
"""

from __future__ import annotations

import ctypes
import json
import resource
import signal
import sys
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from finery.types.data import DataReport
from finery_gpu_workers.data.chat import RowError, template_sha256
from finery_gpu_workers.data.cutting import Cutter
from finery_gpu_workers.data.prepared import INDEX
from finery_gpu_workers.data.preparing import Preparing, count
from finery_gpu_workers.data.preview import preview_rows
from finery_gpu_workers.data.reading import read_rows
from finery_gpu_workers.data.rendering import Phase, Renderer
from finery_gpu_workers.data.request import PROGRESS, RESULT, Look, Progress, Request
from finery_gpu_workers.data.statistics import SetStatistics
from finery_gpu_workers.data.tokens import RowTokenizer, tokenizer_sha256
from finery_gpu_workers.errors import WorkerError

MAX_PREVIEW_TOKENS = 250_000
"""More would not fit into one message to the control plane, but into much memory."""
_ADDRESS_SPACE = 8 * 2**30
_PR_SET_PDEATHSIG = 1


def render(request: Request) -> dict[str, Any]:
    """Shards and index into the output folder. The result holds a `report`, or what is wrong; or the preview's rows."""
    progress = Progress(request.output / PROGRESS)
    folder = request.tokenizer_folder
    tokenizer = RowTokenizer.load(folder, request.added_tokens)
    progress.set(0, Phase.TEMPLATE, 0)
    renderer = Renderer(
        folder, tokenizer, request.train_on, request.vocabulary, request.now, progress.rendered, request.method
    )
    cutter = Cutter(request.max_length, request.truncation, next(iter(tokenizer.begin), None))
    if request.preview:
        return _preview(request, request.preview, renderer, cutter, progress)
    preparing = Preparing(request, renderer, cutter, progress)
    if wrong := preparing.all():
        return wrong
    report = DataReport(
        sets=dict(sorted(preparing.reports.items())),
        warnings=tuple(preparing.warnings),
        template_sha256=template_sha256(folder) if renderer.template else None,
        tokenizer_sha256=tokenizer_sha256(folder),
        vocab_size=tokenizer.vocab_size,
    )
    index = {
        "version": 2,
        "sets": preparing.sets,
        "report": report.model_dump(mode="json"),
        "train_on": request.train_on,
        "max_length": request.max_length,
        "truncation": request.truncation,
        "template_sha256": report.template_sha256,
        "tokenizer_sha256": report.tokenizer_sha256,
        "end_of_turn": sorted(tokenizer.end_of_turn),
    }
    (request.output / INDEX).write_text(json.dumps(index, indent=1))
    return {"report": report.model_dump(mode="json"), "sets": preparing.sets}


def _preview(request: Request, look: Look, renderer: Renderer, cutter: Cutter, progress: Progress) -> dict[str, Any]:
    (upload,) = request.files.values()
    rows = islice(read_rows(upload.path, upload.encoding, look.first_line), look.rows)
    found = renderer.render(rows, partial(progress.set, 0))
    shown: list[dict[str, Any]] = []
    statistics, tokens = SetStatistics(), 0
    for rendering in found:
        for row in preview_rows(rendering, renderer.tokenizer, cutter):
            tokens += len(row.tokens)
            if tokens > MAX_PREVIEW_TOKENS:
                message = f"Expected at most {MAX_PREVIEW_TOKENS} tokens to show, found more; ask for fewer rows."
                raise WorkerError("preview_too_large", message, param="rows")
            shown.append(row.model_dump(mode="json"))
        if rendering.problem is None:
            with suppress(RowError):  # shown at the row
                count(rendering, cutter.cut_all(rendering.tokens, rendering.kind), renderer, statistics)
    warnings = [warning.model_dump(mode="json") for warning in statistics.warnings("file")]
    return {"rows": shown, "warnings": warnings}


def _confine(parent: int) -> None:
    """Bounded memory; no life after the parent's."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        import os

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            raise SystemExit("the parent is gone")


def main() -> None:
    request = Request.model_validate_json(sys.stdin.read())
    _confine(request.parent)
    try:
        result = render(request)
    except WorkerError as error:
        result = {"error": {"code": error.code, "message": error.message, "param": error.param}}
    (request.output / RESULT).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
