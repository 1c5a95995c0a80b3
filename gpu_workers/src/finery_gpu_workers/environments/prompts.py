"""Prompts that an environment makes itself, as a file of the format `prompts`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finery.types.environments import ReasoningGymEnvironment
from finery_gpu_workers.environments.calls import LoadError, Lost
from finery_gpu_workers.environments.reasoning_gym import function_of, refused

_ROWS = 100
_SECONDS = 120.0
"""For so many rows."""


def write_prompts(spec: ReasoningGymEnvironment, count: int, path: Path, work_folder: Path) -> None:
    """Writes `count` rows to `path`, made by reasoning-gym in the sandbox: `prompt` as messages, and for the grader
    `question`, `answer`, `metadata`, `index` and `size`, which some tasks depend on. The same for the same arguments.

    Raises WorkerError `invalid_environment` for a task, a config or a size that reasoning-gym refuses or that takes too
    long, `sandbox_unavailable`.
    """
    unfinished = work_folder / f"{path.name}.part"
    with unfinished.open("w", encoding="utf-8") as file:
        for row in made_prompts(spec, count, range(count)):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    unfinished.replace(path)


def made_prompts(spec: ReasoningGymEnvironment, count: int, places: range) -> Iterator[dict[str, Any]]:
    """Those of `count` at `places`; a range of step 1. Raises as `write_prompts` does."""
    function = function_of(spec)
    try:
        function.start()
        for first in range(places.start, places.stop, _ROWS):
            payload = {"size": count, "rows": [first, min(first + _ROWS, places.stop)]}
            reply = function.call(payload, _SECONDS)
            if reply.failed is not None:
                raise refused(spec, reply.failed)
            for index, entry in enumerate(reply.value, first):
                yield _row(spec, entry, index, count)
    except (LoadError, Lost) as error:
        raise refused(spec, str(error)) from None
    finally:
        function.close()


def _row(spec: ReasoningGymEnvironment, entry: dict[str, Any], index: int, count: int) -> dict[str, Any]:
    system = [{"role": "system", "content": spec.system_prompt}] if spec.system_prompt else []
    return {
        "prompt": [*system, {"role": "user", "content": entry["question"]}],
        "question": entry["question"],
        "answer": entry["answer"],
        "metadata": entry.get("metadata", {}),
        "index": index,
        "size": count,
    }
