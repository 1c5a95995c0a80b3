"""Reasoning inside assistant turns: what the row says, and where the template has written it.

Counted is, for every turn that is to be trained, the reasoning text and the tags next to it, as far as they lie behind
the generation prompt (a tag that the prompt opens is never generated, so never trained):

    reasoning_tokens_in_data   its tokens where the template wrote it; where it did not, its tokens when tokenised alone
    reasoning_tokens_trained   those of them that are targets in the prepared data, so after truncation
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from finery.data.messages import Message

OPEN, CLOSE = "<think>", "</think>"
_OPEN_BEFORE = re.compile(r"<think>\s*\Z")
_CLOSE_AFTER = re.compile(r"\s*</think>")

Places = tuple[tuple[int, int], ...]
"""Characters from and to, in the text of the rendered row."""


@dataclass(frozen=True)
class Reasoning:
    """Of one message."""

    text: str = ""
    """Without tags and white space around it."""
    raw: str = ""
    """As the row has it, with its tags if it stands in the content."""
    sampled: bool = False
    """The content closes a tag that it does not open: it was generated behind a prompt that ends with the tag."""


_NONE = Reasoning()


def reasoning_of(message: Message) -> Reasoning:
    """From `reasoning_content`, else from between the tags of the content."""
    if text := message.get("reasoning_content"):
        return Reasoning(text.strip(), text)
    content: str = message["content"]
    end = content.find(CLOSE)
    if end < 0:
        return _NONE
    start = content.find(OPEN, 0, end)
    raw = content[max(start, 0) : end + len(CLOSE)]
    return Reasoning(raw.removeprefix(OPEN).removesuffix(CLOSE).strip(), raw, sampled=start < 0)


def missing_open(prompt: str) -> bool:
    """Whether the generation prompt ends with an opened tag, so that the model begins with reasoning."""
    return _OPEN_BEFORE.search(prompt, max(0, len(prompt) - 64)) is not None


def find_reasoning(message: Message, text: str, start: int, end: int) -> tuple[list[tuple[int, int]], list[str]]:
    """Its place inside `text[start:end]`, or what is not there."""
    reasoning = reasoning_of(message)
    if not reasoning.text:
        return [], []
    first = _first(text, reasoning, message["content"].strip(), start, end)
    if first < 0:
        return [], [reasoning.raw]
    last = first + len(reasoning.text)
    if opened := _OPEN_BEFORE.search(text, start, first):
        first = opened.start()
    if closed := _CLOSE_AFTER.match(text, last, end):
        last = closed.end()
    return [(first, last)], []


def _first(text: str, reasoning: Reasoning, content: str, start: int, end: int) -> int:
    """Where the reasoning begins, or -1. The same words in the answer are not it: a tag or the answer must follow."""
    in_content = reasoning.raw.endswith(CLOSE)
    place = text.find(reasoning.text, start, end)
    while place >= 0:
        after = place + len(reasoning.text)
        if _CLOSE_AFTER.match(text, after, end) or (not in_content and text.find(content, after, end) >= 0):
            return place
        place = text.find(reasoning.text, place + 1, end)
    return -1
