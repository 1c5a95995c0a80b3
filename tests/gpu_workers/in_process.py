"""Preparation without a job: what the child does, in this process and so many times as fast."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from finery.types.data import DataReport, SetReport
from finery_gpu_workers.data import prepared
from finery_gpu_workers.data.prepared import Prepared
from finery_gpu_workers.data.render import render
from finery_gpu_workers.data.request import PROGRESS, Progress, Request, Upload

from .samples import NOW


@dataclass(frozen=True)
class Rendered:
    """What came of it: data and report, or the result that says what is wrong."""

    result: dict[str, Any]
    folder: Path

    @property
    def data(self) -> Prepared:
        assert "report" in self.result, self.result
        return prepared.load(self.folder)

    @property
    def report(self) -> DataReport:
        assert "report" in self.result, self.result
        return DataReport.model_validate(self.result["report"])

    @property
    def train(self) -> SetReport:
        return self.report.sets["train"]

    @property
    def problems(self) -> list[tuple[int | None, str, str]]:
        """Line, path, code."""
        return [(p["line"], p["path"], p["code"]) for p in self.result["problems"]]

    @property
    def warnings(self) -> dict[str, list[dict[str, Any]] | None]:
        return {warning.code: warning.details for warning in self.report.warnings}


Render = Callable[..., Rendered]


@pytest.fixture
def rendered(tmp_path: Path, tiny_folder: Path) -> Render:
    """`rendered(method, rows, other=rows of the validation file, model=folder, **settings of the request)`"""
    count = 0

    def _rendered(
        method: str | None,
        rows: list[Any],
        *,
        other: list[Any] | None = None,
        model: Path | None = None,
        **settings: Any,
    ) -> Rendered:
        nonlocal count
        count += 1
        folder = tmp_path / f"rendered-{count}"
        folder.mkdir()
        files = {}
        for name, content in (("train", rows), ("validation", other)):
            if content is not None:
                path = tmp_path / f"{name}-{count}.jsonl"
                path.write_text("".join(json.dumps(row) + "\n" for row in content))
                files[name] = Upload(path=path, encoding="jsonl")
        Progress(folder / PROGRESS, create=True).close()
        others: dict[str, Any] = {"max_length": 2048, "truncation": "right", "preview": None, "added_tokens": ()}
        request = Request(
            **others | {"method": method} | settings,
            tokenizer_folder=model or tiny_folder,
            vocabulary=261,
            files=files,
            output=folder,
            now=NOW,
            parent=os.getpid(),
        )
        return Rendered(render(request), folder)

    return _rendered
