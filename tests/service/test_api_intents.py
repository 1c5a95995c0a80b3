"""Cancel, pause and resume at the door: what the customer wants, never what the job is."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from finery.types.jobs import TERMINAL, JobState
from finery_testing import control, factories
from finery_testing.api import Api, Door

RESTING = frozenset(JobState) - TERMINAL


async def job(api: Api, door: Door, **values: Any) -> str:
    return (await factories.job(api.system_engine, door.tenant, now=api.clock(), **values)).id


async def ask(door: Door, job_id: str, verb: str) -> httpx.Response:
    return await door.post(f"/v1/jobs/{job_id}/{verb}")


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize("state", sorted(RESTING))
async def test_pause_and_resume_set_the_intent_once_in_every_state(api: Api, state: JobState) -> None:
    door = await api.tenant()
    made = await job(api, door, state=state)
    before = (await control.job_row(api.system_engine, made)).version
    for verb, intent, version in (("pause", "pause", before + 1), ("resume", "run", before + 2)):
        first = await ask(door, made, verb)
        assert (first.status_code, first.json()["intent"], first.json()["state"]) == (200, intent, state)
        second = await ask(door, made, verb)
        assert (second.status_code, second.json()) == (200, first.json())
        row = await control.job_row(api.system_engine, made)
        assert (row.version, row.state) == (version, state), "the API moves no state"


async def test_resume_of_a_job_that_was_never_paused_changes_nothing(api: Api) -> None:
    door = await api.tenant()
    made = await job(api, door, state="running")
    row = await control.job_row(api.system_engine, made)
    assert (await ask(door, made, "resume")).json() == (await door.get(f"/v1/jobs/{made}")).json()
    assert await control.job_row(api.system_engine, made) == row


@pytest.mark.parametrize("state", sorted(TERMINAL))
@pytest.mark.parametrize("verb", ["pause", "resume"])
async def test_e10_pause_and_resume_after_the_end_are_409_with_the_state(api: Api, state: JobState, verb: str) -> None:
    door = await api.tenant()
    made = await job(api, door, state=state)
    row = await control.job_row(api.system_engine, made)
    answer = await ask(door, made, verb)
    assert code(answer) == (409, "job_already_terminal")
    assert answer.json()["error"]["details"] == [{"state": state}]
    assert answer.headers["x-should-retry"] == "false"
    assert await control.job_row(api.system_engine, made) == row


async def test_e10_cancel_wins_over_pause_and_is_never_withdrawn(api: Api) -> None:
    door = await api.tenant()
    made = await job(api, door, state="running")
    assert (await ask(door, made, "pause")).json()["intent"] == "pause"
    cancelled = await ask(door, made, "cancel")
    assert (cancelled.status_code, cancelled.json()["intent"]) == (200, "cancel")
    for verb in ("pause", "resume"):
        answer = await ask(door, made, verb)
        assert code(answer) == (409, "job_is_being_cancelled")
        assert answer.headers["x-should-retry"] == "false"
    assert (await control.job_row(api.system_engine, made)).intent == "cancel"


async def test_e10_racing_intents_leave_the_cancel_standing(api: Api) -> None:
    door = await api.tenant()
    made = await job(api, door, state="running")
    verbs = ["pause", "resume", "cancel", "pause", "resume"] * 4
    answers = await asyncio.gather(*(ask(door, made, verb) for verb in verbs))
    assert {answer.status_code for answer in answers} <= {200, 409}
    assert (await control.job_row(api.system_engine, made)).intent == "cancel"


@pytest.mark.parametrize("verb", ["cancel", "pause", "resume"])
async def test_e10_unknown_and_foreign_jobs_and_previews_answer_404_alike(api: Api, verb: str) -> None:
    door, stranger = await api.tenant(), await api.tenant()
    theirs = await job(api, stranger, state="running")
    preview = await job(api, door, state="validating", kind="preview", id=f"prev_{theirs.partition('_')[2]}")
    answers = [await ask(door, id_, verb) for id_ in ("job_unknown", theirs, preview, "x" * 300, "%00")]
    assert [code(answer) for answer in answers] == [(404, "job_not_found")] * 5
    assert (await control.job_row(api.system_engine, theirs)).intent == "run"


async def test_previews_are_seen_nowhere_among_the_jobs(api: Api) -> None:
    door = await api.tenant()
    preview = await job(api, door, state="validating", kind="preview")
    assert (await door.get("/v1/jobs")).json()["data"] == []
    for path in ("", "/events"):
        assert (await door.get(f"/v1/jobs/{preview}{path}")).status_code == 404
    assert (await door.get(f"/v1/usage?job={preview}")).status_code == 404
    assert (await door.get(f"/v1/checkpoints?job={preview}")).status_code == 404
