"""The API as a process of its own, over real sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from finery_service.auth.secrets import new_secret
from finery_service.home import free_port
from finery_testing import factories
from finery_testing.clock import FakeClock
from finery_testing.postgres import Database

_RUN = "from finery_service.app import serve; from finery_service.settings import Settings; serve(Settings())"


@pytest_asyncio.fixture
async def server(database: Database, tmp_path: Path) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    port = free_port()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FINERY_")},
        "FINERY_APP_DSN": database.app_dsn,
        "FINERY_SYSTEM_DSN": database.system_dsn,
        "FINERY_STORE_URL": (tmp_path / "objects").as_uri(),
        "FINERY_API_PORT": str(port),
        "FINERY_HEARTBEAT_SECONDS": "0.2",
    }
    (tmp_path / "objects").mkdir()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _RUN, env=environment)
    try:
        async with asyncio.timeout(60), httpx.AsyncClient(trust_env=False) as client:
            while True:
                with suppress(httpx.TransportError):
                    if (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200:
                        break
                assert process.returncode is None, "it exited"
                await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{port}", process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture
def port(server: tuple[str, asyncio.subprocess.Process]) -> int:
    return int(server[0].rsplit(":", 1)[1])


async def test_sigterm_ends_streams_and_the_process_at_once(
    server: tuple[str, asyncio.subprocess.Process], system_engine: AsyncEngine, clock: FakeClock
) -> None:
    url, process = server
    tenant = await factories.tenant(system_engine, now=clock())
    secret = await factories.key(system_engine, tenant, now=clock(), secret=new_secret("fny"))
    job = await factories.job(system_engine, tenant, now=clock(), state="running")
    headers = {"authorization": f"Bearer {secret}", "accept": "text/event-stream"}
    async with (
        httpx.AsyncClient(trust_env=False, timeout=20) as client,
        client.stream("GET", f"{url}/v1/jobs/{job.id}/events", headers=headers) as answer,
    ):
        text = answer.aiter_text()
        assert "retry" in await anext(text)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            rest = "".join([chunk async for chunk in text])
            assert "event: done" not in rest
            assert await process.wait() == 0


async def test_h14_megabyte_of_key_gets_a_clean_401(port: int) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        headers = {"authorization": "Bearer " + "k" * 2**20}
        answer = await client.get(f"http://127.0.0.1:{port}/v1/jobs", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_head_and_get_share_a_connection(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(
            b"HEAD /livez HTTP/1.1\r\nhost: x\r\n\r\nGET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        )
        text = b""
        while chunk := await asyncio.to_thread(connection.recv, 65536):
            text += chunk
    assert text.count(b"HTTP/1.1 200 OK") == 2
    assert text.count(b'"status":"ok"') == 1


async def test_upload_that_breaks_off_leaves_nothing(
    server: tuple[str, asyncio.subprocess.Process],
    port: int,
    system_engine: AsyncEngine,
    tmp_path: Path,
    clock: FakeClock,
) -> None:
    tenant = await factories.tenant(system_engine, now=clock())
    secret = await factories.key(system_engine, tenant, now=clock(), secret=new_secret("fny"))
    head = (
        f"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {secret}\r\ncontent-length: 99999999\r\n"
        "content-type: multipart/form-data; boundary=XX\r\n\r\n"
        '--XX\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    )
    connection = socket.create_connection(("127.0.0.1", port))
    await asyncio.to_thread(connection.sendall, head.encode() + b"x" * 2**24)
    objects = tmp_path / "objects"
    async with asyncio.timeout(20):
        while not [path for path in objects.rglob("*") if path.is_file()]:  # noqa: ASYNC110 another process writes it
            await asyncio.sleep(0.02)
        connection.close()
        while [path for path in objects.rglob("*") if path.is_file()]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    async with httpx.AsyncClient(trust_env=False, headers={"authorization": f"Bearer {secret}"}) as client:
        assert (await client.get(f"http://127.0.0.1:{port}/v1/files")).json()["data"] == []
