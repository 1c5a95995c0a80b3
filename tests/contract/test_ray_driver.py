"""Ray alone: its workers outlive the backend object, the driver process and the control plane."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from finery_scheduler.backend import PoolUnreachableError
from finery_scheduler.backends.processes import of_attempt
from finery_scheduler.backends.ray import RayBackend
from finery_testing.backends import SECRET, an_attempt, noted, notes, status, until
from finery_testing.ray_head import Head


async def test_a_new_backend_adopts_the_workers(ray_pool: RayBackend, ray_head: Head, tmp_path: Path) -> None:
    launch = await an_attempt(ray_pool, tmp_path)
    await ray_pool.launch(launch)
    pid = (await noted(tmp_path, "stays"))["pid"]
    await ray_pool.close()
    successor = RayBackend(ray_head.address, ray_head.token)
    await successor.launch(launch)
    assert await successor.workers() == {launch.attempt: "alive"}
    assert [process.pid for process in of_attempt(launch.attempt)] == [pid]
    await successor.stop(launch.attempt)
    assert not psutil.pid_exists(pid)
    await successor.close()


def drivers() -> list[psutil.Process]:
    mine = psutil.Process().children()
    return [child for child in mine if "finery_scheduler.backends.ray_driver" in " ".join(child.cmdline())]


async def test_a_killed_driver_is_replaced_and_its_worker_goes_on(ray_pool: RayBackend, tmp_path: Path) -> None:
    launch = await an_attempt(ray_pool, tmp_path)
    await ray_pool.launch(launch)
    worker = psutil.Process((await noted(tmp_path, "stays"))["pid"])
    (driver,) = drivers()
    driver.kill()

    async def answers() -> bool:
        with suppress(PoolUnreachableError):
            return await ray_pool.workers() == {launch.attempt: "alive"}
        return False

    await until(answers)
    assert worker.is_running()
    assert [replaced.pid for replaced in drivers()] != [driver.pid]
    await ray_pool.launch(launch)
    assert len(notes(tmp_path, "stays")) == 1


async def test_the_driver_dies_with_its_parent(ray_head: Head) -> None:
    program = (
        "import asyncio, sys\n"
        "from finery_scheduler.backends.ray import RayBackend\n"
        "async def main():\n"
        "    await RayBackend(sys.argv[1], sys.stdin.readline().strip()).start()\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, ray_head.address, stdin=-1, stdout=-1, stderr=-3
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(ray_head.token.encode() + b"\n")
    assert await asyncio.wait_for(parent.stdout.readline(), 60) == b"ready\n"
    (driver,) = psutil.Process(parent.pid).children()
    parent.kill()
    await parent.wait()

    async def gone() -> bool:
        return not driver.is_running() or driver.status() == psutil.STATUS_ZOMBIE

    await until(gone, 5)


async def test_the_secret_is_in_no_log_of_ray(ray_pool: RayBackend, ray_head: Head, tmp_path: Path) -> None:
    for entrypoint in ("stays", "raises"):
        launch = await an_attempt(ray_pool, tmp_path, entrypoint)
        await ray_pool.launch(launch)
        await noted(tmp_path, entrypoint)
    await status(ray_pool, launch.attempt, "dead")
    logs = [path for path in ray_head.folder.rglob("*") if path.is_file() and "logs" in path.parts]
    texts = {path.name: path.read_bytes() for path in logs}
    assert any(b"the entrypoint failed" in text for text in texts.values()), "an entrypoint's output is kept"
    assert not [name for name, text in texts.items() if SECRET.encode() in text or ray_head.token.encode() in text]


async def test_a_driver_that_does_not_answer_is_replaced(ray_head: Head) -> None:
    others = drivers()
    pool = RayBackend(ray_head.address, ray_head.token, request_timeout=1)
    await pool.start()
    (mine,) = set(drivers()) - set(others)
    os.kill(mine.pid, signal.SIGSTOP)
    with pytest.raises(PoolUnreachableError, match="did not answer workers within 1 s"):
        await pool.workers()
    assert not mine.is_running()
    patient = RayBackend(ray_head.address, ray_head.token)
    assert await patient.workers() == {}
    await patient.close()
    await pool.close()


async def test_a_driver_that_cannot_start_is_tried_again_less_and_less_often() -> None:
    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    pool = RayBackend(f"127.0.0.1:{port}", "token", python="/bin/false")
    for _ in range(2):
        with pytest.raises(PoolUnreachableError, match="exit status 1"):
            await pool.workers()
    with pytest.raises(PoolUnreachableError, match="failed 2 times"):
        await pool.workers()
    listening.close()
