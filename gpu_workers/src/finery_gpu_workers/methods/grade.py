"""A run of an environment: its first prompts are shown and given answers are graded, before a job is started."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from finery.data.shapes import PromptRow
from finery.types.environments import (
    EnvironmentRunCreate,
    EnvironmentSpec,
    GradedAnswer,
    ReasoningGymEnvironment,
    RewardFailure,
    SampleAnswer,
    ShownPrompt,
)
from finery.types.errors import Problem
from finery.types.files import FileEncoding
from finery.types.jobs import Intent
from finery_gpu_workers import storage
from finery_gpu_workers.data.reading import read_rows
from finery_gpu_workers.environments.prompts import made_prompts
from finery_gpu_workers.environments.rewards import open_rewards
from finery_gpu_workers.environments.types import Answer, Grade
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.work import Ending, Task, stopped_by_customer

_SPEC: TypeAdapter[EnvironmentSpec] = TypeAdapter(EnvironmentSpec)
_PROMPTS = TypeAdapter(tuple[ShownPrompt, ...])
_ANSWERS = TypeAdapter(tuple[GradedAnswer, ...])
_WORKERS = 2
_SECONDS = 900.0
"""For all answers together."""
_LOOK_SECONDS = 0.2
_PART_BYTES = 1_500_000
"""Of the message's prompts, and of its answers; gRPC takes 4 MiB."""
_SHORT = 2000


def grade(work: Task, seconds: float = _SECONDS) -> Ending | None:
    """None when the run is reported; otherwise why there is none. What is wrong with a grade is shown at its answer.

    Raises WorkerError `invalid_environment`, `sandbox_unavailable`.
    """
    asked = EnvironmentRunCreate.model_validate_json(work.assignment.run_json)
    spec = _SPEC.validate_json(work.assignment.environment_json)
    wanted = {answer.prompt for answer in asked.answers} | set(range(asked.prompts))
    count, prompts = _made(spec, wanted) if isinstance(spec, ReasoningGymEnvironment) else _uploaded(work, wanted)
    _check_places(asked.answers, count)
    grades = _grades(work, spec, asked.answers, prompts, seconds)
    if isinstance(grades, Ending):
        return grades
    answers = tuple(map(_graded, asked.answers, grades))
    work.control.report_environment_run(
        prompt_count=count,
        prompts_json=_prompts_json([prompts[place] for place in range(min(asked.prompts, count))]),
        answers_json=_answers_json(answers),
    )
    return None


def _made(spec: ReasoningGymEnvironment, wanted: set[int]) -> tuple[int, dict[int, ShownPrompt]]:
    needed = min(spec.size, max(wanted, default=0) + 1)
    rows = made_prompts(spec, spec.size, range(needed))
    return spec.size, {
        place: ShownPrompt(index=place, messages=tuple(row["prompt"]), item=row)
        for place, row in enumerate(rows)
        if place in wanted
    }


def _uploaded(work: Task, wanted: set[int]) -> tuple[int, dict[int, ShownPrompt]]:
    """Those of `held_out_file` come after those of `file`, as they do in a job."""
    prompts, count = {}, 0
    for row in _rows(work):
        if count in wanted:
            prompts[count] = ShownPrompt(index=count, messages=tuple(row.messages), text=row.text, item=row.item)
        count += 1
    return count, prompts


def _rows(work: Task) -> Iterator[PromptRow]:
    given = work.assignment
    files = [("file", given.training_key, given.training_sha256, given.training_encoding)]
    files += [("held_out_file", given.validation_key, given.validation_sha256, given.validation_encoding)]
    for name, key, sha256, encoding in files:
        if key:
            read_as: FileEncoding = "parquet" if encoding == "parquet" else "jsonl"
            path: Path = work.folder / f"{name}.{read_as}"
            storage.download(work.store, key, path, sha256)
            yield from _prompts_of(path, read_as, f"environment.{name}")


def _prompts_of(path: Path, encoding: FileEncoding, param: str) -> Iterator[PromptRow]:
    for line, format_, row in read_rows(path, encoding):
        if isinstance(row, PromptRow):
            yield row
        else:
            found = row.message if isinstance(row, Problem) else f"a row of the format {format_}"
            message = f"{param}: line {line}: expected a row of the format prompts, found: {found}"
            raise WorkerError("invalid_environment", message, param=param)


def _check_places(answers: Sequence[SampleAnswer], count: int) -> None:
    for n, answer in enumerate(answers):
        if answer.prompt >= count:
            message = f"answers.{n}.prompt: expected a place from 0 to {count - 1}, found {answer.prompt}"
            raise WorkerError("invalid_environment", message, param=f"answers.{n}.prompt")


def _grades(
    work: Task, spec: EnvironmentSpec, answers: Sequence[SampleAnswer], prompts: dict[int, ShownPrompt], seconds: float
) -> list[Grade] | Ending:
    """The environment is opened without answers too: its code must load. That of reasoning-gym takes longer to load
    than a few answers to score."""
    workers = 1 if isinstance(spec, ReasoningGymEnvironment) else max(1, min(_WORKERS, len(answers)))
    rewards = open_rewards(spec, work.folder, workers=workers, score_models=work.score_models)
    try:
        futures = [rewards.submit(_answer(answer, prompts[answer.prompt])) for answer in answers]
        deadline = time.monotonic() + seconds
        pending: set[Future[Grade]] = set(futures)
        while pending and time.monotonic() < deadline:
            if (intent := work.control.intent) is not Intent.RUN:
                return stopped_by_customer(intent)
            pending = wait(pending, timeout=_LOOK_SECONDS).not_done
        overdue = Grade(failure=RewardFailure(code="timeout", message=f"the run's {seconds:g} s were over"))
        return [overdue if future in pending else future.result() for future in futures]
    finally:
        rewards.close()


def _answer(answer: SampleAnswer, prompt: ShownPrompt) -> Answer:
    return Answer(output_text=answer.output_text, item=prompt.item, messages=prompt.messages)


def _graded(answer: SampleAnswer, grade: Grade) -> GradedAnswer:
    return GradedAnswer(
        prompt=answer.prompt,
        output_text=answer.output_text,
        reward=grade.reward,
        parts=grade.parts,
        failure=grade.failure,
        seconds=grade.seconds,
        printed=grade.printed,
    )


def _prompts_json(prompts: Sequence[ShownPrompt]) -> str:
    """As many as one message holds, from the first."""
    while len(text := _PROMPTS.dump_json(tuple(prompts))) > _PART_BYTES and prompts:
        prompts = prompts[: len(prompts) // 2]
    return text.decode()


def _answers_json(answers: Sequence[GradedAnswer]) -> str:
    """Where all are more than one message holds, each text is cut: who asked has it, and grades are what is wanted."""
    text = _ANSWERS.dump_json(tuple(answers))
    length = 4 * _SHORT
    while len(text) > _PART_BYTES and length > 1:
        length //= 2
        text = _ANSWERS.dump_json(tuple(_cut(answer, length) for answer in answers))
    return text.decode()


def _cut(answer: GradedAnswer, length: int) -> GradedAnswer:
    changed: dict[str, Any] = {"output_text": answer.output_text[:length], "printed": answer.printed[:length]}
    return answer.model_copy(update=changed)
