from __future__ import annotations

import os
from pathlib import Path

import pytest

from finery import APIError, DownloadError

from .store import BIG, FILES, PARTIAL, SIZE, fetches, on_disk, send_rest, store
from .support import Client, Handler, client_of, error_json, serving, value


async def test_all_files_arrive_and_progress_ends_at_the_total(kind: Client, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with serving(store()) as server:
        client = client_of(kind, server)
        out = await value(
            client.checkpoints.download("ckpt_1", tmp_path / "out", on_progress=lambda *at: told.append(at))
        )
    assert out == tmp_path / "out"
    assert on_disk(out) == FILES
    total = sum(map(len, FILES.values()))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert (told[-1], {of for _, of in told}) == ((total, total), {total})


async def test_what_is_there_already_is_proved_and_not_fetched(kind: Client, tmp_path: Path) -> None:
    with serving(store()) as server:
        client = client_of(kind, server)
        await value(client.checkpoints.download("ckpt_1", tmp_path))
        (tmp_path / BIG).write_bytes(bytes(SIZE))  # right size, wrong content
        server.seen.clear()
        await value(client.checkpoints.download("ckpt_1", tmp_path))
        assert [seen.path.rsplit("/", 1)[1] for seen in server.seen] == ["ckpt_1", BIG]
    assert on_disk(tmp_path) == FILES


async def test_a_cut_connection_goes_on_from_the_bytes_that_came(kind: Client, tmp_path: Path) -> None:
    def send(handler: Handler, content: bytes, start: int) -> None:
        if len(content) < SIZE or start >= SIZE // 2:
            return send_rest(handler, content, start)
        status = 206 if start else 200
        where = f"bytes {start}-{SIZE - 1}/{SIZE}"
        handler.head(status, **{"Content-Length": str(SIZE - start), "Content-Range": where})
        handler.wfile.write(content[start : start + SIZE // 10])
        return handler.cut()

    with serving(store(send=send)) as server:
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
        assert fetches(server) == [SIZE // 10 * n for n in range(6)], "more cuts than a plain call has attempts"
    assert on_disk(tmp_path) == FILES


async def test_a_server_that_brings_nothing_is_given_up_after_three_tries(kind: Client, tmp_path: Path) -> None:
    def send(handler: Handler, content: bytes, start: int) -> None:
        if len(content) < SIZE:
            return send_rest(handler, content, start)
        return handler.json(503, error_json("away"))

    with serving(store(send=send)) as server:
        with pytest.raises(APIError, match="away"):
            await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
        assert fetches(server) == [0, 0, 0]
    assert PARTIAL not in on_disk(tmp_path)


@pytest.mark.parametrize("left", [1, SIZE // 3, SIZE - 1])
async def test_a_partial_of_an_earlier_run_is_completed(kind: Client, tmp_path: Path, left: int) -> None:
    (tmp_path / PARTIAL).write_bytes(FILES[BIG][:left])
    with serving(store()) as server:
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
        assert fetches(server) == [left]
    assert on_disk(tmp_path) == FILES


async def test_a_whole_partial_is_proved_and_named_without_a_fetch(kind: Client, tmp_path: Path) -> None:
    (tmp_path / PARTIAL).write_bytes(FILES[BIG])
    with serving(store()) as server:
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
        assert fetches(server) == []
    assert on_disk(tmp_path) == FILES


@pytest.mark.parametrize("rubbish", [bytes(SIZE // 2), bytes(SIZE), bytes(SIZE + 9)])
async def test_a_spoilt_partial_is_thrown_away_and_fetched_anew(kind: Client, tmp_path: Path, rubbish: bytes) -> None:
    (tmp_path / PARTIAL).write_bytes(rubbish)
    with serving(store()) as server:
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
        assert fetches(server)[-1] == 0
        assert len(fetches(server)) <= 2
    assert on_disk(tmp_path) == FILES


async def test_a_server_without_ranges_sends_all_again(kind: Client, tmp_path: Path) -> None:
    (tmp_path / PARTIAL).write_bytes(FILES[BIG][:1000])
    with serving(store(send=lambda handler, content, start: handler.whole(200, content))) as server:
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
        assert fetches(server) == [1000]
    assert on_disk(tmp_path) == FILES


async def test_a_range_that_the_server_refuses_starts_over(kind: Client, tmp_path: Path) -> None:
    def send(handler: Handler, content: bytes, start: int) -> None:
        if start:
            return handler.json(416, error_json("range_not_satisfiable"))
        return handler.whole(200, content)

    (tmp_path / PARTIAL).write_bytes(FILES[BIG][:1000])
    with serving(store(send=send)) as server:
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
        assert fetches(server) == [1000, 0]
    assert on_disk(tmp_path) == FILES


@pytest.mark.parametrize("found", ["bytes 0-9/10", "", "bytes 999-1023999/1024000"])
async def test_a_wrong_range_is_never_written(kind: Client, tmp_path: Path, found: str) -> None:
    def send(handler: Handler, content: bytes, start: int) -> None:
        if not start:
            return handler.whole(200, content)
        return handler.whole(206, content[start:], **({"Content-Range": found} if found else {}))

    (tmp_path / PARTIAL).write_bytes(FILES[BIG][:1000])
    with serving(store(send=send)) as server, pytest.raises(DownloadError, match="expected bytes from 1000"):
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
    assert (tmp_path / PARTIAL).read_bytes() == FILES[BIG][:1000]


@pytest.mark.parametrize("content", [b"y" * 10, b"x" * 11], ids=["other bytes", "too many"])
async def test_content_that_is_not_the_checkpoints_never_gets_its_name(
    kind: Client, tmp_path: Path, content: bytes
) -> None:
    def send(handler: Handler, true: bytes, start: int) -> None:
        handler.whole(200, content)

    with serving(store({"a": b"x" * 10}, send)) as server, pytest.raises(DownloadError, match="a was discarded"):
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
    assert on_disk(tmp_path) == {}


async def test_an_answer_that_ends_early_is_not_taken_for_the_file(kind: Client, tmp_path: Path) -> None:
    def send(handler: Handler, true: bytes, start: int) -> None:
        handler.whole(206 if start else 200, b"", **{"Content-Range": f"bytes {start}-{start}/10"})

    with serving(store({"a": b"x" * 10}, send)) as server, pytest.raises(APIError, match="ended after 0 of 10 bytes"):
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path))
    assert on_disk(tmp_path) == {}


EVIL = ["../a", "a/../../b", "/etc/passwd", "a//b", "", ".", "a/.", "c:\\x", "..\\a", "a\nb", "a\x00b", "a/"]


@pytest.mark.parametrize("path", EVIL)
async def test_a_path_that_leaves_the_folder_is_refused_before_anything_is_written(
    kind: Client, tmp_path: Path, path: str
) -> None:
    with serving(store({"fine": b"1", path: b"evil"})) as server:
        with pytest.raises(DownloadError, match="Refused the file name"):
            await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path / "out"))
        assert len(server.seen) == 1
    assert os.listdir(tmp_path) == []


async def test_a_link_that_leads_out_of_the_folder_is_not_followed(kind: Client, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sub").symlink_to(tmp_path / "elsewhere")
    with serving(store({"sub/a": b"1"})) as server, pytest.raises(DownloadError, match="leads out"):
        await value(client_of(kind, server).checkpoints.download("ckpt_1", tmp_path / "out"))
    assert os.listdir(tmp_path / "elsewhere") == []


async def test_a_folder_of_another_checkpoint_is_refused(kind: Client, tmp_path: Path) -> None:
    """Files of two checkpoints in one folder would load as a model that neither of them is."""
    with serving(store()) as server:
        client = client_of(kind, server)
        (tmp_path / "manifest.json").write_text('{"job": "job_other", "step": 7}')
        with pytest.raises(DownloadError, match="holds another checkpoint, step 7 of job_other"):
            await value(client.checkpoints.download("ckpt_1", tmp_path))
        assert os.listdir(tmp_path) == ["manifest.json"]
        known = await value(client.checkpoints.retrieve("ckpt_1"))
        (tmp_path / "manifest.json").write_text(f'{{"job": "{known.job}", "step": {known.step}}}')
        await value(client.checkpoints.download("ckpt_1", tmp_path))
    assert (tmp_path / BIG).read_bytes() == FILES[BIG]
