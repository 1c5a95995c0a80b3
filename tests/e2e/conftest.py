from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from finery import Finery
from finery.types.files import File
from finery_testing.stack import Stack
from finery_testing.tiny import make_tiny_model

TINY = "tiny"


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The whole system with one accelerator slot, and the tiny model in its catalogue."""
    folder = Path(tempfile.mkdtemp(prefix="finery-e2e-", dir="/tmp"))
    folder.chmod(0o755)  # as root, PostgreSQL runs as an unprivileged user and must reach its data
    stack = Stack(folder / "home")
    try:
        stack.start()
        model = make_tiny_model(folder / "tiny")
        with stack.operator() as operator:
            operator.models.create(name=TINY, source={"type": "path", "path": str(model)}, max_length=2048)
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


def chat_rows(path: Path, count: int, *, offset: int = 0) -> Path:
    rows = (
        {
            "messages": [
                {"role": "user", "content": f"What is {i} plus {i}?"},
                {"role": "assistant", "content": str(2 * i)},
            ]
        }
        for i in range(offset, offset + count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def training_file(client: Finery, tmp_path_factory: pytest.TempPathFactory) -> File:
    return client.files.upload(chat_rows(tmp_path_factory.mktemp("rows") / "train.jsonl", 64))


@pytest.fixture(scope="session")
def validation_file(client: Finery, tmp_path_factory: pytest.TempPathFactory) -> File:
    return client.files.upload(chat_rows(tmp_path_factory.mktemp("rows") / "held-out.jsonl", 16, offset=1000))
