"""Rollouts at the API's door: pages of lines in the store, in order, bounded, of one's own jobs only."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace
from typing import Any

import obstore
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import MemoryStore

from finery.types.rollouts import RolloutKind
from finery_service.db.engine import transaction
from finery_service.jobs.tables import AttemptRow, JobRow
from finery_service.rollouts import service, store
from finery_service.rollouts.reading import Offsets, lines
from finery_testing import factories
from finery_testing.api import Api, Door

TALL = "é" * 10


def rollout(job: JobRow, step: int, number: int, kind: str = "train", **fields: Any) -> dict[str, Any]:
    return {
        "id": f"roll_{'e' if kind == 'eval' else ''}{step}_{number}",
        "job": job.id,
        "step": step,
        "kind": kind,
        "group": number // 2,
        "sample": number % 2,
        "prompt": number // 2,
        "tokens": [1, 2, 3],
        "log_probs": [-0.5, -0.25, 0.0],
        "text": f"{TALL} {number}",
        "finish": "stop",
        "reward": number / 8,
        **fields,
    }


async def stored(
    api: Api,
    job: JobRow,
    attempt: AttemptRow,
    step: int,
    count: int,
    kind: RolloutKind = "train",
    *,
    keep: bool = True,
    **fields: Any,
) -> str:
    """The key of an object with so many rollouts of a step, and (`keep`) its row."""
    rows = [rollout(job, step, number, kind, **fields) for number in range(count)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    key = f"{job.tenant_id}/jobs/{job.id}/{attempt.id}/rollouts/{kind}-{step}.jsonl"
    path = api.store_folder / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    file = SimpleNamespace(key=key, sha256=hashlib.sha256(content).hexdigest(), bytes=len(content), count=count)
    if keep:
        async with transaction(api.system_engine) as session:
            await store.put(session, job, attempt, kind, step, file, api.clock())
    return key


async def a_job(api: Api, door: Door) -> tuple[JobRow, AttemptRow]:
    job = await factories.job(api.system_engine, door.tenant, now=api.clock(), method="rl", state="running", fence=1)
    return job, await factories.attempt(api.system_engine, job, now=api.clock())


async def ids(door: Door, job: JobRow, limit: int, **params: Any) -> list[str]:
    """All of them, page by page."""
    found: list[str] = []
    while True:
        answer = await door.get(f"/v1/jobs/{job.id}/rollouts", params={"limit": limit, **params})
        assert answer.status_code == 200, answer.text
        page = answer.json()
        assert len(page["data"]) <= limit
        found += [one["id"] for one in page["data"]]
        assert page["last_id"] == (page["data"][-1]["id"] if page["data"] else None)
        if not page["has_more"]:
            return found
        assert page["data"], "a page that says that there is more has something"
        params["after"] = page["last_id"]


async def test_rollouts_are_listed_by_step_and_kind_in_pages_of_any_size(api: Api) -> None:
    door = await api.tenant()
    job, attempt = await a_job(api, door)
    await stored(api, job, attempt, 0, 2, "eval")
    await stored(api, job, attempt, 2, 3)
    await stored(api, job, attempt, 10, 4)
    await stored(api, job, attempt, 1, 5)
    await stored(api, job, attempt, 3, 0)
    await stored(api, job, attempt, 2, 2, "eval")
    train = {step: [f"roll_{step}_{number}" for number in range(count)] for step, count in ((1, 5), (2, 3), (10, 4))}
    first, second = ([f"roll_e{step}_{number}" for number in range(2)] for step in (0, 2))
    everything = [*first, *train[1], *train[2], *second, *train[10]]
    for limit in (1, 2, 3, 5, 16, 100):
        assert await ids(door, job, limit) == everything, limit
    assert await ids(door, job, 2, kind="train") == [*train[1], *train[2], *train[10]]
    assert await ids(door, job, 3, kind="eval") == [*first, *second]
    assert await ids(door, job, 2, step=2) == [*train[2], *second]
    assert await ids(door, job, 2, step=2, kind="eval") == second
    assert await ids(door, job, 2, step=3) == await ids(door, job, 2, step=99) == []


async def test_a_rollout_is_shown_as_it_was_stored(api: Api) -> None:
    door = await api.tenant()
    job, attempt = await a_job(api, door)
    failure = {"code": "timeout", "message": "too slow", "grader": None}
    await stored(api, job, attempt, 1, 1, reward=None, failure=failure, item={"answer": [1, None]}, seconds={"a": 0.5})
    await stored(api, job, attempt, 2, 1, text="\ud83d\ude00\ud83d")
    [shown, half] = (await door.get(f"/v1/jobs/{job.id}/rollouts")).json()["data"]
    assert half["text"] == "\U0001f600\ufffd"
    assert (shown["object"], shown["reward"], shown["failure"]) == ("rollout", None, failure)
    assert (shown["text"], shown["tokens"], shown["log_probs"]) == (f"{TALL} 0", [1, 2, 3], [-0.5, -0.25, 0.0])
    assert (shown["item"], shown["seconds"], shown["trained"]) == ({"answer": [1, None]}, {"a": 0.5}, False)


async def test_the_file_of_a_later_attempt_takes_the_place_of_the_earlier_one(api: Api) -> None:
    door = await api.tenant()
    job, attempt = await a_job(api, door)
    await stored(api, job, attempt, 1, 4, text="first")
    later = await factories.attempt(
        api.system_engine, job, now=api.clock(), fence=2, state="ended", ended_at=api.clock(), reason="completed"
    )
    for _ in range(2):  # a commit may be repeated
        await stored(api, job, later, 1, 2, text="second")
    page = (await door.get(f"/v1/jobs/{job.id}/rollouts")).json()
    assert [(one["id"], one["text"]) for one in page["data"]] == [("roll_1_0", "second"), ("roll_1_1", "second")]


async def test_a_step_that_is_done_again_with_fewer_rollouts_breaks_no_list(api: Api) -> None:
    door = await api.tenant()
    job, attempt = await a_job(api, door)
    await stored(api, job, attempt, 1, 4)
    await stored(api, job, attempt, 2, 1)
    page = (await door.get(f"/v1/jobs/{job.id}/rollouts", params={"limit": 3})).json()
    later = await factories.attempt(
        api.system_engine, job, now=api.clock(), fence=2, state="ended", ended_at=api.clock(), reason="completed"
    )
    for count, left in ((4, ["roll_1_3", "roll_2_0"]), (3, ["roll_2_0"]), (2, ["roll_2_0"])):
        await stored(api, job, later, 1, count)
        rest = await door.get(f"/v1/jobs/{job.id}/rollouts", params={"after": page["last_id"]})
        assert (rest.status_code, [one["id"] for one in rest.json()["data"]]) == (200, left), rest.text


async def test_h05_rollouts_are_those_of_ones_own_jobs(api: Api) -> None:
    door, other = await api.tenant(), await api.tenant("other")
    job, attempt = await a_job(api, door)
    own, own_attempt = await a_job(api, other)
    await stored(api, job, attempt, 1, 3)
    await stored(api, own, own_attempt, 5, 1)
    answer = await other.get(f"/v1/jobs/{job.id}/rollouts")
    unknown = await other.get("/v1/jobs/job_0000/rollouts")
    assert answer.status_code == unknown.status_code == 404
    assert answer.text.replace(job.id, "ID") == unknown.text.replace("job_0000", "ID")
    foreign = await other.get(f"/v1/jobs/{own.id}/rollouts", params={"after": "roll_1_0"})
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (400, "invalid_cursor")


async def test_cursors_and_filters_that_make_no_sense_are_refused(api: Api) -> None:
    door = await api.tenant()
    job, attempt = await a_job(api, door)
    await stored(api, job, attempt, 1, 3)
    await stored(api, job, attempt, 1, 1, "eval")
    path = f"/v1/jobs/{job.id}/rollouts"
    bad: list[dict[str, Any]] = [
        {"after": "roll_2_0"},
        {"after": "roll_e2_0"},
        {"after": "roll_1_0", "step": 2},
        {"after": "roll_1_0", "kind": "eval"},
        {"after": "roll_e1_0", "kind": "train"},
        {"after": "roll_-1_0"},
        {"after": f"roll_{2**70}_0"},
        {"after": "\0"},
        {"after": job.id},
    ]
    for params in bad:
        answer = await door.get(path, params=params)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_cursor"), params
    for params in ({"step": -1}, {"step": 2**63}, {"kind": "all"}, {"limit": 0}, {"limit": 101}, {"colour": "red"}):
        assert (await door.get(path, params=params)).status_code == 400, params


async def test_a_page_of_long_rollouts_ends_early_and_loses_none(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "PAGE_BYTES", 1000)
    door = await api.tenant()
    job, attempt = await a_job(api, door)
    await stored(api, job, attempt, 1, 3, text="x" * 600)
    await stored(api, job, attempt, 2, 2, text="y" * 5000)
    first = (await door.get(f"/v1/jobs/{job.id}/rollouts")).json()
    assert ([one["id"] for one in first["data"]], first["has_more"]) == (["roll_1_0", "roll_1_1"], True)
    expected = ["roll_1_0", "roll_1_1", "roll_1_2", "roll_2_0", "roll_2_1"]
    assert await ids(door, job, 100) == expected


@pytest.mark.parametrize("what", ["gone", "shorter", "another's"])
async def test_an_object_that_is_not_as_its_row_says_is_an_error_of_ours(api: Api, what: str) -> None:
    door = await api.tenant()
    job, attempt = await a_job(api, door)
    key = await stored(api, job, attempt, 1, 3)
    path = api.store_folder / key
    if what == "gone":
        path.unlink()
    elif what == "shorter":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 3 - 20])
    else:
        path.write_bytes(path.read_bytes().replace(job.id.encode(), b"job_" + b"0" * 36))
    answer = await door.get(f"/v1/jobs/{job.id}/rollouts")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert attempt.id not in answer.text


async def test_a_page_does_not_read_what_earlier_pages_have_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the rest of the object: by the ranges that are asked of the store."""
    content = b"".join(b"%04d" % number + b"x" * 995 + b"\n" for number in range(5000))
    objects = MemoryStore()
    await obstore.put_async(objects, "k", content)
    asked: list[tuple[int, int]] = []
    get = obstore.get_async

    async def watched(where: Any, key: str, *, options: Any) -> Any:
        asked.append(options["range"])
        return await get(where, key, options=options)

    monkeypatch.setattr(obstore, "get_async", watched)
    offsets = Offsets()
    offsets.keep("k", 4000, 4_000_000)
    found = [line async for line in lines(objects, "k", len(content), 4000, offsets)]
    assert [found[0].content[:4], found[-1].content[:4], len(found)] == [b"4000", b"4999", 1000]
    assert asked == [(4_000_000, 5_000_000)]


@given(st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), max_size=12), st.integers(0, 13))
async def test_lines_are_those_of_the_object_from_any_one_on(content: list[bytes], first: int) -> None:
    objects, whole = MemoryStore(), b"".join(line + b"\n" for line in content)
    await obstore.put_async(objects, "k", whole)
    offsets = Offsets()
    found = [line async for line in lines(objects, "k", len(whole), first, offsets)]
    assert [(line.number, line.content) for line in found] == list(enumerate(content))[first:]
    for line in found:
        assert whole[: line.end].count(b"\n") == line.number + 1
        offsets.keep("k", line.number + 1, line.end)
        again = [one.content async for one in lines(objects, "k", len(whole), line.number + 1, offsets)]
        assert again == content[line.number + 1 :]
