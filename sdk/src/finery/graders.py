"""Graders of environments: what rewards an answer. Their classes, and a Python grader from a file.

    import finery.graders

    grader = finery.graders.python("reward.py", timeout_seconds=5)
    environment = client.environments.create(type="prompts", file=file, grader=grader)

The file defines `def grade(sample, item) -> float`; see `PythonGrader`.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from finery.errors import InvalidArgumentError
from finery.types.environments import (
    Grader,
    MultiGrader,
    PythonGrader,
    ScoreMessage,
    ScoreModelGrader,
    StringCheckGrader,
    TextSimilarityGrader,
)

__all__ = [
    "Grader",
    "MultiGrader",
    "PythonGrader",
    "ScoreMessage",
    "ScoreModelGrader",
    "StringCheckGrader",
    "TextSimilarityGrader",
    "python",
]

MAX_CHARACTERS = 262_144


def python(path: str | os.PathLike[str], *, name: str = "python", timeout_seconds: float = 10.0) -> PythonGrader:
    """A grader that runs the file's `grade(sample, item)` in a sandbox, for up to `timeout_seconds` a call.

    It is read here and sent as it is; nothing of it runs on this machine. Raises `InvalidArgumentError` for a file that
    is missing, empty, too large (262,144 characters) or not UTF-8.
    """
    source = _read(Path(path))
    try:
        return PythonGrader(type="python", name=name, source=source, timeout_seconds=float(timeout_seconds))
    except ValidationError as error:
        first = error.errors()[0]
        expected = str(first["msg"]).removeprefix("Input should be ").removeprefix("String should ")
        raise InvalidArgumentError(f"{first['loc'][0]}: expected {expected}, found {first['input']!r:.80}") from None


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(4 * MAX_CHARACTERS + 1)  # UTF-8: four bytes for a character at most
    except OSError as error:
        raise InvalidArgumentError(f"{file}: expected a Python file, found: {error.strerror}") from None
    try:
        source = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if len(content) > 4 * MAX_CHARACTERS:
            raise _too_large(file) from None
        line = content.count(b"\n", 0, error.start) + 1
        raise InvalidArgumentError(
            f"{file}, line {line}: expected UTF-8, found other bytes; save it as UTF-8"
        ) from None
    if len(source) > MAX_CHARACTERS:
        raise _too_large(file)
    if not source.strip():
        raise InvalidArgumentError(f"{file}: expected `def grade(sample, item)`, found an empty file")
    return source


def _too_large(file: Path) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{file}: expected at most {MAX_CHARACTERS:,} characters, found more; put data that it needs into the prompts' "
        "rows, where `item` has them"
    )
