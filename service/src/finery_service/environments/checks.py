"""What of an environment can be told to be wrong without its files. Customers' Python is neither read nor run here."""

from __future__ import annotations

from collections.abc import Container
from difflib import get_close_matches

from finery import formula, templates
from finery.types.environments import (
    EnvironmentSpec,
    Grader,
    MultiGrader,
    ReasoningGymEnvironment,
    ScoreModelGrader,
    SingleGrader,
    StringCheckGrader,
    TextSimilarityGrader,
)
from finery_service.environments import patterns
from finery_service.environments.tasks import TASKS
from finery_service.errors import ServiceError, refusal


async def check(spec: EnvironmentSpec, param: str, score_models: Container[str]) -> None:
    """Raises 400 naming the field, below `param`. `score_models` are the addresses that the operator allows."""
    if isinstance(spec, ReasoningGymEnvironment):
        _check_task(spec.task, f"{param}.task")
        if spec.answer_pattern is not None:
            await patterns.check(spec.answer_pattern, f"{param}.answer_pattern")
    else:
        _check_grader(spec.grader, f"{param}.grader", score_models)


def _check_task(task: str, param: str) -> None:
    if task in TASKS:
        return
    close = get_close_matches(task, sorted(TASKS), 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise refusal("unknown_task", param, "the name of a task of reasoning-gym, as in chain_sum", f"{task!r}{hint}")


def _check_grader(grader: Grader, param: str, score_models: Container[str]) -> None:
    if not isinstance(grader, MultiGrader):
        _check_single(grader, param, score_models)
        return
    for name, single in grader.graders.items():
        _check_single(single, f"{param}.graders.{name}", score_models)
    _check_formula(grader, f"{param}.calculate_output")


def _check_single(grader: SingleGrader, param: str, score_models: Container[str]) -> None:
    if isinstance(grader, StringCheckGrader | TextSimilarityGrader):
        _check_template(grader.input, f"{param}.input")
        _check_template(grader.reference, f"{param}.reference")
    elif isinstance(grader, ScoreModelGrader):
        _check_score_model(grader, param, score_models)


def _check_score_model(grader: ScoreModelGrader, param: str, score_models: Container[str]) -> None:
    if grader.base_url not in score_models:
        expected = "the address of a model server that the operator allows"
        advice = f"{grader.base_url}; ask whoever runs this service to allow it (FINERY_SCORE_MODELS)"
        message = f"{param}.base_url: expected {expected}, found {advice}."
        raise ServiceError(400, "score_model_not_allowed", message, param=f"{param}.base_url")
    for place, message_ in enumerate(grader.input):
        _check_template(message_.content, f"{param}.input[{place}].content")
    low, high = grader.range
    if not low < high:
        raise refusal("invalid_value", f"{param}.range", "a lower and a higher number", f"{low:g} and {high:g}")


def _check_template(text: str, param: str) -> None:
    try:
        templates.parse(text)
    except templates.TemplateError as error:
        raise ServiceError(400, "invalid_template", f"{param}: {error}.", param=param) from None


def _check_formula(grader: MultiGrader, param: str) -> None:
    try:
        names = formula.parse(grader.calculate_output).names
    except formula.FormulaError as error:
        raise ServiceError(400, "invalid_formula", f"{param}: {error}.", param=param) from None
    known = ", ".join(grader.graders)
    unknown = sorted(names - set(grader.graders))
    if unknown:
        raise refusal("invalid_formula", param, f"names of graders ({known})", repr(unknown[0]))
    unused = sorted(set(grader.graders) - names)
    if unused:
        expected = f"every grader in it (one that is only to be seen as 0 * {unused[0]})"
        raise refusal("unused_grader", param, expected, f"no {unused[0]}")
