"""A look at a file as a model would be trained on it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from finery.types import data
from finery.types.base import Request, Resource, Time
from finery.types.errors import ErrorDetail, Problem
from finery.types.methods import AddedToken, TrainOn, Truncation


class PreviewCreate(Request):
    """The body of `POST /v1/files/{id}/previews`. The fields mean what they mean in a job."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    train_on: TrainOn = "assistant"
    max_length: Annotated[int, Field(ge=2, le=131_072)] = 2048
    truncation: Truncation = "right"
    added_tokens: Annotated[tuple[AddedToken, ...], Field(max_length=256, strict=False)] = ()
    first_line: Annotated[int, Field(ge=1)] = 1
    rows: Annotated[int, Field(ge=1, le=50)] = 5


class PreviewToken(Resource):
    id: int
    text: str
    """Its part of the row's text; empty for all but the first of tokens that share a character."""
    trained: bool
    """It is a target: it carries loss and is billed."""


class PreviewRow(Resource):
    line: int
    answer: Literal["chosen", "rejected"] | str | None = None
    """Of a pair: which side this is."""
    tokens: tuple[PreviewToken, ...] = ()
    """After truncation, as trained; an unrolled row gives one `PreviewRow` per turn and a pair one per answer, all with
    its line. Of a prompt nothing is trained."""
    trained_tokens: int = 0
    truncated: bool = False
    dropped: str | None = None
    """Why the row would be left out, as in `SetReport.dropped`."""
    problem: Problem | None = None
    """Why a job would refuse the row."""


class Preview(Resource):
    object: Literal["preview"] = "preview"
    id: str
    file: str
    model: str
    status: Literal["pending", "ready", "failed"] | str
    rows: tuple[PreviewRow, ...] = ()
    warnings: tuple[data.Warning, ...] = ()
    """About these rows, as a job would give them: what can be trained, but is probably not what was meant."""
    error: ErrorDetail | None = None
    created_at: Time

    def text(self, *, color: bool | None = None) -> str:
        """Every row with its trained tokens marked: by colour, or by ⟦…⟧ where there is none.

        None: colours if the standard output is a terminal and NO_COLOR is not set.
        """
        from finery import _preview, _visible

        return _preview.text(self, color=_visible.wants_colour() if color is None else color)

    def html(self) -> str:
        """A page of its own; nothing in it runs, whatever the rows hold."""
        from finery import _preview

        return _preview.page(self)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        from finery import _preview

        return _preview.fragment(self)
