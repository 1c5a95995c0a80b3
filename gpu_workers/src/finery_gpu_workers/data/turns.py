"""Conversations as the model's template writes them, and which characters carry loss.

What is trained comes from provenance, not from marks: the template is rendered up to an assistant turn with its
generation prompt, and up to the end of that turn. The first must be a strict prefix of the second, and both of the
whole row; what lies between them is the turn. Where a template rewrites a turn once the conversation goes on (most
reasoning models strip the reasoning of earlier turns), the row is unrolled: one sample per turn, each of them the
conversation as it was when that turn was its last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from finery.data.rows import ChatRow
from finery.types.methods import TrainOn
from finery_gpu_workers.data.chat import MAX_RENDERED_CHARACTERS, RowError, Template
from finery_gpu_workers.data.given import texts_of
from finery_gpu_workers.data.missing import missing_from, other_call
from finery_gpu_workers.data.reasoning import Places, find_reasoning, missing_open, reasoning_of

_ADDRESS = re.compile(r"<[^<>\n]{1,200} at 0x[0-9a-f]{6,}>")
_KNOWN_ENDINGS = 16
MAX_RENDERED_MESSAGES = 2_000_000
"""Of one row, over all its turns: each is rendered with all messages before it (a thousand turns: some seconds)."""


@dataclass(frozen=True)
class Turn:
    """An assistant turn, as character positions in the row's text."""

    start: int
    """End of the generation prompt: what the model would be given when it generates."""
    content_end: int
    """Where the message ends; the end-of-turn token is the first special token from here."""
    end: int
    calls: bool = False
    """It ends with tool calls: the template may write special tokens between `content_end` and the end of turn."""


@dataclass(frozen=True)
class Rendered:
    text: str
    turns: tuple[Turn, ...]
    """Those that carry loss; or, with `everything`, those that do not."""
    everything: bool = False
    """All tokens carry loss, but for `turns`."""
    unrolled: bool = False
    """One turn of a row that is trained turn by turn."""
    reasoning: Places = ()
    """Where the reasoning of the turns that are to be trained stands."""
    lost: tuple[str, ...] = ()
    """Reasoning of such turns that the template did not write."""
    missing: frozenset[str] = frozenset()
    """Codes of warnings: what else of the row the template did not write."""
    closing: Turn | None = None
    """With `everything`: the last turn, where its end is known; it tells what ends a turn."""


def render_chat(template: Template, row: ChatRow, train_on: TrainOn) -> Iterator[Rendered]:
    """The row's one sample, or one per turn. Raises RowError where no mask would be sure.

    `template_error`: the template refuses the row. `prompt_not_prefix`: a turn does not continue its own prompt.
    `reasoning_not_as_sampled`: reasoning that was sampled behind an opened tag is written in another way.
    """
    text = template.render(row.messages, tools=row.tools)
    check_addresses(row, text)
    missing = missing_from(template, row, text)
    wanted = _wanted(row, train_on)
    _check_size(row, wanted)
    if train_on == "all":
        yield _everything(template, row, text, wanted, missing)
        return
    turns = _turns(template, row, wanted, text)
    if isinstance(turns, RowError):
        if not wanted[0] < len(row.messages) - 1:
            raise turns
        yield from _unrolled(template, row, wanted, missing)
        return
    yield _rendered(row, text, wanted, turns, missing)


def check_addresses(row: ChatRow, text: str) -> None:
    """Where a template forgets to call a method, or to make a list, Python writes an address of this process: another
    one in every job, and at serving."""
    if " at 0x" not in text:
        return
    for found in map(re.Match.group, _ADDRESS.finditer(text)):
        if not any(found in given for given in texts_of(row)):
            message = f"the model's chat template writes {found[:80]}, which is another text in every run"
            raise RowError("template_error", message, hint="Mend the template: it misses a call or a `| list`.")


def _wanted(row: ChatRow, train_on: TrainOn) -> list[int]:
    """Places of the assistant messages that are to be trained."""
    answers = [n for n, message in enumerate(row.messages) if message["role"] == "assistant"]
    if row.prompt_messages:
        answers = [n for n in answers if n >= row.prompt_messages]
    elif train_on == "last":
        answers = answers[-1:]
    return [n for n in answers if n not in row.untrained]


def _check_size(row: ChatRow, wanted: list[int]) -> None:
    if len(wanted) * len(row.messages) > MAX_RENDERED_MESSAGES:
        found = f"{len(wanted)} turns to train in a row of {len(row.messages)} messages"
        message = f"expected at most {MAX_RENDERED_MESSAGES} messages over all prompts of a row, found {found}"
        raise RowError(
            "too_many_messages", message, path="messages", hint='Split the row, or train on the "last" turn.'
        )


def _rendered(
    row: ChatRow, text: str, wanted: list[int], turns: tuple[Turn, ...], missing: frozenset[str], unrolled: bool = False
) -> Rendered:
    places: list[tuple[int, int]] = []
    lost: list[str] = []
    for n, turn in zip(wanted, turns, strict=True):
        found, gone = find_reasoning(row.messages[n], text, turn.start, turn.end)
        places += found
        lost += gone
    return Rendered(text, turns, False, unrolled, tuple(places), tuple(lost), missing)


