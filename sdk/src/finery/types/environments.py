"""Environments: prompts, and what rewards an answer. Graders have OpenAI's shapes.

In a grader's texts, `{{ item.name }}` stands for a field of the prompt's row and `{{ sample.output_text }}` for the
answer; nothing else is evaluated.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from finery.types.base import Linked, Name, Request, Resource, Time
from finery.types.errors import ErrorDetail
from finery.types.ids import FileId, ProjectId
from finery.types.urls import BaseUrl

GraderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
Template = Annotated[str, StringConstraints(max_length=16_384)]
Source = Annotated[str, StringConstraints(min_length=1, max_length=262_144)]
Seconds = Annotated[float, Field(gt=0, le=120)]


class StringCheckGrader(Request):
    """1 where `input` and `reference` compare as asked, else 0."""

    type: Literal["string_check"]
    name: GraderName = "string_check"
    operation: Literal["eq", "ne", "like", "ilike"]
    """Equal, not equal; `reference` occurs in `input`, with `ilike` whatever the case."""
    input: Template = "{{ sample.output_text }}"
    reference: Template


class TextSimilarityGrader(Request):
    """How alike two texts are, from 0 to 1."""

    type: Literal["text_similarity"]
    name: GraderName = "text_similarity"
    evaluation_metric: Literal["fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_2", "rouge_l"]
    input: Template = "{{ sample.output_text }}"
    reference: Template


class PythonGrader(Request):
    """`def grade(sample, item) -> float` in a sandbox: no network, no secrets, bounded time and memory.

    `sample` has `output_text` and `messages`, `item` is the prompt's row. None means that there is no reward; a dict of
    numbers is summed, and its entries are shown as parts.
    """

    type: Literal["python"]
    name: GraderName = "python"
    source: Source
    timeout_seconds: Seconds = 10.0
    """Of one call, loading excluded."""


class ScoreModelGrader(Request):
    """A model answers with a number. Its address must be one that the operator allows."""

    type: Literal["score_model"]
    name: GraderName = "score_model"
    base_url: BaseUrl
    """Of an OpenAI-compatible server, as in `https://judge.example/v1`."""
    model: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    input: Annotated[tuple[ScoreMessage, ...], Field(min_length=1, max_length=32, strict=False)]
    range: Annotated[tuple[float, float], Field(strict=False)] = (0.0, 1.0)
    """An answer outside it is a failure."""
    timeout_seconds: Seconds = 30.0


class ScoreMessage(Request):
    role: Literal["system", "developer", "user", "assistant"]
    content: Template


SingleGrader = Annotated[
    StringCheckGrader | TextSimilarityGrader | PythonGrader | ScoreModelGrader, Field(discriminator="type")
]


class MultiGrader(Request):
    """A formula over named graders: numbers, names, `+ - * / **`, brackets, min, max, abs, floor, ceil, exp, sqrt,
    log."""

    type: Literal["multi"]
    name: GraderName = "multi"
    graders: Annotated[dict[GraderName, SingleGrader], Field(min_length=1, max_length=16)]
    calculate_output: Annotated[str, StringConstraints(min_length=1, max_length=1024)]


Grader = Annotated[
    StringCheckGrader | TextSimilarityGrader | PythonGrader | ScoreModelGrader | MultiGrader,
    Field(discriminator="type"),
]


class ReasoningGymEnvironment(Request):
    """Tasks of reasoning-gym (Apache-2.0), made by name and seed and scored by it."""

    type: Literal["reasoning_gym"]
    task: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,64}$")]
    """As in `chain_sum`."""
    config: dict[str, Any] = {}
    """Of the task; what it leaves out is as reasoning-gym has it."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    size: Annotated[int, Field(ge=1, le=100_000)] = 500
    """Prompts to train on; those to evaluate on (`eval_prompts`) come after them."""
    system_prompt: Annotated[str, StringConstraints(min_length=1, max_length=16_384)] | None = None
    answer_pattern: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    """A regular expression whose first group (or whole match) is the answer, the last match counting; None: the whole
    text, stripped."""


class PromptsEnvironment(Request):
    """A file of prompts, and a grader."""

    type: Literal["prompts"]
    file: FileId
    """Rows of the format prompts."""
    held_out_file: FileId | None = None
    grader: Grader


EnvironmentSpec = Annotated[ReasoningGymEnvironment | PromptsEnvironment, Field(discriminator="type")]


class EnvironmentCreate(Request):
    """The body of `POST /v1/environments`."""

    name: Name | None = None
    project: ProjectId | None = None
    spec: EnvironmentSpec


class Environment(Linked):
    object: Literal["environment"] = "environment"
    id: str
    project: str
    name: str | None = None
    type: str
    spec: dict[str, Any]
    """An `EnvironmentSpec`."""
    created_at: Time

    def run(self, answers: Any = None, **options: Any) -> Any:
        """`client.environments.run` of this environment: answers, prompts, timeout."""
        return self._client().environments.run(self, answers, **options)

    def delete(self) -> Any:
        return self._client().environments.delete(self)


class SampleAnswer(Request):
    """An answer to grade."""

    output_text: Annotated[str, StringConstraints(max_length=262_144)]
    prompt: Annotated[int, Field(ge=0)] = 0
    """The prompt that it answers, by its place in the environment, from 0."""


class EnvironmentRunCreate(Request):
    """The body of `POST /v1/environments/{id}/runs`: grade answers before a job is started, or look at prompts."""

    answers: Annotated[tuple[SampleAnswer, ...], Field(max_length=100, strict=False)] = ()
    prompts: Annotated[int, Field(ge=0, le=100)] = 5
    """How many prompts to show, from the first."""


class RewardFailure(Resource):
    """Why there is no reward. A failure is never a reward of 0."""

    code: Literal["timeout", "error", "invalid_reward", "no_reward", "lost", "unreachable", "missing_field"] | str
    message: str
    """Of the customer's own code it holds the end of the traceback."""
    grader: str | None = None


class ShownPrompt(Resource):
    index: int
    messages: tuple[dict[str, Any], ...] = ()
    """Empty where the prompt is a text."""
    text: str | None = None
    item: dict[str, Any] = {}
    """The row, as graders see it."""


class GradedAnswer(Resource):
    prompt: int
    output_text: str
    reward: float | None = None
    parts: dict[str, float | None] = {}
    """Rewards by grader, or by the key of what a Python grader returned."""
    failure: RewardFailure | None = None
    seconds: float = 0.0
    printed: str = ""
    """What a Python grader printed, its first 2000 characters."""


class EnvironmentRun(Resource):
    object: Literal["environment.run"] = "environment.run"
    id: str
    environment: str
    status: Literal["pending", "ready", "failed"] | str
    prompt_count: int | None = None
    prompts: tuple[ShownPrompt, ...] = ()
    answers: tuple[GradedAnswer, ...] = ()
    error: ErrorDetail | None = None
    created_at: Time

    def text(self, *, color: bool | None = None) -> str:
        """A table of the answers with their rewards, why one has none, and how the rewards are distributed.

        None: colours if the standard output is a terminal and NO_COLOR is not set.
        """
        from finery import _environment_run, _visible

        return _environment_run.text(self, color=_visible.wants_colour() if color is None else color)

    def html(self) -> str:
        """A page of its own; nothing in it runs, whatever prompts and answers hold."""
        from finery import _environment_run

        return _environment_run.page(self)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        from finery import _environment_run

        return _environment_run.fragment(self)
