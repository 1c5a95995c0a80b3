from __future__ import annotations

import pytest

from .support import BOTH, Client


@pytest.fixture(params=BOTH)
def kind(request: pytest.FixtureRequest) -> Client:
    """Both clients, so that one test drives either."""
    kind: Client = request.param
    return kind
