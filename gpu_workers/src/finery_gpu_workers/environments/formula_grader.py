"""`multi`: a formula over the rewards of named graders."""

from __future__ import annotations

import math
from collections.abc import Mapping

from finery.formula import FormulaError, evaluate, parse
from finery.types.environments import MultiGrader
from finery_gpu_workers.environments.graders import Compared, Grader, Sandboxed
from finery_gpu_workers.environments.types import Answer, Grade
from finery_gpu_workers.environments.values import failure
from finery_gpu_workers.errors import WorkerError

_PRINTED = 2000


class Combined:
    """Cheap graders go first; the first one without a reward leaves the whole without one, and those after it unasked.

    Raises WorkerError `invalid_environment`.
    """

    def __init__(self, spec: MultiGrader, graders: Mapping[str, Grader]) -> None:
        self.name = spec.name
        try:
            self._formula = parse(spec.calculate_output)
        except FormulaError as error:
            raise _refused(str(error)) from None
        if unknown := sorted(self._formula.names - set(graders)):
            raise _refused(f"expected names of graders ({', '.join(graders)}), found {', '.join(unknown)}")
        self._names = tuple(graders)
        self._graders = dict(sorted(graders.items(), key=lambda item: _cost(item[1])))

    def start(self) -> None:
        for grader in self._graders.values():
            grader.start()

    def grade(self, answer: Answer) -> Grade:
        grades: dict[str, Grade] = {}
        for name, grader in self._graders.items():
            grades[name] = grader.grade(answer)
            if (failed := grades[name].failure) is not None:
                return self._whole(grades, failure(name, failed.code, failed.message))
        rewards = {name: grade.reward for name, grade in grades.items() if grade.reward is not None}
        try:
            return self._whole(grades, Grade(reward=evaluate(self._formula, rewards)))
        except FormulaError as error:
            return self._whole(grades, failure(self.name, "invalid_reward", str(error)))

    def _whole(self, grades: Mapping[str, Grade], result: Grade) -> Grade:
        return Grade(
            reward=result.reward,
            failure=result.failure,
            parts={name: grades[name].reward if name in grades else None for name in self._names},
            cpu_seconds=math.fsum(grade.cpu_seconds for grade in grades.values()),
            llm_input=sum(grade.llm_input for grade in grades.values()),
            llm_output=sum(grade.llm_output for grade in grades.values()),
            printed="".join(grades[name].printed for name in self._names if name in grades)[:_PRINTED],
        )

    def interrupt(self) -> None:
        for grader in self._graders.values():
            grader.interrupt()

    def close(self) -> None:
        for grader in self._graders.values():
            grader.close()


def _cost(grader: Grader) -> int:
    return 0 if isinstance(grader, Compared) else 1 if isinstance(grader, Sandboxed) else 2


def _refused(why: str) -> WorkerError:
    param = "environment.grader.calculate_output"
    return WorkerError("invalid_environment", f"{param}: {why}", param=param)
