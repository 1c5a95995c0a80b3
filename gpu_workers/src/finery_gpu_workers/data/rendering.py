"""From uploaded rows to token rows: the template, then the tokenizer, over small runs of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum
from pathlib import Path

from finery.data.rows import ChatRow, PreferenceRow, PromptRow, Row, TokensRow
from finery.types.errors import Problem
from finery.types.files import FileFormat
from finery.types.methods import TrainOn
from finery_gpu_workers.data.chat import RowError, Template
from finery_gpu_workers.data.cutting import Kind
from finery_gpu_workers.data.given import special_in
from finery_gpu_workers.data.pairs import pair_up
from finery_gpu_workers.data.reasoning import CLOSE, OPEN
from finery_gpu_workers.data.rows import check_format, check_train_on, needs_template, samples_of
from finery_gpu_workers.data.samples import Plain, Prompted, Sample
from finery_gpu_workers.data.tokens import RowTokenizer, TokenRow
from finery_gpu_workers.data.turns import Rendered

_CHUNK_SAMPLES = 1024
_CHUNK_CHARACTERS = 1024 * 1024


class Phase(IntEnum):
    STARTING = 0
    TEMPLATE = 1
    TOKENIZER = 2


@dataclass
class Rendering:
    """One uploaded row."""

    line: int
    format: FileFormat | None
    samples: list[Sample] = field(default_factory=list)
    tokens: list[TokenRow] = field(default_factory=list)
    """One for each sample."""
    row: Row | None = None
    problem: Problem | None = None
    """Why the row cannot be used; then there may be no samples."""

    @property
    def kind(self) -> Kind:
        """What its samples are."""
        if isinstance(self.row, PreferenceRow):
            return "pair"
        return "prompt" if isinstance(self.row, PromptRow) else "row"

    def refuse(self, error: RowError) -> None:
        self.problem, self.samples, self.tokens = error.problem(self.line), [], []

    @property
    def unrolled(self) -> bool:
        return any(isinstance(sample, Rendered) and sample.unrolled for sample in self.samples)

    @property
    def notes(self) -> frozenset[str]:
        """Codes of warnings."""
        written = [sample.missing for sample in self.samples if isinstance(sample, (Rendered, Prompted))]
        return frozenset().union(*written, *(row.notes for row in self.tokens))


@dataclass
class Renderer:
    folder: Path
    tokenizer: RowTokenizer
    train_on: TrainOn
    vocabulary: int
    """Rows of the model's embedding."""
    now: datetime
    on_render: Callable[[], None]
    """Called for every text that the template has written."""
    method: str | None = None
    """What the rows are for; None takes all."""
    template: Template | None = None
    """Loaded when the first row with messages needs it."""

    def render(
        self,
        rows: Iterable[tuple[int, FileFormat | None, Row | Problem]],
        on_progress: Callable[[Phase, int], None],
        param: str = "file",
    ) -> Iterator[Rendering]:
        """In the order of the rows. Raises WorkerError where no row could be rendered; `param` names the file."""
        chunk: list[Rendering] = []
        size = samples = 0
        for line, format_, row in rows:
            on_progress(Phase.TEMPLATE, line)
            if format_:
                check_train_on(format_, self.train_on)
                if self.method:
                    check_format(format_, self.method, param)
            if self.template is None and not isinstance(row, Problem) and needs_template(row):
                on_progress(Phase.TEMPLATE, 0)  # it may be the template itself that loops
                self.template = Template.load(self.folder, self.now, self.on_render)
                on_progress(Phase.TEMPLATE, line)
            chunk.append(self._template(line, format_, row))
            samples += max(1, len(chunk[-1].samples))
            size += sum(map(_characters, chunk[-1].samples))
            if samples >= _CHUNK_SAMPLES or size > _CHUNK_CHARACTERS:
                on_progress(Phase.TOKENIZER, line)
                yield from self._tokenised(chunk)
                chunk, size, samples = [], 0, 0
        if chunk:
            on_progress(Phase.TOKENIZER, chunk[-1].line)
            yield from self._tokenised(chunk)

    def _template(self, line: int, format_: FileFormat | None, row: Row | Problem) -> Rendering:
        found = Rendering(line, format_)
        if isinstance(row, Problem):
            found.problem = row.model_copy(update={"line": line or None})
            return found
        found.row = row
        try:
            if isinstance(row, TokensRow):
                _check_ids(row, self.vocabulary)
            found.samples = list(samples_of(self.template, row, self.train_on))
        except RowError as error:
            found.refuse(error)
        return found

    def note_end_of_turn(self, row: PromptRow) -> None:
        """Notes what ends the answer to a prompt, where the template shows it: answers are sampled, not rendered. The
        first prompt that can be answered tells it for all."""
        if self.template is None or row.text is not None or self.tokenizer.end_of_turn:
            return
        answered = ChatRow((*row.messages, {"role": "assistant", "content": "x"}), row.tools)
        with suppress(RowError):
            self.tokenizer.rows(list(samples_of(self.template, answered, "last")))

    def special_in_content(self, rendering: Rendering) -> set[str]:
        """Special tokens that the row's own texts hold, so that the model reads them as such; reasoning's tags may."""
        if rendering.row is None:
            return set()
        names = self.tokenizer.special_names(rendering.tokens) - {OPEN, CLOSE}
        return special_in(rendering.row, names, *self.tokenizer.edges)

    def _tokenised(self, chunk: list[Rendering]) -> list[Rendering]:
        rows = iter(self.tokenizer.rows([sample for rendering in chunk for sample in rendering.samples]))
        for rendering in chunk:
            found = [next(rows) for _ in rendering.samples]
            errors = [row for row in found if isinstance(row, RowError)]
            if errors:
                rendering.refuse(errors[0])
            else:
                rendering.tokens = [row for row in found if isinstance(row, TokenRow)]
                self._pair_up(rendering)
        return chunk

    def _pair_up(self, rendering: Rendering) -> None:
        if rendering.kind == "pair" and rendering.tokens:
            try:
                rendering.tokens = pair_up(rendering.tokens)
            except RowError as error:
                rendering.refuse(error)


def _characters(sample: Sample) -> int:
    if isinstance(sample, TokensRow):
        return len(sample.input_ids)
    return len(sample.prompt) + len(sample.rest) if isinstance(sample, Plain) else len(sample.text)


def _check_ids(row: TokensRow, vocabulary: int) -> None:
    highest = max(row.input_ids)
    if highest >= vocabulary:
        place = row.input_ids.index(highest)
        message = f"expected ids below {vocabulary}, the rows of the model's embedding, found {highest}"
        hint = "Tokenise with the tokenizer of this very model."
        raise RowError("token_out_of_range", message, path=f"input_ids[{place}]", hint=hint)
