"""A million rows, over HTTP, with the real client, into a process of its own: it stays small, and finds the one row."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from finery import Finery
from finery.types.files import File
from finery_service.auth.secrets import new_secret
from finery_service.home import free_port
from finery_testing import factories
from finery_testing.clock import FakeClock
from finery_testing.postgres import Database

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROWS, BAD = 1_000_000, 777_777
MOST_MB = 500
_RUN = "from finery_service.app import serve; from finery_service.settings import Settings; serve(Settings())"


@pytest_asyncio.fixture
async def server(database: Database, tmp_path: Path) -> AsyncIterator[tuple[str, int]]:
    """(address, process id) of an API."""
    port = free_port()
    (tmp_path / "objects").mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FINERY_")},
        "FINERY_APP_DSN": database.app_dsn,
        "FINERY_SYSTEM_DSN": database.system_dsn,
        "FINERY_STORE_URL": (tmp_path / "objects").as_uri(),
        "FINERY_API_PORT": str(port),
    }
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _RUN, env=environment)
    address = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(60), httpx.AsyncClient(trust_env=False) as client:
            while not await is_ready(client, address):
                assert process.returncode is None, "it exited"
                await asyncio.sleep(0.05)
        yield address, process.pid
    finally:
        process.kill()
        await process.wait()


async def is_ready(client: httpx.AsyncClient, address: str) -> bool:
    try:
        return (await client.get(f"{address}/readyz")).status_code == 200
    except httpx.TransportError:
        return False


def row(number: int) -> tuple[str, str]:
    """What user and assistant say; half of it is no ASCII."""
    if number == BAD:
        return "a", ""
    if number % 2:
        return f"What comes after {number}?", f"{number + 1} does."
    return f"Qué viene después de {number}?", f"El {number + 1}, «naturalmente»."


def write_jsonl(path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number in range(1, ROWS + 1):
            user, assistant = row(number)
            role = "assistent" if number == BAD else "assistant"
            file.write(
                f'{{"messages": [{{"role": "user", "content": "{user}"}}, '
                f'{{"role": "{role}", "content": "{assistant}"}}]}}\n'
            )


def write_parquet(path: Path) -> None:
    """As a table library writes it: a list of structs, in row groups of the default size."""
    struct = pa.struct({"role": pa.string(), "content": pa.string()})
    schema = pa.schema({"messages": pa.list_(struct)})
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(1, ROWS + 1, 50_000):
            chats = []
            for number in range(start, start + 50_000):
                user, assistant = row(number)
                role = "assistent" if number == BAD else "assistant"
                chats.append([{"role": "user", "content": user}, {"role": role, "content": assistant}])
            writer.write_table(pa.table({"messages": chats}, schema=schema))


def peak_mb(pid: int) -> float:
    status = (Path("/proc") / str(pid) / "status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def upload(address: str, key: str, path: Path) -> tuple[File, list[tuple[int, int]]]:
    told: list[tuple[int, int]] = []
    with Finery(key, base_url=address) as finery:
        file = finery.files.upload(path, on_progress=lambda done, total: told.append((done, total)))
        assert finery.files.retrieve(file.id) == file
    return file, told


@pytest.mark.parametrize("encoding", ["jsonl", "parquet"])
async def test_a_million_rows(
    server: tuple[str, int],
    system_engine: AsyncEngine,
    clock: FakeClock,
    tmp_path: Path,
    encoding: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    address, pid = server
    path = tmp_path / f"rows.{encoding}"
    await asyncio.to_thread(write_jsonl if encoding == "jsonl" else write_parquet, path)
    tenant = await factories.tenant(system_engine, now=clock())
    key = await factories.key(system_engine, tenant, now=clock(), secret=new_secret("fny"))
    start = time.monotonic()
    file, told = await asyncio.to_thread(upload, address, key, path)
    seconds, peak, size = time.monotonic() - start, peak_mb(pid), path.stat().st_size
    with capsys.disabled():
        print(f"\n{encoding}: {size / 1e6:.0f} MB in {seconds:.1f} s, {ROWS / seconds:,.0f} rows/s, peak {peak:.0f} MB")

    assert (file.encoding, file.format, file.rows, file.bytes) == (encoding, "chat", ROWS - 1, size)
    (problem,) = file.errors
    assert (file.error_count, problem.line, problem.code) == (1, BAD, "unknown_role")
    if encoding == "jsonl":
        with path.open("rb") as content:
            content.seek(problem.offset or 0)
            assert b"assistent" in content.readline()
    assert told[-1] == (size, size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len(told) > 3
    assert peak <= MOST_MB
