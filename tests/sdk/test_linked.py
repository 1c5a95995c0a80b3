"""Objects that a client returned know it: their verbs are its calls."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from finery.types.checkpoints import Checkpoint
from finery.types.files import File
from finery.types.jobs import Job

from .store import FILES, on_disk, store
from .support import (
    Client,
    Handler,
    Seen,
    checkpoint_json,
    client_of,
    event_json,
    file_json,
    items,
    job_json,
    page_json,
    serving,
    sse,
    value,
)

CHECKPOINT = checkpoint_json(FILES)
PREVIEW = {"id": "pv_1", "file": "file_1", "model": "m", "status": "ready", "created_at": "2026-11-30T12:00:00Z"}


def reply(handler: Handler, seen: Seen) -> None:
    call = f"{seen.method} {seen.path.partition('?')[0]}"
    if seen.headers.get("accept") == "text/event-stream":
        handler.stream()
        handler.wfile.write(sse(event_json(1), event_json(2), done=True))
        return None
    if seen.method == "DELETE":
        return handler.whole(204, b"")
    answers: dict[str, Any] = {
        "GET /v1/jobs": page_json([job_json()]),
        "GET /v1/jobs/job_1": job_json(state="succeeded"),
        "GET /v1/jobs/job_1/events": page_json([event_json(1), event_json(2)]),
        "POST /v1/jobs/job_1/cancel": job_json(intent="cancel"),
        "POST /v1/jobs/job_1/pause": job_json(intent="pause"),
        "POST /v1/jobs/job_1/resume": job_json(intent="run"),
        "PATCH /v1/jobs/job_1": job_json(name="new"),
        "GET /v1/checkpoints": page_json([CHECKPOINT]),
        "GET /v1/files": page_json([file_json()]),
        "POST /v1/files/file_1/previews": PREVIEW,
    }
    if call in answers:
        return handler.json(200, answers[call])
    return store()(handler, seen)


async def test_a_job_has_the_calls_of_its_client(kind: Client) -> None:
    with serving(reply) as server:
        (job,) = await items(client_of(kind, server).jobs.list())
        assert [event.seq for event in await items(job.stream())] == [1, 2]
        assert [event.seq for event in await items(job.stream(after=1))] == [2]
        assert [event.seq for event in await value(job.events())] == [1, 2]
        assert [event.seq for event in await value(job.events(after=1, limit=1))] == [2]
        heard: list[int] = []
        assert (await value(job.wait(on_event=lambda event: heard.append(event.seq)))).state == "succeeded"
        assert heard == [1, 2]
        assert [(await value(turn())).intent for turn in (job.cancel, job.pause, job.resume)] == [
            "cancel",
            "pause",
            "run",
        ]
        assert (await value(job.update(name="new"))).name == "new"
        assert (job.state, (await value(job.refresh())).state) == ("running", "succeeded")
        (checkpoint,) = await items(job.checkpoints())
        assert checkpoint.id == "ckpt_1"


async def test_a_checkpoint_and_a_file_have_theirs(kind: Client, tmp_path: Path) -> None:
    with serving(reply) as server:
        client = client_of(kind, server)
        (checkpoint,) = await items(client.checkpoints.list())
        assert await value(checkpoint.download(tmp_path / "out")) == tmp_path / "out"
        assert on_disk(tmp_path / "out") == FILES
        assert await value(checkpoint.delete()) is None
        (file,) = await items(client.files.list())
        assert (await value(file.preview(model="m", rows=2))).status == "ready"
        assert json.loads(server.to("/v1/files/file_1/previews")[0].body) == {"model": "m", "rows": 2}
        assert await value(file.delete()) is None
        deleted = [seen.path for seen in server.seen if seen.method == "DELETE"]
        assert deleted == ["/v1/checkpoints/ckpt_1", "/v1/files/file_1"]


async def test_what_an_answer_leads_to_knows_the_client_too(kind: Client) -> None:
    with serving(reply) as server:
        job = await value(client_of(kind, server).jobs.retrieve("job_1"))
        again = await value((await value(job.pause())).refresh())
        assert (await value(again.refresh())).id == "job_1"


@pytest.mark.parametrize(
    ("made", "path"),
    [
        (Job.model_validate(job_json(state="succeeded")), "/v1/jobs/job_1"),
        (Checkpoint.model_validate(CHECKPOINT), "/v1/checkpoints/ckpt_1"),
    ],
    ids=["job", "checkpoint"],
)
async def test_knowing_a_client_changes_nothing_else(kind: Client, made: Any, path: str) -> None:
    with serving(reply) as server:
        client = client_of(kind, server)
        noun = client.jobs if "jobs" in path else client.checkpoints
        found = await value(noun.retrieve(made.id))
        assert found == made
        assert found.model_dump() == made.model_dump()
        assert found.model_dump_json() == made.model_dump_json()
        assert repr(found) == repr(made)
        assert copy.deepcopy(found) == found
        assert pickle.loads(pickle.dumps(found)) == made
        assert "client" not in type(made).model_json_schema()["properties"]


@pytest.mark.parametrize(
    "lost", [lambda job: Job.model_validate(job_json()), lambda job: pickle.loads(pickle.dumps(job))]
)
async def test_an_object_without_a_client_says_so(kind: Client, lost: Any) -> None:
    with serving(reply) as server:
        job = lost(await value(client_of(kind, server).jobs.retrieve("job_1")))
        seen = len(server.seen)
        for verb in (job.stream, job.wait, job.cancel, job.refresh, job.checkpoints):
            with pytest.raises(RuntimeError, match=r"This Job did not come from a client.*client\.jobs\.retrieve"):
                verb()
        assert len(server.seen) == seen
    with pytest.raises(RuntimeError, match=r"client\.files\.retrieve"):
        File.model_validate(file_json()).delete()
