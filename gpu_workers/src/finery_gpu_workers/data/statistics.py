"""Counts over the rows of one uploaded file; see `finery.types.data` for what they mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from finery.types import data as types
from finery.types.data import LengthBin, SetReport
from finery_gpu_workers.data.tokens import TokenRow

LISTED_LINES = 100
_LISTED_TOKENS = 20
_REASONING, _SPECIAL = "reasoning_not_trained", "special_token_in_content"
_REWRITTEN = "prompt_rewritten"
_MESSAGES = {
    "content_not_rendered": "the model's chat template leaves out or rewrites the content of messages of {count} rows",
    "end_of_turn_not_rendered": "no special token ends turns of {count} rows, so that the model may not learn to stop",
    _SPECIAL: "texts of {count} rows hold special tokens of the model, which it reads as such",
    "unknown_characters": "the model's tokenizer has no token for characters of {count} rows",
    "prompt_held_out": "{count} prompts are held out too, and left out",
    "prompt_repeated": "{count} prompts came before, and are sampled as often as they occur",
    _REWRITTEN: "the model's chat template writes an assistant turn in another way once the conversation goes "
    "on, in {count} prompts",
    "validation_overlap": "{count} rows are in the training file too, so that their loss says little",
    "tools_not_rendered": "the model's chat template leaves out tools or tool calls of {count} rows",
    "system_not_rendered": "the model's chat template leaves out the system message of {count} rows",
    "reasoning_not_rendered": "the model's chat template leaves out reasoning of {count} rows",
}


@dataclass
class Lines:
    """How many, and the first of them."""

    count: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, line: int) -> None:
        self.count += 1
        if len(self.first) < LISTED_LINES:
            self.first.append(line)


@dataclass
class SetStatistics:
    format: str = ""
    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    truncated: Lines = field(default_factory=Lines)
    dropped: Lines = field(default_factory=Lines)
    reasons: Counter[str] = field(default_factory=Counter)
    unrolled: int = 0
    reasoning_in_data: int = 0
    reasoning_trained: int = 0
    longest: int = 0
    shortest: int = 0
    noted: dict[str, Lines] = field(default_factory=dict)
    """Rows by the code of a warning."""
    special: Counter[str] = field(default_factory=Counter)
    """Rows by the special token that a text of theirs holds."""
    rewritten: int | None = None
    """The message that is written in another way, of the first prompt that has one."""
    _bins: Counter[int] = field(default_factory=Counter)
    """Rows by the number of doublings from one token to their length."""

    def add(self, line: int, before: Sequence[TokenRow], after: Sequence[TokenRow | str], *, unrolled: bool) -> None:
        """One row: its samples, and what is left of each or why it is left out.

        The length of an unrolled row is that of its longest sample, the one that is compared with `max_length`. A row
        is dropped when no sample of it is left; one that loses only some of them is truncated. The prompt that the
        sides of a pair share counts once.
        """
        length = max(len(sample.tokens) for sample in before)
        self._bins[max(length - 1, 0).bit_length()] += 1
        self.shortest = min(self.shortest, length) if self.rows or self.dropped.count else length
        self.longest = max(self.longest, length)
        self.reasoning_in_data += sum(sample.reasoning_tokens for sample in before)
        if any(sample.lost_reasoning for sample in before):
            self.note("reasoning_not_rendered", line)
        kept = [sample for sample in after if not isinstance(sample, str)]
        if not kept:
            self.dropped.add(line)
            self.reasons[next(reason for reason in after if isinstance(reason, str))] += 1
            return
        self.rows += 1
        self.unrolled += unrolled
        self.tokens += sum(len(sample.tokens) for sample in kept) - sum(sample.prompt for sample in kept[1:])
        self.trained_tokens += sum(sample.trained for sample in kept)
        self.reasoning_trained += sum(sample.reasoning_trained for sample in kept)
        if sum(len(s.tokens) for s in kept) < sum(len(s.tokens) for s in before):
            self.truncated.add(line)

    def note(self, code: str, line: int) -> None:
        self.noted.setdefault(code, Lines()).add(line)

    def note_all(self, code: str, lines: Sequence[int]) -> None:
        for line in lines:
            self.note(code, line)

    def note_rewritten(self, message: int, line: int) -> None:
        """`message`: the place of the first that the template writes in another way."""
        if self.rewritten is None:
            self.rewritten = message
        self.note(_REWRITTEN, line)

    def note_special(self, names: set[str], line: int) -> None:
        if names:
            self.note(_SPECIAL, line)
            self.special.update(names)

    def report(self, digest: str) -> SetReport:
        return SetReport(
            format=self.format,
            rows=self.rows,
            tokens=self.tokens,
            trained_tokens=self.trained_tokens,
            dropped_rows=self.dropped.count,
            dropped=dict(sorted(self.reasons.items())),
            dropped_lines=tuple(self.dropped.first),
            truncated_rows=self.truncated.count,
            truncated_lines=tuple(self.truncated.first),
            unrolled_rows=self.unrolled,
            reasoning_tokens_in_data=self.reasoning_in_data,
            reasoning_tokens_trained=self.reasoning_trained,
            longest=self.longest,
            shortest=self.shortest,
            lengths=tuple(self._histogram()),
            digest=digest,
        )

    def _histogram(self) -> list[LengthBin]:
        if not self._bins:
            return []
        return [LengthBin(up_to=2**n, rows=self._bins[n]) for n in range(min(self._bins), max(self._bins) + 1)]

    def warnings(self, param: str) -> list[types.Warning]:
        """`param`: the field of the job that names the file."""
        found = []
        for code, lines in sorted(self.noted.items()):
            place = f"line {lines.first[0]}"
            named: dict[str, object] = {}
            if code == _SPECIAL:
                named = {"tokens": dict(self.special.most_common(_LISTED_TOKENS))}
            elif code == _REWRITTEN:
                named, place = {"message": self.rewritten}, f"{place}, message {self.rewritten}"
            message = f"{param}: {_MESSAGES[code].format(count=lines.count)}, the first in {place}."
            found.append(_warning(code, message, param, rows=lines.count, lines=lines.first, **named))
        if lost := self.reasoning_in_data - self.reasoning_trained:
            message = (
                f"{param}: expected {self.reasoning_in_data} tokens of reasoning to be trained, found "
                f"{self.reasoning_trained}: {lost} are not, because the model's chat template leaves them out or "
                "because rows are cut or dropped."
            )
            found.append(_warning(_REASONING, message, param, tokens=lost))
        return found


def _warning(code: str, message: str, param: str, /, **details: object) -> types.Warning:
    return types.Warning(code=code, message=message, param=param, details=[details])
