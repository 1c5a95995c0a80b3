"""A look at a file as a model would be trained on it: preparation of a few rows, with nothing stored."""

from __future__ import annotations

import json
from datetime import datetime

from finery.types.previews import PreviewCreate, PreviewRow
from finery_gpu_workers.data.request import PARAMS, Look
from finery_gpu_workers.methods.prepare import request_of
from finery_gpu_workers.methods.rendering_child import Limits, refused, run_child
from finery_gpu_workers.work import Ending, Work


def preview(work: Work, now: datetime, limits: Limits | None = None) -> Ending | None:
    """None when the rows are reported; otherwise why there are none. What is wrong with a row is shown at the row."""
    wanted = PreviewCreate.model_validate_json(work.assignment.preview_json)
    request = request_of(
        work,
        now,
        train_on=wanted.train_on,
        max_length=wanted.max_length,
        truncation=wanted.truncation,
        added_tokens=wanted.added_tokens,
        preview=Look(first_line=wanted.first_line, rows=wanted.rows),
    )
    result = run_child(work, request, limits or Limits())
    if isinstance(result, Ending):
        return result
    if ending := refused(result, PARAMS):
        return ending
    rows = [PreviewRow.model_validate(row) for row in result["rows"]]
    work.control.report_preview(rows, json.dumps(result["warnings"]))
    return None
