from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from finery.cli import main

from .cli_api import Api, Result
from .real_app import client, real_api
from .support import BOTH, KEY, Client, serving

__all__ = ["api", "client", "finery", "kind", "real_api"]


@pytest.fixture(params=BOTH)
def kind(request: pytest.FixtureRequest) -> Client:
    """Both clients, so that one test drives either."""
    kind: Client = request.param
    return kind


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    made = Api()
    with serving(made.reply) as server:
        made.server = server
        monkeypatch.setenv("FINERY_BASE_URL", server.url)
        monkeypatch.setenv("FINERY_API_KEY", KEY)
        yield made


@pytest.fixture
def finery(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> Result:
        with pytest.raises(SystemExit) as done:
            main(arguments)
        caught = capsys.readouterr()
        return Result(int(done.value.code or 0), caught.out, caught.err)

    return run
