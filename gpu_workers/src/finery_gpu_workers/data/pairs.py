"""Pairs of answers: the same prompt, to the id, before both.

Each side is rendered and tokenised as a row of prompt and completion is, so that a token across the end of the prompt,
on one side only perhaps, is found there and the row refused. (To tokenise an answer apart would let it begin with what
tokenizers put before a text.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from finery.data.rows import ChatRow, CompletionRow, PreferenceRow
from finery_gpu_workers.data.chat import RowError, Template
from finery_gpu_workers.data.samples import Plain, Sample
from finery_gpu_workers.data.tokens import TokenRow
from finery_gpu_workers.data.turns import not_a_prefix, render_chat

SIDES = ("chosen", "rejected")


def render_pair(template: Template | None, row: PreferenceRow) -> Iterator[Sample]:
    """The chosen and the rejected side. Raises RowError, as `render_chat` does."""
    for name, side in zip(SIDES, (row.chosen, row.rejected), strict=True):
        try:
            yield _side(template, side)
        except RowError as error:
            raise _placed(error, row, side, name) from None


def _side(template: Template | None, side: ChatRow | CompletionRow) -> Sample:
    if isinstance(side, CompletionRow):
        return Plain(side.prompt, side.completion, everything=False)
    assert template is not None
    samples = list(render_chat(template, side, "assistant"))
    if len(samples) > 1:
        hint = "Give answers of one turn: the template writes a turn in another way once the conversation goes on."
        raise not_a_prefix(f"completion[{len(side.messages) - side.prompt_messages - 1}]", hint=hint)
    return samples[0]


def _placed(error: RowError, row: PreferenceRow, side: ChatRow | CompletionRow, name: str) -> RowError:
    """With the place that the row itself has for it."""
    path = error.path
    shared = side.prompt_messages if isinstance(side, ChatRow) and row.prompt_key is None else 0
    if path.startswith("completion[") and shared:
        number, _, rest = path.removeprefix("completion[").partition("]")
        path = f"{name}[{int(number) + shared}]{rest}"
    elif path.startswith(("completion", "prompt[")):
        path = path.replace("completion", name, 1).replace("prompt", row.prompt_key or name, 1)
    return RowError(error.code, error.message, path=path, hint=error.hint)


def pair_up(rows: list[TokenRow]) -> list[TokenRow]:
    """Both sides with the length of their prompt, and without what follows the last token that is trained.

    Raises RowError: `prompts_differ`, `identical_answers`.
    """
    chosen, rejected = (_answer_known(row) for row in rows)
    if chosen.prompt != rejected.prompt or not np.array_equal(
        chosen.tokens[: chosen.prompt], rejected.tokens[: rejected.prompt]
    ):
        message = "expected the same token ids of the prompt before both answers, found others"
        raise RowError("prompts_differ", message, hint="Mend the template: it writes a prompt by what answers it.")
    if np.array_equal(chosen.tokens, rejected.tokens):
        message = "expected two answers, found the same token ids twice, which teach nothing"
        raise RowError("identical_answers", message, path="rejected", hint="Leave the row out.")
    return [chosen, rejected]


def _answer_known(row: TokenRow) -> TokenRow:
    targets = np.flatnonzero(row.mask)
    first, end = int(targets[0]), int(targets[-1]) + 1  # an answer is never empty
    return replace(row, tokens=row.tokens[:end], mask=row.mask[:end], prompt=first)
