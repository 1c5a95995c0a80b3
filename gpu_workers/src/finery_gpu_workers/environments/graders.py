"""Graders: from an answer to a grade. Each instance belongs to one thread, but for `interrupt`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from finery.templates import MissingFieldError, parse, render
from finery.types.environments import (
    PythonGrader,
    ReasoningGymEnvironment,
    StringCheckGrader,
    TextSimilarityGrader,
)
from finery_gpu_workers.environments.calls import Function, LoadError, Lost
from finery_gpu_workers.environments.reasoning_gym import function_of
from finery_gpu_workers.environments.similarity import MAX_CHARACTERS, METRICS
from finery_gpu_workers.environments.types import Answer, Grade
from finery_gpu_workers.environments.values import failure, grade_of

_TASK_SECONDS = 10.0


class Grader(Protocol):
    name: str

    def start(self) -> None:
        """Raises LoadError, SandboxUnavailable."""

    def grade(self, answer: Answer) -> Grade:
        """Ends by the grader's deadline. Whatever is wrong with the answer or with what graded it is a failure in the
        grade."""

    def interrupt(self) -> None:
        """From another thread: what runs ends soon."""

    def close(self) -> None: ...


class Compared:
    """Of two texts, in this process: `string_check` and `text_similarity`."""

    def __init__(self, spec: StringCheckGrader | TextSimilarityGrader) -> None:
        self.name = spec.name
        self._spec = spec
        self._input, self._reference = parse(spec.input), parse(spec.reference)

    def start(self) -> None:
        return

    def grade(self, answer: Answer) -> Grade:
        sample = {"output_text": answer.output_text}
        try:
            given = render(self._input, answer.item, sample)
            reference = render(self._reference, answer.item, sample)
        except MissingFieldError as error:
            return failure(self.name, "missing_field", str(error))
        if isinstance(self._spec, TextSimilarityGrader):
            if (longest := max(len(given), len(reference))) > MAX_CHARACTERS:
                message = f"expected texts of at most {MAX_CHARACTERS} characters, found {longest}"
                return failure(self.name, "error", message)
            return Grade(reward=METRICS[self._spec.evaluation_metric](given, reference))
        return Grade(reward=float(matches(self._spec.operation, given, reference)))

    def interrupt(self) -> None:
        return

    def close(self) -> None:
        return


def matches(operation: str, given: str, reference: str) -> bool:
    """Compared by code points, as they are; `ilike` by case folding."""
    if operation == "like":
        return reference in given
    if operation == "ilike":
        return reference.casefold() in given.casefold()
    return (given == reference) is (operation == "eq")


class Sandboxed:
    """A customer's `grade(sample, item)`."""

    def __init__(self, spec: PythonGrader) -> None:
        self.name = spec.name
        self._seconds = spec.timeout_seconds
        self._function = Function({"kind": "python", "source": spec.source})

    def start(self) -> None:
        self._function.start()

    def grade(self, answer: Answer) -> Grade:
        sample = {"output_text": answer.output_text, "messages": list(answer.messages)}
        return _called(self.name, self._function, {"sample": sample, "item": answer.item}, self._seconds)

    def interrupt(self) -> None:
        self._function.interrupt()

    def close(self) -> None:
        self._function.close()


class Task:
    """reasoning-gym's own score of an answer to one of its tasks."""

    def __init__(self, spec: ReasoningGymEnvironment) -> None:
        self.name = spec.task
        self._function = function_of(spec)

    def start(self) -> None:
        self._function.start()

    def grade(self, answer: Answer) -> Grade:
        try:
            payload = {name: answer.item[name] for name in ("index", "size", "question")}
        except KeyError as error:
            return failure(self.name, "missing_field", f"expected item.{error.args[0]}, found no such field in the row")
        return _called(self.name, self._function, payload | {"output_text": answer.output_text}, _TASK_SECONDS)

    def interrupt(self) -> None:
        self._function.interrupt()

    def close(self) -> None:
        self._function.close()


def _called(name: str, function: Function, payload: Mapping[str, object], seconds: float) -> Grade:
    try:
        return grade_of(name, function.call(payload, seconds))
    except Lost as error:
        return failure(name, "lost", f"the grading process was lost twice: {error}")
    except LoadError as error:
        return failure(name, "error", str(error))
