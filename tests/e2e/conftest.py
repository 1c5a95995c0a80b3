from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from finery import Finery
from finery.types.files import File
from finery_testing.stack import Stack
from finery_testing.tiny import make_tiny_model

TINY = "tiny"
HELD_OUT = range(1000, 1016)


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The whole system with one accelerator slot, and the tiny model in its catalogue."""
    folder = Path(tempfile.mkdtemp(prefix="finery-e2e-", dir="/tmp"))
    folder.chmod(0o755)  # as root, PostgreSQL runs as an unprivileged user and must reach its data
    stack = Stack(folder / "home")
    try:
        stack.start()
        add_model(stack, TINY)
        yield stack
        assert stack.stop() == 0, "a clean stop exits with 0"
    finally:
        if stack.process is not None and stack.process.poll() is None:
            stack.process.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def client(stack: Stack) -> Iterator[Finery]:
    with stack.client() as client:
        yield client


def add_model(stack: Stack, name: str, template: str | None = None) -> Path:
    """A tiny model of this name in the catalogue, with a chat template of its own; its folder."""
    folder = make_tiny_model(stack.home.parent / name)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    with stack.operator() as operator:
        operator.models.create(name=name, source={"type": "path", "path": str(folder)}, max_length=2048)
    return folder


def conversation(n: int) -> tuple[str, str]:
    """A question and its answer."""
    return f"What is {n} plus {n}?", str(2 * n)


def chat_rows(path: Path, numbers: Iterable[int]) -> Path:
    rows = (
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in map(conversation, numbers)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def training_file(client: Finery, tmp_path_factory: pytest.TempPathFactory) -> File:
    return client.files.upload(chat_rows(tmp_path_factory.mktemp("rows") / "train.jsonl", range(64)))


@pytest.fixture(scope="session")
def validation_file(client: Finery, tmp_path_factory: pytest.TempPathFactory) -> File:
    return client.files.upload(chat_rows(tmp_path_factory.mktemp("rows") / "held-out.jsonl", HELD_OUT))
