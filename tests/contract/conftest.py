from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from finery_testing.ray_head import Head, start_head, stop_head


@pytest.fixture(scope="session")
def ray_head() -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="fr", dir="/tmp"))  # sockets lie in it: their paths must be short
    head = start_head(folder)
    yield head
    stop_head(head)
    shutil.rmtree(folder, ignore_errors=True)
