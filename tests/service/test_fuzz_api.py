"""Random requests made from the OpenAPI page (schemathesis), against the real app over a real socket.

FINERY_FUZZ_EXAMPLES=1000 makes more of them per operation.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from finery_testing import factories
from finery_testing.api import checkpoint
from finery_testing.clock import FakeClock
from finery_testing.postgres import Database

pytestmark = pytest.mark.slow
EXAMPLES = int(os.environ.get("FINERY_FUZZ_EXAMPLES", "10"))


@dataclass
class Fuzzed:
    url: str
    tenant_key: str
    operator_key: str
    ids: dict[str, str] = field(default_factory=dict)
    """Real ones, by the name of a path parameter."""


@contextmanager
def serving(database: Database, folder: Path) -> Iterator[str]:
    """The app in a thread, with engines of its own: its loop is not the test's."""
    from obstore.store import LocalStore

    from finery_service.app import create_app
    from finery_service.db.engine import create_engine
    from finery_service.settings import Settings

    engines = [create_engine(dsn) for dsn in (database.app_dsn, database.system_dsn)]
    store = LocalStore(folder, mkdir=True)
    app = create_app(Settings(heartbeat_seconds=0.2), app_engine=engines[0], system_engine=engines[1], store=store)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server has ended"
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


@pytest_asyncio.fixture
async def fuzzed(database: Database, tmp_path: Path) -> AsyncIterator[Fuzzed]:
    from finery_service.auth.secrets import digest, new_secret, shown_prefix
    from finery_service.db.engine import create_engine
    from finery_service.db.tables import EnvironmentRow, OperatorKeyRow

    engine, now = create_engine(database.system_dsn), FakeClock()()
    tenant = await factories.tenant(engine, now=now)
    job = await factories.job(engine, tenant, now=now, state="running")
    row = await checkpoint(engine, job, now=now)
    secret = new_secret("fop")
    operator = OperatorKeyRow(
        id="key_root", name="root", prefix=shown_prefix(secret), hash=digest(secret), created_at=now
    )
    own: dict[str, Any] = {"tenant_id": tenant.id, "project_id": tenant.project_id, "created_at": now}
    environment = EnvironmentRow(**own, id="env_real", spec={"type": "reasoning_gym", "task": "chain_sum"})
    await factories.insert(engine, operator, environment)
    run: dict[str, Any] = {
        "id": "erun_real",
        "environment_id": "env_real",
        "run": {"request": {}},
        "state": "validating",
    }
    await factories.job(engine, tenant, now=now, method="rl", kind="run", **run)
    key = await factories.key(engine, tenant, now=now, secret=new_secret("fny"))
    await engine.dispose()
    assert job.training_file_id is not None
    with serving(database, tmp_path / "objects") as url:
        ids = {"job_id": job.id, "file_id": job.training_file_id, "checkpoint_id": row.id, "tenant_id": tenant.id}
        more = {"name_or_id": factories.MODEL_NAME, "environment_id": "env_real", "run_id": "erun_real"}
        yield Fuzzed(url, key, secret, {**ids, **more})


async def test_no_request_made_from_the_page_breaks_the_server_or_its_word(fuzzed: Fuzzed) -> None:
    """Never a 5xx; every status is documented, every body fits its schema and its content type."""
    await asyncio.to_thread(_fuzz, fuzzed)


def _fuzz(fuzzed: Fuzzed) -> None:
    import schemathesis
    from schemathesis.generation import GenerationMode

    schema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    count = 0
    for result in schema.get_all_operations():
        operation: Any = result.ok()  # type: ignore[union-attr]  # an Err has none, and must not be
        has_input = bool(operation.definition.raw.get("parameters") or operation.definition.raw.get("requestBody"))
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if has_input else (GenerationMode.POSITIVE,):
            _requests(fuzzed, operation.as_strategy(generation_mode=mode))
        count += 1
    assert count >= 32


def _requests(fuzzed: Fuzzed, cases: Any) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases, st.sampled_from([fuzzed.tenant_key, fuzzed.operator_key]), st.booleans())
    def one(case: Any, key: str, is_real: bool) -> None:
        if is_real:
            case.path_parameters = {**case.path_parameters, **_known(fuzzed, case.path_parameters)}
        answer = case.call(headers={"authorization": f"Bearer {key}"}, timeout=30)
        case.validate_response(answer, checks=checks)

    one()


def _known(fuzzed: Fuzzed, parameters: dict[str, Any]) -> dict[str, str]:
    return {name: fuzzed.ids[name] for name in parameters if name in fuzzed.ids}
