"""One suite for every backend. `inline` has no adoption: its workers are children of the object that started them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from finery_scheduler.backend import Backend, Launch, LaunchError
from finery_scheduler.backends.inline import InlineBackend
from finery_scheduler.backends.processes import of_attempt
from finery_scheduler.core.types import Placement
from finery_testing.backends import SECRET, an_attempt, attempt_id, noted, notes, status, until
from finery_testing.ray_head import SLOTS


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
    pids: list[int] = []
    for n in range(100 if isinstance(backend, InlineBackend) else 25):
        launch = await an_attempt(backend, tmp_path / str(n), "has_children", slots=SLOTS)
        (tmp_path / str(n)).mkdir()
        await backend.launch(launch)
        seen = await noted(tmp_path / str(n), "children")
        pids += [seen["pid"], *seen["children"]]
        await backend.stop(launch.attempt)

    async def gone() -> bool:
        return not [pid for pid in pids if psutil.pid_exists(pid)]

    await until(gone, 5)


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
