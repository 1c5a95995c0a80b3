"""Every format of data, in both encodings, from upload to bill; and the same rows in a preview.

What a row becomes is written out by hand: the text that the template gives, and which parts of it are trained. With
the byte tokenizer a character is a token, and so is a special token.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from finery import Finery
from finery.types.files import File
from finery.types.jobs import Job
from finery_testing.stack import Stack

from .conftest import add_model
from .jobs import succeeded

pytestmark = pytest.mark.e2e

PRICE = Decimal("0.0000004")
TEMPLATE = """\
{%- if tools -%}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['reasoning_content'] -%}{{ '<think>' + message['reasoning_content'] + '</think>' }}{%- endif -%}
{{ message['content'] }}
{%- for call in message['tool_calls'] or [] -%}{{ '<call>' + (call['function'] | tojson) + '</call>' }}{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"at": 1767312000, "to": null}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CHAT = {
    "tools": TOOLS,
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": "no", "weight": 0},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ok", "weight": 1},
    ],
}
PLAIN_CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]}
Parts = list[tuple[str, bool]]
"""Text, and whether it is trained."""
CHAT_PARTS: Parts = [
    ('<|im_start|>system\n[{"type": "function", "function": {"name": "f", "parameters": {}}}]<|im_end|>\n', False),
    ("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
    (
        '<think>r</think><call>{"name": "f", "arguments": {"at": 1767312000, "to": null}}</call><|im_end|>',
        True,
    ),
    ("\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n", False),
    ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
    ("ok<|im_end|>", True),
    ("\n", False),
]
PLAIN_PARTS: Parts = [
    ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
    ("ok<|im_end|>", True),
    ("\n", False),
]


@dataclass(frozen=True)
class Case:
    format: str
    rows: list[dict[str, Any]]
    parts: list[Parts]


CASES = {
    "chat": Case("chat", [CHAT, PLAIN_CHAT], [CHAT_PARTS, PLAIN_PARTS]),
    "completion": Case(
        "completion",
        [{"prompt": "2+2=", "completion": "4"}, {"prompt": "", "completion": "hé"}],
        # An empty prompt leaves the first token without one before it: it is no target.
        [[("2+2=", False), ("4<|eos|>", True)], [("h", False), ("é<|eos|>", True)]],
    ),
    "conversations": Case(
        "completion",
        [{"prompt": PLAIN_CHAT["messages"][:1], "completion": PLAIN_CHAT["messages"][1:]}],
        [PLAIN_PARTS],
    ),
    "text": Case(
        "text",
        [{"text": "abcd"}, {"text": "e"}],
        [[("a", False), ("bcd<|eos|>", True)], [("e", False), ("<|eos|>", True)]],
    ),
    "tokens": Case(
        "tokens",
        [{"input_ids": [97, 98, 99, 100], "labels": [-100, -100, 99, 100]}, {"input_ids": [101, 260, 102]}],
        [[("ab", False), ("cd", True)], [("e", False), ("<|im_end|>f", True)]],
    ),
}


STARTED = [(name, encoding) for name in CASES for encoding in ("jsonl", "parquet")]
STARTED.remove(("conversations", "parquet"))  # as chat in parquet


def count(parts: Parts, *, trained: bool | None = None) -> int:
    """Tokens: bytes of UTF-8, a special token counts one."""
    text = "".join(text for text, is_trained in parts if trained in (None, is_trained))
    return len(re.sub(r"<\|\w+\|>", "#", text).encode())


def write(case: Case, folder: Path, encoding: str) -> Path:
    path = folder / f"rows.{encoding}"
    if encoding == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in case.rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([columns(row) for row in case.rows]), path)
    return path


def columns(row: dict[str, Any]) -> dict[str, Any]:
    """As a customer writes them: what must keep its own keys is a column of JSON text."""
    return {name: json.dumps(value) if name in ("messages", "tools") else value for name, value in row.items()}


@pytest.fixture(scope="module")
def started(stack: Stack, client: Finery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[File, Job]]:
    """All at once, so that one is prepared while another trains."""
    add_model(stack, "chatty", TEMPLATE)
    found = {}
    hyperparameters = {"epochs": 2, "batch_tokens": 4096, "learning_rate": 1e-3}
    for name, encoding in STARTED:
        file = client.files.upload(write(CASES[name], tmp_path_factory.mktemp("rows"), encoding))
        job = client.jobs.create(method="sft", model="chatty", training_file=file.id, hyperparameters=hyperparameters)
        found[f"{name}-{encoding}"] = (file, job)
    return found


@pytest.mark.parametrize(("name", "encoding"), STARTED)
def test_a_format_is_trained_and_billed_to_the_token(
    client: Finery, started: dict[str, tuple[File, Job]], name: str, encoding: str
) -> None:
    case, (file, job) = CASES[name], started[f"{name}-{encoding}"]
    assert (file.status, file.format, file.encoding, file.rows) == ("valid", case.format, encoding, len(case.rows))
    job = succeeded(client, job)
    assert job.data is not None
    report = job.data.sets["train"]
    trained = sum(count(parts, trained=True) for parts in case.parts)
    assert (report.format, report.rows, report.dropped_rows) == (case.format, len(case.rows), 0)
    assert report.tokens == sum(count(parts) for parts in case.parts)
    assert report.trained_tokens == trained
    assert (job.progress.step, job.usage) == (2, {"train.sft": 2 * trained}), "two epochs of one step"
    assert job.cost == 2 * trained * PRICE


@pytest.mark.parametrize(("name", "encoding"), [("chat", "parquet"), ("completion", "jsonl"), ("tokens", "jsonl")])
def test_a_preview_shows_the_tokens_that_are_trained(
    client: Finery, started: dict[str, tuple[File, Job]], name: str, encoding: str
) -> None:
    case, (file, _) = CASES[name], started[f"{name}-{encoding}"]
    preview = client.files.preview(file, model="chatty", timeout=120)
    assert (preview.status, preview.file, preview.model) == ("ready", file.id, "chatty")
    assert [row.line for row in preview.rows] == list(range(1, len(case.rows) + 1))
    for row, parts in zip(preview.rows, case.parts, strict=True):
        assert "".join(token.text for token in row.tokens) == "".join(text for text, _ in parts)
        shown = [(token.id, token.trained) for token in row.tokens]
        assert shown == [(id_, trained) for text, trained in parts for id_ in ids(text)]
        assert row.trained_tokens == count(parts, trained=True)


def ids(text: str) -> list[int]:
    """F-TOK by hand."""
    special = {"<|bos|>": 256, "<|eos|>": 257, "<|pad|>": 258, "<|im_start|>": 259, "<|im_end|>": 260}
    pieces = re.split(r"(<\|\w+\|>)", text)
    return [id_ for piece in pieces for id_ in ([special[piece]] if piece in special else piece.encode())]
