"""Rows as users write them, rendered and tokenised as preparation does it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from finery.data.rows import read_row
from finery.types.errors import Problem
from finery.types.methods import TrainOn
from finery_gpu_workers.data.chat import RowError, Template
from finery_gpu_workers.data.rows import samples_of
from finery_gpu_workers.data.samples import Sample
from finery_gpu_workers.data.tokens import RowTokenizer, TokenRow
from finery_testing.tiny import CHAT_TEMPLATE, EOS, IM_END, byte_tokenizer

Value = list[dict[str, Any]] | dict[str, Any]
NOW = datetime(2026, 11, 30, tzinfo=UTC)
HI = {"role": "user", "content": "hi"}
OK = {"role": "assistant", "content": "ok"}
HI_OK = [HI, OK]


def template(source: str = CHAT_TEMPLATE) -> Template:
    return Template(source, {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}, NOW)


def rendered(
    value: Value,
    source: str | Template = CHAT_TEMPLATE,
    train_on: TrainOn = "assistant",
) -> list[Sample]:
    """`value`: a row, or just its messages. Raises RowError."""
    read = read_row(value if isinstance(value, dict) else {"messages": value})
    if isinstance(read, Problem):
        raise RowError(read.code, read.message, path=read.path)
    return list(samples_of(template(source) if isinstance(source, str) else source, read[1], train_on))


def tokenised(
    value: Value,
    source: str | Template = CHAT_TEMPLATE,
    train_on: TrainOn = "assistant",
    tokenizer: Tokenizer | RowTokenizer | None = None,
) -> list[TokenRow]:
    """The row's samples. Raises RowError."""
    tokenizer = tokenizer or byte_tokenizer()
    rows = tokenizer if isinstance(tokenizer, RowTokenizer) else RowTokenizer(tokenizer, [EOS, IM_END])
    found = rows.rows(rendered(value, source, train_on))
    for row in found:
        if isinstance(row, RowError):
            raise row
    return [row for row in found if isinstance(row, TokenRow)]


def one(*arguments: Any, **named: Any) -> TokenRow:
    """Of a row that has one sample."""
    (row,) = tokenised(*arguments, **named)
    return row


def trained(row: TokenRow) -> list[int]:
    """Positions of targets."""
    return [int(n) for n in np.flatnonzero(row.mask)]


def text_of(row: TokenRow, ids: list[int] | None = None) -> str:
    """What is trained, with the end-of-turn token as `$` and other special tokens as `#`."""
    ids = [int(n) for n in row.tokens[row.mask == 1]] if ids is None else ids
    return bytes(n if n < 256 else ord("$" if n == IM_END else "#") for n in ids).decode()


def whole(row: TokenRow) -> str:
    return text_of(row, row.tokens.tolist())
