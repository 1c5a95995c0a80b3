"""Whole models: all weights trained, or an adapter merged. Loaded by transformers, with the lines of the card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from finery.types.methods import FullWeights, LoraAdapter
from finery_testing.control_plane import FakeControlPlane
from finery_testing.tiny import make_tiny_model

from .cards import Spy, logits_of, run_card
from .conftest import MakeJob, chat_rows, ended, last_folder, last_manifest, trained

FULL = FullWeights(type="full")
IDS = list(b"What is 2 plus 2?")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


def unique_parameters(model: Any) -> int:
    """A tied matrix counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def job(make_job: MakeJob, tmp_path: Path, adapter: Any, *, merged: bool = False, **base: Any) -> FakeControlPlane:
    model = make_tiny_model(tmp_path / "base", **base)
    spec = {"export_merged": merged}
    control = trained(make_job(model=model, adapter=adapter, spec=spec, epochs=1, checkpoint_every=1000))
    assert ended(control) == "completed"
    return control


@pytest.mark.parametrize("tied", [True, False])
def test_d07_all_weights_are_stored_once_and_reload_as_they_were(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    spy = Spy(monkeypatch, IDS)
    control = job(make_job, tmp_path, FULL, tie_word_embeddings=tied)
    folder, content = last_folder(control), last_manifest(control)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in stored(folder)) is not tied
    names = run_card(folder)
    assert torch.allclose(logits_of(names["model"], IDS), spy.logits, atol=1e-5)
    assert content["parameters"] == content["trained_parameters"] == unique_parameters(names["model"])
    assert content["kind"] == control.checkpoints[-1].kind == "full"
    assert names["tokenizer"].decode(IDS) == "What is 2 plus 2?"
    assert not (folder / "adapter_config.json").exists()


@pytest.mark.parametrize(("tied", "head"), [(True, False), (False, False), (True, True)])
def test_d07_a_merged_export_stores_what_was_trained(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, head: bool
) -> None:
    """A tied model whose output matrix was trained is tied no more: the flag says so, and both are stored."""
    spy = Spy(monkeypatch, IDS)
    adapter = LoraAdapter(rank=4, alpha=8.0, modules_to_save=("lm_head",) if head else ())
    control = job(make_job, tmp_path, adapter, merged=True, tie_word_embeddings=tied)
    folder, content = last_folder(control) / "merged", last_manifest(control)
    still_tied = tied and not head
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is still_tied is content["tied"]
    assert ("lm_head.weight" in stored(folder)) is not still_tied
    names = run_card(last_folder(control), 1)
    assert torch.allclose(logits_of(names["model"], IDS), spy.logits, atol=1e-5)
    assert content["merged_parameters"] == unique_parameters(names["model"])
    again = run_card(last_folder(control), base=control.model)
    assert torch.allclose(logits_of(again["model"], IDS), spy.logits, atol=1e-5)


def test_d08_a_merge_is_rounded_once_in_the_training_dtype(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finery_gpu_workers.models.load._multiplies_bf16_fast", lambda _: True)
    control = job(make_job, tmp_path, LoraAdapter(rank=2, alpha=8.0), merged=True, dtype="bfloat16")
    folder, content = last_folder(control), last_manifest(control)
    assert content["merge_dtype"] == content["compute"]["dtype"] == "bfloat16"
    base, merged = stored(control.model), stored(folder / "merged")
    adapter = load_file(folder / "adapter_model.safetensors")
    assert base.keys() == merged.keys()
    changed = 0
    for name, weight in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        expected = weight
        if f"{module}.lora_A.weight" in adapter:
            down, up = (adapter[f"{module}.lora_{side}.weight"] for side in "AB")
            assert up.abs().max() > 0
            expected = (weight.float() + 8.0 / 2 * (up @ down)).to(torch.bfloat16)
            changed += 1
        assert merged[name].dtype == torch.bfloat16
        assert torch.equal(merged[name], expected), name
    assert changed == 2 * 7


def test_d08_merged_and_adapted_models_answer_alike(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, on 8 prompts, after a training that makes answers clear."""
    monkeypatch.setattr("finery_gpu_workers.models.load._multiplies_bf16_fast", lambda _: True)
    model = make_tiny_model(tmp_path / "base", dtype="bfloat16")
    control = trained(
        make_job(
            model=model, adapter=LoraAdapter(rank=2, alpha=8.0), spec={"export_merged": True}, epochs=10,
            learning_rate=2e-2, checkpoint_every=1000,
        )
    )  # fmt: skip
    folder = last_folder(control)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16")
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    assert merged.dtype == torch.bfloat16
    rows = [*chat_rows(7), {"messages": [{"role": "user", "content": "Hello"}]}]
    prompts = [
        tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_tensors="pt")
        for row in rows
    ]
    before = [plain.generate(**prompt, max_new_tokens=6, do_sample=False).tolist() for prompt in prompts]
    adapted = PeftModel.from_pretrained(plain, folder)
    answers = [
        [each.generate(**prompt, max_new_tokens=6, do_sample=False).tolist() for prompt in prompts]
        for each in (adapted, merged)
    ]
    assert answers[0] == answers[1]
    assert answers[0] != before


def test_no_merged_model_before_the_end_or_unasked(make_job: MakeJob) -> None:
    asked = trained(make_job(spec={"export_merged": True}, epochs=1, checkpoint_every=1))
    has = [any(file.path.startswith("merged/") for file in c.files) for c in asked.checkpoints]
    assert has == [False] * (len(has) - 1) + [True]
    assert len(has) > 1
    unasked = trained(make_job(epochs=1))
    assert not any(file.path.startswith("merged/") for file in unasked.checkpoints[-1].files)


def test_a_merged_model_has_all_it_needs_beside_its_weights(make_job: MakeJob) -> None:
    control = trained(make_job(spec={"export_merged": True}, max_steps=1))
    folder = last_folder(control)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / "merged" / name).read_bytes() == (folder / name).read_bytes()
