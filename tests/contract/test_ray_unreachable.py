"""A Ray head that is not there, is killed, or comes back empty."""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest

from finery_scheduler.backend import Launch, PoolUnreachableError
from finery_scheduler.backends.ray import RayBackend
from finery_service.home import free_port
from finery_testing.ray_head import start_head, stop_head


async def test_a_missing_head_is_told_within_seconds_and_the_token_is_in_no_error() -> None:
    pool = RayBackend(f"127.0.0.1:{free_port()}", "a-token-of-the-cluster")
    began = time.monotonic()
    with pytest.raises(PoolUnreachableError, match="no Ray head listens") as caught:
        await pool.start()
    assert time.monotonic() - began < 3
    assert "a-token-of-the-cluster" not in repr(caught.value) + repr(pool)


@pytest.mark.slow
async def test_a_lost_gcs_is_unreachable_not_dead_and_the_next_head_is_joined(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="fr", dir="/tmp"))
    head = start_head(folder)
    pool = RayBackend(head.address, head.token)
    launch = Launch(f"att_{uuid.uuid4().hex}", "finery_testing.workers:stays", {"OUT": str(tmp_path)}, ())
    await pool.launch(launch)
    assert await pool.workers() == {launch.attempt: "alive"}
    (gcs,) = [child for child in psutil.Process(head.process.pid).children() if "gcs_server" in child.name()]
    gcs.kill()
    psutil.wait_procs([gcs], timeout=10)
    with pytest.raises(PoolUnreachableError):
        await pool.workers()
    head.process.wait(timeout=30)
    again = start_head(folder, port=int(head.address.rpartition(":")[2]), token=head.token)
    try:
        assert await pool.workers() == {}
        await pool.launch(launch)
        assert await pool.workers() == {launch.attempt: "alive"}
        await pool.stop(launch.attempt)
    finally:
        await pool.close()
        stop_head(again)
        shutil.rmtree(folder, ignore_errors=True)


async def test_a_driver_that_cannot_be_understood_is_replaced(tmp_path: Path) -> None:
    """The first driver answers its first request with garbage, the second one properly."""
    driver = tmp_path / "driver"
    driver.write_text(
        f"#!{sys.executable}\n"
        "import json, pathlib, sys\n"
        f"first = pathlib.Path({str(tmp_path / 'first')!r})\n"
        "reply = '{\"id\": 1, \"result\": {}}' if first.exists() else 'Segmentation fault'\n"
        "first.touch()\n"
        "print(json.dumps({'id': 0, 'result': 'ready'}), flush=True)\n"
        "sys.stdin.readline()\n"
        "print(reply, flush=True)\n"
        "sys.stdin.read()\n"
    )
    driver.chmod(0o755)
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        head.listen()
        pool = RayBackend(f"127.0.0.1:{head.getsockname()[1]}", "token", python=str(driver), request_timeout=5)
        with pytest.raises(PoolUnreachableError, match="the Ray driver died"):
            await pool.workers()
        assert await pool.workers() == {}
        await pool.close()
