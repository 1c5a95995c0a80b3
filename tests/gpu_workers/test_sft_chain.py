"""Jobs that start from checkpoints. The first evaluation of the next job is the last one of the job before."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch

from finery.types.methods import FullWeights, LoraAdapter
from finery_testing.control_plane import FakeControlPlane

from .cards import Spy, logits_of, run_card
from .conftest import MakeJob, chat_rows, ended, evaluations, goes_on, last_folder, last_manifest, stands_on, trained

FULL, OTHER = FullWeights(type="full"), LoraAdapter(rank=2, alpha=4.0, targets=("q_proj", "down_proj"))
WHOLE = LoraAdapter(rank=4, alpha=8.0, modules_to_save=("embed_tokens",))
HELD_OUT = chat_rows(3)
IDS = list(b"What is 2 plus 2?")


def first_job(make_job: MakeJob, **job: Any) -> FakeControlPlane:
    control = trained(make_job(validation=HELD_OUT, epochs=2, **job))
    assert ended(control) == "completed"
    assert evaluations(control)[control.step] < 0.98 * evaluations(control)[0]
    return control


def follows(make_job: MakeJob, onto: dict[str, Any], **job: Any) -> FakeControlPlane:
    """Trained on the same rows."""
    control = trained(make_job(validation=HELD_OUT, onto=onto, epochs=1, **job))
    assert ended(control) == "completed"
    return control


def ends_where(first: FakeControlPlane) -> float:
    return evaluations(first)[first.step]


def test_an_adapter_goes_on(make_job: MakeJob) -> None:
    first = first_job(make_job)
    second = follows(make_job, goes_on(first))
    assert evaluations(second)[0] == ends_where(first)
    assert evaluations(second)[second.step] < ends_where(first)
    assert last_manifest(second)["base"]["chain"] == []


def test_a_merged_checkpoint_is_the_base_of_a_new_adapter(make_job: MakeJob) -> None:
    first = first_job(make_job)
    second = follows(make_job, stands_on(first, "merge"), adapter=OTHER)
    assert evaluations(second)[0] == pytest.approx(ends_where(first), rel=1e-5)
    content = last_manifest(second)
    assert content["base"]["chain"] == [
        {"checkpoint": "ckpt_job_test", "kind": "merge", "base_vocab_size": 261, "vocab_size": 261}
    ]
    assert (content["adapted_modules"], content["servable_as_adapter"]) == (2 * 2, False)
    assert content["compute"]["base_sha256"] != last_manifest(first)["compute"]["base_sha256"]


def test_all_weights_then_an_adapter_then_both_merged(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = first_job(make_job, adapter=FULL)
    spy = Spy(monkeypatch, IDS)
    adapter = follows(make_job, stands_on(whole, "full"))
    assert evaluations(adapter)[0] == ends_where(whole)
    names = run_card(last_folder(adapter), ckpt_job_test=last_folder(whole))
    assert torch.allclose(logits_of(names["model"], IDS), spy.logits, atol=1e-5)
    third = follows(make_job, stands_on(adapter, "merge"), adapter=OTHER)
    below = {"ckpt_job_test": last_folder(whole), "ckpt_job_test_next": last_folder(adapter)}
    names = run_card(last_folder(third), 0, **below)
    assert torch.allclose(logits_of(names["model"], IDS), spy.logits, atol=1e-4)
    both = follows(make_job, stands_on(adapter, "merge"), adapter=FULL)
    assert evaluations(both)[0] == pytest.approx(ends_where(adapter), rel=1e-5)
    assert [part["kind"] for part in last_manifest(both)["base"]["chain"]] == ["full", "merge"]
    last = follows(make_job, stands_on(both, "full"), adapter=OTHER)
    assert evaluations(last)[0] == ends_where(both)


@pytest.mark.parametrize("adapter", [FULL, WHOLE], ids=["all weights", "the matrix again"])
def test_a_matrix_that_an_adapter_trained_whole_is_merged_and_trained_on(make_job: MakeJob, adapter: Any) -> None:
    first = first_job(make_job, adapter=WHOLE)
    second = follows(make_job, stands_on(first, "merge"), adapter=adapter)
    assert evaluations(second)[0] == pytest.approx(ends_where(first), rel=1e-5)
    assert evaluations(second)[second.step] < ends_where(first)


def test_all_weights_go_on_from_all_weights(make_job: MakeJob) -> None:
    first = first_job(make_job, adapter=FULL)
    second = follows(make_job, stands_on(first, "full"), adapter=FULL)
    assert evaluations(second)[0] == ends_where(first)


def test_d10_a_start_checkpoint_with_a_changed_file_is_refused(make_job: MakeJob) -> None:
    first = first_job(make_job)
    file = last_folder(first) / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for onto in (goes_on(first), stands_on(first, "merge")):
        second = trained(make_job(onto=onto))
        assert ended(second) == "platform_fault"
        assert not second.steps


@pytest.mark.parametrize("how", ["goes on", "merged"])
def test_d10_an_adapter_whose_keys_fit_no_module_is_never_a_silent_no_op(
    make_job: MakeJob, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys as of the language part of a larger model; sizes and digests are right."""
    first = first_job(make_job)
    folder = last_folder(first)
    file = folder / "adapter_model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].replace(b"base_model.model.model.", b"base_model.model.language_model.")
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["files"]:
        entry["sha256"] = hashlib.sha256((folder / entry["path"]).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    second = trained(make_job(onto=goes_on(first) if how == "goes on" else stands_on(first, "merge")))
    assert ended(second) == "platform_fault"
    assert not second.steps
    assert "language_model.layers.0." in caplog.text
