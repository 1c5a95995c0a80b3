"""What a customer downloads, and what stays behind."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from finery_gpu_workers import run, storage
from finery_protos.v1 import worker_pb2 as pb
from finery_testing.control_plane import FakeControlPlane
from finery_testing.tiny import IM_END

from .conftest import MakeJob, chat_rows


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def done(make_job: MakeJob) -> FakeControlPlane:
    control = make_job(epochs=2, validation=chat_rows(2))
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    return control


@pytest.fixture
def folder(done: FakeControlPlane) -> Path:
    return done.store / done.checkpoints[-1].prefix


def manifest(done: FakeControlPlane) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(done.checkpoints[-1].manifest_json)
    return content


def test_a_checkpoint_lies_under_its_attempt_and_step(done: FakeControlPlane) -> None:
    last = done.checkpoints[-1]
    assert last.prefix == f"ten_test/jobs/job_test/att_2/checkpoints/step-{last.step:08d}/"
    assert last.resume_prefix == f"ten_test/jobs/job_test/att_2/resume/step-{last.step:08d}/"


def test_its_files_are_those_published(done: FakeControlPlane, folder: Path) -> None:
    published = {file.path for file in done.checkpoints[-1].files}
    assert published == {path.name for path in folder.iterdir()}
    assert published >= {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "generation_config.json", "README.md", "manifest.json",
    }  # fmt: skip


def test_the_model_card_keeps_a_name_readable(make_job: MakeJob) -> None:
    control = make_job(max_steps=1)
    control.spec = control.spec.model_copy(update={"name": "größer 模型 # x"})
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    card = (control.store / control.checkpoints[-1].prefix / "README.md").read_text(encoding="utf-8")
    assert "\n# größer 模型 # x\n" in card


def test_d09_d10_peft_loads_what_the_loop_published_and_has_its_loss(
    done: FakeControlPlane, folder: Path, tiny_folder: Path
) -> None:
    """Loss of the validation rows, by transformers and PEFT from the text alone, against the job's last evaluation."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before, after = (AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32) for _ in range(2))
    losses = {}
    for name, model in (("before", before), ("after", peft.PeftModel.from_pretrained(after, folder))):
        scored: list[torch.Tensor] = []
        for row in chat_rows(2):
            user, answer = row["messages"]
            ids = tokenizer.apply_chat_template([user, answer], return_tensors="pt", return_dict=False)[0]
            prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=False)
            end = int((ids == IM_END).nonzero()[-1])
            with torch.no_grad():
                logits = model(ids[None]).logits[0, len(prompt) - 1 : end]
            scored.append(torch.nn.functional.cross_entropy(logits, ids[len(prompt) : end + 1], reduction="none"))
        losses[name] = float(torch.cat(scored).mean())
    evaluations = [step.evaluation.loss for step in done.steps if step.HasField("evaluation")]
    assert evaluations == pytest.approx([losses["before"], losses["after"]], rel=1e-5)
    assert losses["after"] < 0.9 * losses["before"]


def test_the_manifest_says_how_it_was_made(done: FakeControlPlane, folder: Path, tiny_folder: Path) -> None:
    content = manifest(done)
    assert json.loads((folder / "manifest.json").read_text()) == content
    assert done.prepared is not None
    assert content["step"] == content["total_steps"] == done.prepared.total_steps
    assert content["final"] is True
    assert content["spec"] == json.loads(done.spec.model_dump_json())
    assert content["adapted_modules"] == 2 * 7
    weights = f"{sha256(tiny_folder / 'model.safetensors')}  model.safetensors\n"
    base = hashlib.sha256(weights.encode()).hexdigest()
    assert content["compute"] == {
        "base_sha256": base, "dtype": "float32", "device": "cpu", "threads": 1, "engine": "finery",
    }  # fmt: skip
    assert content["base"] == {"model": "tiny", "source": {"type": "path"}, "chain": [], "sha256": base}
    assert (content["kind"], content["seed"], content["trained_modules"]) == ("adapter", 0, 2 * 7)
    # rank × (inputs + outputs) of q, k, v, o, gate, up, down in two layers
    assert content["trained_parameters"] == content["parameters"] == 2 * 4 * (64 + 48 + 48 + 64 + 96 + 96 + 96)
    assert content["data"] == json.loads(done.prepared.statistics_json)
    assert content["versions"]["torch"] == torch.__version__
    assert content["validation_loss"] == done.steps[-1].evaluation.loss == done.checkpoints[-1].validation_loss
    assert content["data_digests"].keys() == {"train", "validation"}
    assert content["trained_tokens"] == done.prepared.total_trained_tokens
    assert content["evaluation"]["loss"] == done.steps[-1].evaluation.loss
    assert content["metrics"]["loss"] == done.steps[-1].metrics["loss"]
    for file in content["files"]:
        assert sha256(folder / file["path"]) == file["sha256"]


def test_nothing_of_the_workers_disk_is_in_it(folder: Path, tiny_folder: Path) -> None:
    for path in folder.iterdir():
        assert str(tiny_folder).encode() not in path.read_bytes(), path.name
        assert b"finery-workers-" not in path.read_bytes(), path.name


def test_the_resume_bundle_holds_tensors_and_json_only(done: FakeControlPlane) -> None:
    bundle = done.store / done.checkpoints[-1].resume_prefix
    assert {path.name for path in bundle.iterdir()} == {
        "index.json", "learner.safetensors", "generators.safetensors",
    }  # fmt: skip
    index = json.loads((bundle / "index.json").read_text())
    assert index["cursor"]["step"] == done.checkpoints[-1].step
    assert index["cursor"]["rows"] == 14
    assert index["known"]["untouched"] == []
    for file in index["files"]:
        assert sha256(bundle / file["path"]) == file["sha256"]
        with safe_open(bundle / file["path"], framework="pt") as tensors:
            assert list(tensors.keys())


def test_files_from_the_store_stay_in_their_folder(tmp_path: Path) -> None:
    store = storage.open_store((tmp_path / "store").as_uri())
    for path in ("../x", "/x", "a/../../x"):
        with pytest.raises(ValueError, match="relative path"):
            storage.download_all(store, "p/", [(path, None)], tmp_path / "out")


def test_an_object_with_other_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a b.txt").write_bytes(b"x" * 100_000)
    store = storage.open_store((tmp_path / "store").as_uri())
    (stored,) = storage.upload_all(store, tmp_path / "in", "p/")
    assert (stored.path, stored.bytes, stored.sha256) == ("a b.txt", 100_000, sha256(tmp_path / "in/a b.txt"))
    storage.download(store, "p/a b.txt", tmp_path / "out", stored.sha256)
    assert (tmp_path / "out").read_bytes() == b"x" * 100_000
    with pytest.raises(storage.DigestError):
        storage.download(store, "p/a b.txt", tmp_path / "out", "0" * 64)