def _unrolled(template: Template, row: ChatRow, wanted: list[int], missing: frozenset[str]) -> Iterator[Rendered]:
    """One sample per turn: the conversation up to it, only that turn trained."""
    size = 0
    for n in wanted:
        text = template.render(row.messages[: n + 1], tools=row.tools)
        size += len(text)
        if size > MAX_RENDERED_CHARACTERS:
            expected = f"at most {MAX_RENDERED_CHARACTERS} characters over the turns of a row that is trained by turns"
            raise RowError("row_too_long", f"expected {expected}, found more", path="messages", hint="Split the row.")
        yield _rendered(row, text, [n], (_turn(template, row, n, text, text),), missing, unrolled=True)


def _everything(template: Template, row: ChatRow, text: str, wanted: list[int], missing: frozenset[str]) -> Rendered:
    """All tokens carry loss, but for turns of weight 0."""
    places: list[tuple[int, int]] = []
    lost: list[str] = []
    start = 0
    for n in (n for n, message in enumerate(row.messages) if message["role"] == "assistant"):
        last = n == len(row.messages) - 1
        until = text if last else template.render(row.messages[: n + 1], tools=row.tools)
        if not text.startswith(until):
            raise not_a_prefix(_path(row, n), hint='Use train_on "assistant": such rows are then trained turn by turn.')
        if n in wanted:
            found, gone = find_reasoning(row.messages[n], text, start, len(until))
            places += found
            lost += gone
        start = len(until)
    turns = tuple(_turn(template, row, n, text) for n in sorted(row.untrained))
    return Rendered(text, turns, True, False, tuple(places), tuple(lost), missing, _closing(template, row, text))


def _closing(template: Template, row: ChatRow, text: str) -> Turn | None:
    try:
        return _turn(template, row, len(row.messages) - 1, text)
    except RowError:  # no matter where everything is trained
        return None


# ---- one turn


def _turns(template: Template, row: ChatRow, wanted: list[int], text: str) -> tuple[Turn, ...] | RowError:
    """The turns in the text of the whole row; the error of the first that is not as it was when it was the last."""
    try:
        return tuple(_turn(template, row, n, text) for n in wanted)
    except RowError as error:
        if error.code != "prompt_not_prefix":
            raise
        return error


def _turn(template: Template, row: ChatRow, n: int, text: str, until: str | None = None) -> Turn:
    """`until`: the conversation up to and with the turn, where it is known."""
    messages, tools = row.messages, row.tools
    prompt = template.render(messages[:n], prompt=True, tools=tools)
    if until is None:
        until = text if n == len(messages) - 1 else template.render(messages[: n + 1], tools=tools)
    if not until.startswith(prompt) or len(until) == len(prompt) or not text.startswith(until):
        raise not_a_prefix(_path(row, n), hint=_HINT_REASONING if missing_open(prompt) else _HINT)
    if missing_open(prompt) and reasoning_of(messages[n]).sampled:
        _check_as_sampled(messages[n]["content"], until[len(prompt) :], _path(row, n))
    calls = bool(messages[n].get("tool_calls"))
    ending = _call_ending(template, row, n, until) if calls else _ending(template, row, n, until)
    return Turn(len(prompt), max(len(prompt), len(until) - len(ending)), len(until), calls)


def _check_as_sampled(content: str, turn: str, path: str) -> None:
    if not turn.startswith(content):
        raise RowError(
            "reasoning_not_as_sampled",
            "expected the content, whose reasoning starts in the generation prompt, to be written as it is, "
            f"found {turn[:40]!r}",
            path=f"{path}.content",
            hint="Give the reasoning as reasoning_content, or with both of its tags.",
        )


def _ending(template: Template, row: ChatRow, n: int, until: str) -> str:
    """What the template writes behind the message: what stays the same when the message is another one.

    To look for the content instead would find it in what the template itself writes in front of it.
    """
    content = row.messages[n]["content"]
    for ending in template.endings:
        if until.endswith((content + ending, content.strip() + ending)):
            return ending
    other = row.messages[n] | {"content": "y" if content.rstrip().endswith("x") else "x"}
    ending = _same_end(until, template.render([*row.messages[:n], other], tools=row.tools))
    if ending not in template.endings and len(template.endings) < _KNOWN_ENDINGS:
        template.endings.append(ending)
        template.endings.sort(key=len, reverse=True)
    return ending


def _call_ending(template: Template, row: ChatRow, n: int, until: str) -> str:
    """The same for a message that ends with tool calls: the others have other names and arguments."""
    others = [other_call(call) for call in row.messages[n]["tool_calls"]]
    other = template.render([*row.messages[:n], row.messages[n] | {"tool_calls": others}], tools=row.tools)
    if other == until:  # it writes no calls: then the message is its content
        return _ending(template, row, n, until)
    return _same_end(until, other)


def _same_end(text: str, other: str) -> str:
    pairs = zip(reversed(text), reversed(other), strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return text[len(text) - same :]


def _path(row: ChatRow, n: int) -> str:
    """Of a message in the uploaded row."""
    if not row.prompt_messages:
        return f"messages[{n}]"
    return f"prompt[{n}]" if n < row.prompt_messages else f"completion[{n - row.prompt_messages}]"


_HINT = (
    "Remove white space at the start of the content. If every row is refused, the template writes a prompt in another "
    "way once its answer follows: mend the template."
)
_HINT_REASONING = (
    "The model's generation prompt opens a block of reasoning: give every assistant turn its reasoning, as "
    "reasoning_content or in <think> tags."
)


def not_a_prefix(path: str = "messages", *, hint: str = _HINT) -> RowError:
    """The prompt as it is at generation does not continue into the row: a mask would be wrong."""
    return RowError(
        "prompt_not_prefix",
        "expected the prompt of the assistant's turn to be a strict prefix of the rendered row, found other text",
        path=path,
        hint=hint,
    )
