"""Children come back, stop in bounds, die with us."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel import select

from finery_service import main
from finery_service.auth import operator_key
from finery_service.auth.secrets import digest, well_formed
from finery_service.db.engine import transaction
from finery_service.db.tables import OperatorKeyRow
from finery_service.supervisor import Child, Keeper, SupervisorError, run_to_end, until
from finery_testing.clock import FakeClock
from finery_testing.postgres import Database

FOREVER = "import time; time.sleep(600)"
STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); " + FOREVER


def child(tmp_path: Path, code: str, name: str = "child", **values: object) -> Child:
    defaults = {"environment": {"PATH": os.environ["PATH"], "SECRET": "s3cret"}, "log": tmp_path / f"{name}.log"}
    return Child(name=name, command=[sys.executable, "-c", code], **{**defaults, **values})  # type: ignore[arg-type]


class Kept:
    """A keeper with what it told us."""

    def __init__(self, child: Child) -> None:
        self.changes: list[tuple[str, int | None]] = []
        self.said: list[str] = []
        self.keeper = Keeper(child, changed=lambda name, pid: self.changes.append((name, pid)), say=self.said.append)

    @property
    def pid(self) -> int | None:
        return self.changes[-1][1] if self.changes else None

    async def running(self) -> bool:
        return self.pid is not None


@pytest_asyncio.fixture
async def keep() -> AsyncIterator[Callable[[Child], Kept]]:
    made: list[Kept] = []

    def keep(child: Child) -> Kept:
        made.append(Kept(child))
        made[-1].keeper.start()
        return made[-1]

    yield keep
    for kept in made:
        await kept.keeper.stop()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def eventually(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.01)


def as_async(condition: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def ask() -> bool:
        return condition()

    return ask


async def test_a_child_killed_with_9_is_started_again_in_about_a_second(
    tmp_path: Path, keep: Callable[[Child], Kept]
) -> None:
    kept = keep(child(tmp_path, FOREVER))
    await until(kept.running, kept.keeper, 10)
    first = kept.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    killed = time.monotonic()
    await eventually(lambda: len(kept.changes) == 3)
    assert time.monotonic() - killed < 3, "0.2 s of delay, and the start of a process on a busy machine"
    assert kept.changes[:2] == [("child", first), ("child", None)]
    assert kept.pid not in (None, first)
    assert kept.said == [f"child was ended by signal 9; started again in 0.2 s ({tmp_path / 'child.log'})"]


async def test_a_child_that_keeps_dying_is_started_again_ever_more_slowly_and_reported_with_its_log(
    tmp_path: Path, keep: Callable[[Child], Kept]
) -> None:
    kept = keep(child(tmp_path, "raise SystemExit('no such table')"))
    with pytest.raises(
        SupervisorError, match=r"(?s)child ended three times while it started\..*child.log.*no such table"
    ):
        await until(as_async(lambda: False), kept.keeper, 30)
    delays = [line.split("again in ")[1].split(" s")[0] for line in kept.said]
    assert delays == ["0.2", "0.4", "0.8"]


async def test_a_child_that_never_gets_ready_is_an_error_in_bounded_time(
    tmp_path: Path, keep: Callable[[Child], Kept]
) -> None:
    kept = keep(child(tmp_path, FOREVER))
    with pytest.raises(SupervisorError, match=r"child was not ready within 0\.2 s"):
        await until(as_async(lambda: False), kept.keeper, 0.2)


async def test_what_must_happen_before_a_start_is_tried_again_when_it_fails(
    tmp_path: Path, keep: Callable[[Child], Kept]
) -> None:
    calls: list[int] = []

    async def before() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("the old one is still there")

    kept = keep(child(tmp_path, FOREVER, before=before))
    await until(kept.running, kept.keeper, 10)
    assert len(calls) == 2
    assert kept.said[0].startswith("child could not start (the old one is still there); started again in 0.2 s")


async def test_stop_asks_first_and_starts_nothing_again(tmp_path: Path, keep: Callable[[Child], Kept]) -> None:
    polite = "import signal, time; signal.signal(15, lambda *_: exit(0)); print('up', flush=True); time.sleep(600)"
    kept = keep(child(tmp_path, polite))
    await until(as_async(lambda: "up" in _text(tmp_path / "child.log")), kept.keeper, 10)
    await kept.keeper.stop()
    assert (kept.pid, kept.said, kept.keeper.deaths) == (None, [], 0)
    assert len(kept.changes) == 2


async def test_a_child_that_does_not_stop_is_killed(tmp_path: Path, keep: Callable[[Child], Kept]) -> None:
    kept = keep(child(tmp_path, STUBBORN, stop_seconds=0.2))
    await until(as_async(lambda: "deaf" in _text(tmp_path / "child.log")), kept.keeper, 10)
    pid = kept.pid
    assert pid is not None
    await kept.keeper.stop()
    assert not alive(pid)
    assert kept.said == ["child did not stop within 0.2 s: killed"]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def test_secrets_are_in_the_environment_only(tmp_path: Path, keep: Callable[[Child], Kept]) -> None:
    started = child(tmp_path, "import os; print(os.environ['SECRET'], flush=True); " + FOREVER)
    assert "s3cret" not in repr(started)
    kept = keep(started)
    await until(as_async(lambda: "s3cret" in _text(tmp_path / "child.log")), kept.keeper, 10)
    assert "s3cret" not in _text(Path(f"/proc/{kept.pid}/cmdline"))
    assert "s3cret" not in "".join(kept.said)


async def test_run_to_end_reports_failure_with_the_log_and_kills_what_takes_too_long(tmp_path: Path) -> None:
    await run_to_end(child(tmp_path, "print('done')"), 10)
    with pytest.raises(SupervisorError, match=r"(?s)child ended with status 3\..*broken"):
        await run_to_end(child(tmp_path, "print('broken'); exit(3)"), 10)
    code = "import os; print(os.getpid(), flush=True); " + FOREVER
    with pytest.raises(SupervisorError, match=r"child took longer than 1 s"):
        await run_to_end(child(tmp_path, code, log=tmp_path / "slow.log"), 1)
    assert not alive(int(_text(tmp_path / "slow.log")))


async def test_a_command_that_cannot_be_run_says_so(tmp_path: Path) -> None:
    missing = Child(name="child", command=["/no/such/program"], environment={}, log=tmp_path / "child.log")
    with pytest.raises(SupervisorError, match=r"(?s)status 126.*cannot run \['/no/such/program'\]"):
        await run_to_end(missing, 10)


def test_children_die_with_a_supervisor_that_is_killed_with_9(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import asyncio, sys
        from pathlib import Path
        from finery_service.supervisor import Child, Keeper
        async def main():
            child = Child(name="c", command=[sys.executable, "-c", {STUBBORN!r}], environment={{}},
                          log=Path({str(tmp_path / "child.log")!r}))
            Keeper(child, changed=lambda name, pid: print(pid, flush=True), say=print).start()
            await asyncio.sleep(600)
        asyncio.run(main())
    """)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    deadline = time.monotonic() + 10
    while "deaf" not in _text(tmp_path / "child.log"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert alive(pid)
    process.kill()
    process.wait()
    process.stdout.close()
    while alive(pid):
        assert time.monotonic() < deadline, "the child outlived its supervisor"
        time.sleep(0.01)


async def test_an_operator_key_is_stored_as_a_hash_only(
    database: Database, system_engine: AsyncEngine, clock: FakeClock
) -> None:
    secret = await operator_key.create(database.system_dsn, "first", clock())
    assert secret.startswith("fop_")
    assert well_formed(secret.encode())
    async with transaction(system_engine) as session:
        row = (await session.exec(select(OperatorKeyRow))).one()
    assert row.hash == digest(secret)
    assert secret not in str(row.model_dump())
    assert (row.name, row.created_at, row.revoked_at) == ("first", clock(), None)


def test_wrong_usage_exits_with_2_and_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["upp"], ["up", "--port", "many"]):
        with pytest.raises(SystemExit) as caught:
            main.main(arguments)
        assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        main.main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("up", "migrate", "api", "rpc", "reconcile", "create-operator-key"))


def test_a_home_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as caught:
        main.main(["up", "--home", str(tmp_path / "file" / "home")])
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("finery-service up: ")
    assert len(error.splitlines()) == 1
