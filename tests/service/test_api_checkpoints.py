from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import obstore
import pytest

from finery_service.checkpoints import routes
from finery_service.checkpoints.download import disposition, download
from finery_testing import factories
from finery_testing.api import Api, Door, checkpoint

WEIGHTS = bytes(range(256)) * 4


async def published(api: Api, door: Door, step: int, files: dict[str, bytes], job: Any = None, **values: Any) -> str:
    job = job or await factories.job(api.system_engine, door.tenant, now=api.clock(), state="running")
    row = await checkpoint(
        api.system_engine,
        job,
        now=api.clock(),
        step=step,
        created_at=api.clock() + timedelta(seconds=step),
        files=[
            {"path": path, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for path, content in files.items()
        ],
        bytes=sum(map(len, files.values())),
        **values,
    )
    for path, content in files.items():
        await obstore.put_async(api.app.state.services.store, f"{row.prefix.rstrip('/')}/{path}", content)
    return row.id


async def test_checkpoints_are_listed_oldest_first_with_their_manifest(api: Api) -> None:
    door = await api.tenant()
    job = await factories.job(api.system_engine, door.tenant, now=api.clock(), state="running")
    ids = [await published(api, door, step, {"a.bin": b"x"}, job, manifest={"seed": 7}) for step in (1, 2, 3)]
    await published(api, door, 9, {"a.bin": b"x"})
    page = (await door.get(f"/v1/checkpoints?job={job.id}&limit=2")).json()
    assert [item["id"] for item in page["data"]] == ids[:2]
    rest = (await door.get(f"/v1/checkpoints?job={job.id}&after={page['last_id']}")).json()
    assert [item["id"] for item in rest["data"]] == ids[2:]
    assert len((await door.get("/v1/checkpoints")).json()["data"]) == 4
    one = (await door.get(f"/v1/checkpoints/{ids[0]}")).json()
    assert one == page["data"][0]
    assert (one["job"], one["step"], one["model"]) == (job.id, 1, factories.MODEL_NAME)
    assert one["files"] == [{"path": "a.bin", "bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}]
    assert one["manifest"] == {"seed": 7}


async def test_head_of_a_file_tells_its_size_and_digest_and_reads_nothing(api: Api) -> None:
    door = await api.tenant()
    path = f"/v1/checkpoints/{await published(api, door, 1, {'a.bin': WEIGHTS})}/files/a.bin"
    head = await door.client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(WEIGHTS))
    assert head.headers["etag"] == f'"{hashlib.sha256(WEIGHTS).hexdigest()}"'
    head = await door.client.head(path, headers={"range": "bytes=10-19"})
    assert (head.status_code, head.headers["content-length"]) == (206, "10")


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [
        ("bytes=0-9", 0, 10),
        ("bytes=1000-", 1000, 1024),
        ("bytes=-24", 1000, 1024),
        ("bytes=-5000", 0, 1024),
        ("bytes=1000-99999", 1000, 1024),
        ("bytes=1023-1023", 1023, 1024),
    ],
)
async def test_range_is_answered_with_206(api: Api, asked: str, start: int, end: int) -> None:
    door = await api.tenant()
    id_ = await published(api, door, 1, {"adapter_model.safetensors": WEIGHTS})
    answer = await door.get(f"/v1/checkpoints/{id_}/files/adapter_model.safetensors", headers={"range": asked})
    assert (answer.status_code, answer.content) == (206, WEIGHTS[start:end])
    assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/1024"
    assert answer.headers["content-length"] == str(end - start)


@pytest.mark.parametrize("asked", ["bytes=1024-", "bytes=5000-6000", "bytes=-0"])
async def test_range_outside_the_file_is_416(api: Api, asked: str) -> None:
    door = await api.tenant()
    id_ = await published(api, door, 1, {"w": WEIGHTS})
    answer = await door.get(f"/v1/checkpoints/{id_}/files/w", headers={"range": asked})
    assert (answer.status_code, answer.json()["error"]["code"]) == (416, "range_not_satisfiable")
    assert answer.headers["content-range"] == "bytes */1024"


@pytest.mark.parametrize("asked", ["bytes=9-3", "rows=1-2", "bytes=a-b", "bytes=0-1,5-6", "bytes=-"])
async def test_range_that_is_none_is_ignored(api: Api, asked: str) -> None:
    door = await api.tenant()
    id_ = await published(api, door, 1, {"w": WEIGHTS})
    answer = await door.get(f"/v1/checkpoints/{id_}/files/w", headers={"range": asked})
    assert (answer.status_code, answer.content) == (200, WEIGHTS)


async def test_whole_file_with_its_digest(api: Api) -> None:
    door = await api.tenant()
    id_ = await published(api, door, 1, {"sub/tokenizer.json": b"{}", "empty": b""})
    digest = hashlib.sha256(b"{}").hexdigest()
    answer = await door.get(f"/v1/checkpoints/{id_}/files/sub/tokenizer.json")
    assert (answer.status_code, answer.content) == (200, b"{}")
    assert answer.headers["etag"] == f'"{digest}"'
    assert answer.headers["x-checksum-sha256"] == digest
    assert answer.headers["content-length"] == "2"
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["content-disposition"].startswith('attachment; filename="tokenizer.json"')
    empty = await door.get(f"/v1/checkpoints/{id_}/files/empty")
    assert (empty.status_code, empty.content, empty.headers["content-length"]) == (200, b"", "0")


async def test_if_range_and_if_none_match(api: Api) -> None:
    door = await api.tenant()
    path = f"/v1/checkpoints/{await published(api, door, 1, {'w': WEIGHTS})}/files/w"
    etag = (await door.get(path)).headers["etag"]
    same = await door.get(path, headers={"range": "bytes=0-0", "if-range": etag})
    other = await door.get(path, headers={"range": "bytes=0-0", "if-range": '"other"'})
    assert (same.status_code, other.status_code, other.content) == (206, 200, WEIGHTS)
    assert (await door.get(path, headers={"if-none-match": etag})).status_code == 304


@pytest.mark.parametrize(
    "path",
    ["../secret", "..%2Fsecret", "%2e%2e/secret", "sub%2F..%2Fw", "", "W", "w/", "w%00", "%2Fetc%2Fpasswd"],
)
async def test_path_is_one_of_the_manifests_or_404(api: Api, path: str) -> None:
    door = await api.tenant()
    id_ = await published(api, door, 1, {"w": WEIGHTS})
    answer = await door.get(f"/v1/checkpoints/{id_}/files/{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] in ("checkpoint_file_not_found", "route_not_found", "checkpoint_not_found")


async def test_h05_foreign_checkpoints_are_unknown(api: Api) -> None:
    door, stranger = await api.tenant(), await api.tenant()
    id_ = await published(api, door, 1, {"w": WEIGHTS})
    assert (await stranger.get(f"/v1/checkpoints/{id_}")).status_code == 404
    assert (await stranger.get(f"/v1/checkpoints/{id_}/files/w")).status_code == 404
    assert (await stranger.get("/v1/checkpoints")).json()["data"] == []


async def test_object_that_is_gone_is_an_error_before_the_first_byte(api: Api) -> None:
    door = await api.tenant()
    id_ = await published(api, door, 1, {"w": WEIGHTS}, prefix="elsewhere/")
    await obstore.delete_async(api.app.state.services.store, "elsewhere/w")
    assert (await door.get(f"/v1/checkpoints/{id_}/files/w")).status_code == 500


async def test_a_checkpoint_that_is_deleted_while_a_download_begins_is_a_404(
    own_api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = await own_api.tenant()
    job = await factories.job(own_api.system_engine, door.tenant, now=own_api.clock(), state="succeeded")
    id_ = await published(own_api, door, 1, {"w": WEIGHTS}, job)

    async def late(*arguments: Any) -> Any:
        assert (await door.client.delete(f"/v1/checkpoints/{id_}")).status_code == 200
        return await download(*arguments)

    monkeypatch.setattr(routes, "download", late)
    answer = await door.get(f"/v1/checkpoints/{id_}/files/w")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "checkpoint_not_found")


def test_e17_download_names_are_safe_in_a_header_and_kept() -> None:
    header = disposition('a"b\r\nx: ü你.bin')
    assert header == "attachment; filename=\"a_b__x_ __.bin\"; filename*=UTF-8''a%22b%0D%0Ax%3A%20%C3%BC%E4%BD%A0.bin"
    header.encode("ascii")
