"""Models from a hub: what is asked for, branches that move, and a hub that is out of reach."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from finery.types.models import HubSource, ModelSource
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.catalog import resolve
from finery_gpu_workers.models.load import load_model
from finery_testing.served import Answer, served
from finery_testing.tiny import make_tiny_model

HUB = HubSource(type="hub", repo="acme/tiny")
FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny")


def error_of(source: ModelSource, cache: Path) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        resolve(source, cache)
    return caught.value


def hub_answer(commits: dict[str, Path], refs: dict[str, str]) -> Callable[[str], Answer]:
    """A repository with a folder for each commit, and names for commits."""
    as_json = {"Content-Type": "application/json"}

    def answer(path: str) -> Answer:
        path = path.split("?")[0]
        parts = path.split("/")
        at = next((parts[n + 1] for n in range(len(parts) - 1) if parts[n] in ("revision", "tree", "resolve")), "main")
        commit = refs.get(at, at)
        if commit not in commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        folder = commits[commit]
        if path.startswith("/api/models/acme/tiny/revision/"):
            siblings = [{"rfilename": p.name, "size": p.stat().st_size} for p in folder.iterdir()]
            about = {"id": "acme/tiny", "sha": commit, "siblings": siblings}
            return 200, as_json, json.dumps(about).encode()
        if path.startswith("/api/models/acme/tiny/tree/"):
            tree = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0"} for p in folder.iterdir()]
            return 200, as_json, json.dumps(tree).encode()
        file = folder / path.rsplit("/", 1)[-1]
        if not path.startswith("/acme/tiny/resolve/") or not file.exists():
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        content = file.read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, content

    return answer


@contextmanager
def hub(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    later: dict[str, Path] | None = None,
    refs: dict[str, str] | None = None,
) -> Iterator[list[str]]:
    """`folder` is the first commit; `refs` may be changed while it runs."""
    commits = {FIRST: folder} | (later or {})
    with served(hub_answer(commits, {"main": FIRST} if refs is None else refs)) as (url, asked):
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield asked


def test_the_hub_is_asked_for_safe_files_only(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tiny / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    (tiny / "modeling.py").write_text("raise SystemExit")
    with hub(tiny, monkeypatch) as asked:
        folder = resolve(HUB, tmp_path / "cache")
    assert not [path for path in asked if path.endswith((".bin", ".py"))]
    assert {p.name for p in folder.iterdir()} == {p.name for p in tiny.iterdir()} - {
        "pytorch_model.bin",
        "modeling.py",
    } | {"finery.json"}
    load_model(folder, device="cpu", dtype=torch.float32)


def test_an_unknown_repository_is_said_to_be_unknown(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub(tiny, monkeypatch):
        error = error_of(HubSource(type="hub", repo="acme/none"), tmp_path / "cache")
    assert (error.code, "acme/none" in error.message) == ("model_not_found", True)


def test_a_hub_that_cannot_be_reached_is_said_to_be_unreachable(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub(tiny, monkeypatch):
        pass  # The address stays set, the server is gone.
    assert error_of(HUB, tmp_path / "cache").code == "model_source_unavailable"


def test_a_branch_that_moves_is_fetched_anew(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refs, cache = {"main": FIRST}, tmp_path / "cache"
    moved = make_tiny_model(tmp_path / "moved", seed=1)
    with hub(tiny, monkeypatch, later={SECOND: moved}, refs=refs) as asked:
        first = resolve(HUB, cache)
        count = len(asked)
        assert resolve(HUB, cache) == first
        assert len(asked) == count + 1, "only the commit is asked for"
        refs["main"] = SECOND
        second = resolve(HUB, cache)
    for found, expected in ((first, tiny), (second, moved)):
        assert (found / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    assert json.loads((second / "finery.json").read_text())["source"]["revision"] == SECOND
    # The server is gone; the address stays.
    assert resolve(HUB, cache) == second, "the newest that was fetched"
    assert error_of(HubSource(type="hub", repo="acme/tiny", revision="v1"), cache).code == "model_source_unavailable"


def test_a_commit_is_never_asked_for_twice_and_shared_by_its_names(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = HubSource(type="hub", repo="acme/tiny", revision=FIRST)
    with hub(tiny, monkeypatch, refs={"main": FIRST, "v1": FIRST}):
        folder = resolve(HUB, tmp_path / "cache")
        assert resolve(HubSource(type="hub", repo="acme/tiny", revision="v1"), tmp_path / "cache") == folder
    assert resolve(pinned, tmp_path / "cache") == folder, "without a hub"


def test_a_revision_that_is_gone_is_said_to_be_gone_although_it_was_fetched(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = {"main": FIRST}
    with hub(tiny, monkeypatch, refs=refs):
        resolve(HUB, tmp_path / "cache")
        del refs["main"]
        assert error_of(HUB, tmp_path / "cache").code == "model_not_found"
