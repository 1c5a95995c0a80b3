"""One suite for every backend. `inline` has no adoption: its workers are children of the object that started them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from finery_scheduler.backend import Backend, Launch, LaunchError, PoolUnreachableError
from finery_scheduler.backends.inline import InlineBackend
from finery_scheduler.backends.processes import of_attempt
from finery_scheduler.backends.ray import RayBackend
from finery_scheduler.core.types import Node, Placement
from finery_testing.ray_head import SLOTS, Head


def attempt_id() -> str:
    return f"att_{uuid.uuid4().hex}"


SECRET = "s3cret-attempt-token"


async def stop_all(pool: Backend) -> None:
    for attempt in await pool.workers():
        await pool.stop(attempt)


@pytest.fixture(scope="session")
async def drivers_kept() -> AsyncIterator[list[RayBackend]]:
    """One backend, thus one driver process, for all tests against Ray."""
    kept: list[RayBackend] = []
    yield kept
    for pool in kept:
        await pool.close()


@pytest.fixture
async def ray_pool(ray_head: Head, drivers_kept: list[RayBackend]) -> AsyncIterator[RayBackend]:
    if not drivers_kept:
        drivers_kept.append(RayBackend(ray_head.address, ray_head.token, grant_timeout=3))
    await drivers_kept[0].start()
    yield drivers_kept[0]
    await stop_all(drivers_kept[0])


@pytest.fixture
async def inline_pool() -> AsyncIterator[InlineBackend]:
    pool = InlineBackend([Node("inline", SLOTS)])
    await pool.start()
    yield pool
    await stop_all(pool)
    await pool.close()


@pytest.fixture(params=["inline_pool", "ray_pool"])
def backend(request: pytest.FixtureRequest) -> Backend:
    pool: Backend = request.getfixturevalue(request.param)
    return pool


async def an_attempt(pool: Backend, out: Path, entrypoint: str = "stays", slots: int = 1) -> Launch:
    node = (await pool.nodes())[0].id
    return Launch(
        attempt=attempt_id(),
        entrypoint=f"finery_testing.workers:{entrypoint}",
        environment={"OUT": str(out), "FINERY_ATTEMPT_TOKEN": SECRET},
        placements=(Placement(node, slots),) if slots else (),
    )


async def until(condition: Callable[[], Awaitable[Any]], seconds: float = 30) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := await condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.05)
    return value


def notes(out: Path, name: str) -> list[Any]:
    return [json.loads(path.read_text()) for path in out.glob(f"{name}-*.json")]


async def noted(out: Path, name: str) -> Any:
    async def read() -> list[Any]:
        return notes(out, name)

    (note,) = await until(read)
    return note


async def status(pool: Backend, attempt: str, expected: str) -> None:
    async def is_so() -> bool:
        return (await pool.workers()).get(attempt) == expected

    await until(is_so)


async def test_nodes_are_listed_in_a_stable_order(backend: Backend) -> None:
    (node,) = await backend.nodes()
    assert node.slots == SLOTS
    assert await backend.nodes() == (node,)


async def test_launch_starts_one_worker_that_gets_its_environment(backend: Backend, tmp_path: Path) -> None:
    launch = await an_attempt(backend, tmp_path)
    await backend.launch(launch)
    seen = await noted(tmp_path, "stays")
    assert seen["environment"] == launch.environment
    assert psutil.pid_exists(seen["pid"])
    assert await backend.workers() == {launch.attempt: "alive"}


async def test_launch_is_idempotent_one_after_another_and_at_once(backend: Backend, tmp_path: Path) -> None:
    launch = await an_attempt(backend, tmp_path)
    await asyncio.gather(*(backend.launch(launch) for _ in range(3)))
    await backend.launch(launch)
    await noted(tmp_path, "stays")
    assert len(notes(tmp_path, "stays")) == 1
    assert len(of_attempt(launch.attempt)) == 1


async def test_a_worker_whose_entrypoint_returned_or_raised_is_dead_and_not_started_anew(
    backend: Backend, tmp_path: Path
) -> None:
    for entrypoint in ("ends", "raises"):
        launch = await an_attempt(backend, tmp_path, entrypoint)
        await backend.launch(launch)
        await noted(tmp_path, entrypoint)
        await status(backend, launch.attempt, "dead")
        await backend.launch(launch)
        assert (await backend.workers())[launch.attempt] == "dead"
        assert len(notes(tmp_path, entrypoint)) == 1
        await backend.stop(launch.attempt)
        assert launch.attempt not in await backend.workers()


async def test_a_killed_worker_is_dead_until_stop_removes_it(backend: Backend, tmp_path: Path) -> None:
    launch = await an_attempt(backend, tmp_path)
    await backend.launch(launch)
    os.kill((await noted(tmp_path, "stays"))["pid"], signal.SIGKILL)
    await status(backend, launch.attempt, "dead")
    await backend.stop(launch.attempt)
    assert await backend.workers() == {}


@pytest.mark.parametrize("killed_before", [False, True], ids=["alive", "worker_killed_before"])
async def test_stop_leaves_no_process_of_the_attempt_f12(backend: Backend, tmp_path: Path, killed_before: bool) -> None:
    launch = await an_attempt(backend, tmp_path, "has_children")
    await backend.launch(launch)
    seen = await noted(tmp_path, "children")
    children = [psutil.Process(pid) for pid in seen["children"]]
    if killed_before:
        os.kill(seen["pid"], signal.SIGKILL)
        await status(backend, launch.attempt, "dead")
        cleared = children.pop()  # with neither mark nor parent it cannot be told from a stranger
        cleared.kill()
    await backend.stop(launch.attempt)
    assert not psutil.pid_exists(seen["pid"])
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

    async def reaped() -> bool:
        return not any(child.is_running() for child in children)

    await until(reaped, 5)


@pytest.mark.slow
async def test_many_jobs_in_a_row_leave_no_zombie_f12(backend: Backend, tmp_path: Path) -> None:
    for n in range(100 if isinstance(backend, InlineBackend) else 25):
        launch = await an_attempt(backend, tmp_path / str(n), "has_children", slots=SLOTS)
        (tmp_path / str(n)).mkdir()
        await backend.launch(launch)
        await noted(tmp_path / str(n), "children")
        await backend.stop(launch.attempt)
    mine = psutil.Process().children(recursive=True)
    assert not [process for process in mine if process.status() == psutil.STATUS_ZOMBIE]


async def test_stop_is_idempotent_and_knows_no_unknown_attempt(backend: Backend, tmp_path: Path) -> None:
    launch = await an_attempt(backend, tmp_path)
    await backend.launch(launch)
    await asyncio.gather(backend.stop(launch.attempt), backend.stop(launch.attempt))
    await backend.stop(launch.attempt)
    await backend.stop(attempt_id())
    assert await backend.workers() == {}


async def test_slots_are_held_from_launch_to_stop(backend: Backend, tmp_path: Path) -> None:
    first = await an_attempt(backend, tmp_path, slots=SLOTS)
    await backend.launch(first)
    await backend.stop(first.attempt)
    second = await an_attempt(backend, tmp_path, slots=SLOTS)
    await backend.launch(second)
    with pytest.raises(LaunchError):
        await backend.launch(await an_attempt(backend, tmp_path, slots=1))
    assert await backend.workers() == {second.attempt: "alive"}


async def test_a_cpu_only_attempt_starts_while_all_slots_are_held(backend: Backend, tmp_path: Path) -> None:
    await backend.launch(await an_attempt(backend, tmp_path, slots=SLOTS))
    preparation = await an_attempt(backend, tmp_path, slots=0)
    await backend.launch(preparation)
    assert (await backend.workers())[preparation.attempt] == "alive"


@pytest.mark.parametrize("entrypoint", ["nothing_here", "not_callable"])
async def test_launch_of_an_unknown_entrypoint_says_so_and_leaves_nothing(
    backend: Backend, tmp_path: Path, entrypoint: str
) -> None:
    launch = await an_attempt(backend, tmp_path, entrypoint, slots=SLOTS)
    with pytest.raises(LaunchError, match=entrypoint) as caught:
        await backend.launch(launch)
    assert SECRET not in repr(caught.value)
    assert await backend.workers() == {}
    await backend.launch(await an_attempt(backend, tmp_path, slots=SLOTS))


async def test_launch_of_an_unknown_module_says_so(backend: Backend) -> None:
    with pytest.raises(LaunchError, match="no_such_package"):
        await backend.launch(Launch(attempt_id(), "no_such_package.run:main", {"TOKEN": SECRET}, ()))


async def test_launch_on_too_many_slots_or_an_unknown_node_is_refused(backend: Backend, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=f"{SLOTS + 1} slots"):
        await backend.launch(await an_attempt(backend, tmp_path, slots=SLOTS + 1))
    elsewhere = Launch(attempt_id(), "finery_testing.workers:stays", {}, (Placement("elsewhere", 1),))
    with pytest.raises(LaunchError, match="elsewhere"):
        await backend.launch(elsewhere)
    assert await backend.workers() == {}


async def test_close_disturbs_no_worker(backend: Backend, tmp_path: Path) -> None:
    launch = await an_attempt(backend, tmp_path)
    await backend.launch(launch)
    pid = (await noted(tmp_path, "stays"))["pid"]
    await backend.close()
    await backend.start()
    assert await backend.workers() == {launch.attempt: "alive"}
    assert psutil.pid_exists(pid)


async def test_the_secret_is_in_no_repr_and_no_command_line(backend: Backend, tmp_path: Path) -> None:
    launch = await an_attempt(backend, tmp_path)
    await backend.launch(launch)
    seen = await noted(tmp_path, "stays")
    assert SECRET not in repr(launch)
    assert SECRET not in repr(backend)
    assert SECRET not in " ".join(psutil.Process(seen["pid"]).cmdline())
    assert SECRET not in json.dumps(seen["os"])
    assert "RAY_AUTH_TOKEN" not in seen["os"]


# Ray alone: what needs a pool that outlives the object


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
