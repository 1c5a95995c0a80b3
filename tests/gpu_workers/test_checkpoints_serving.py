"""What the manifest says about serving, and that an adapter which was trained changes the model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from finery.types.methods import FullWeights, LoraAdapter

from .cards import logits_of, run_card
from .conftest import MakeJob, last_folder, last_manifest, trained

IDS = list(b"What is 2 plus 2?")


def facts(make_job: MakeJob, adapter: Any, **spec: Any) -> dict[str, Any]:
    content = last_manifest(trained(make_job(adapter=adapter, spec=spec, max_steps=1)))
    names = ("servable_as_adapter", "max_rank_required", "reason", "merged_export")
    return {name: content[name] for name in names if name in content}


@pytest.mark.parametrize("rank", [8, 128])
def test_d09_plain_adapters_are_servable_at_their_rank(make_job: MakeJob, rank: int) -> None:
    assert facts(make_job, LoraAdapter(rank=rank)) == {"servable_as_adapter": True, "max_rank_required": rank}


def test_d09_whole_matrices_are_not_and_a_merged_export_is_offered(make_job: MakeJob) -> None:
    adapter = LoraAdapter(rank=8, modules_to_save=("lm_head",))
    refused = {"servable_as_adapter": False, "max_rank_required": 8, "reason": "modules_to_save=[lm_head]"}
    assert facts(make_job, adapter) == refused | {"merged_export": "`export_merged: true`"}
    offered = facts(make_job, adapter, export_merged=True)
    assert offered == refused | {"merged_export": "`merged/` of the final checkpoint"}


def test_d09_a_whole_model_is_served_as_one(make_job: MakeJob) -> None:
    assert facts(make_job, FullWeights(type="full"))["servable_as_adapter"] is False


def test_d09_keys_are_those_that_servers_read(make_job: MakeJob, tiny_folder: Path) -> None:
    folder = last_folder(trained(make_job(adapter=LoraAdapter(rank=8), max_steps=1)))
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        keys = sorted(file.keys())
    modules = {name for name, _ in AutoModelForCausalLM.from_pretrained(tiny_folder).named_modules()}
    for key in keys:
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", key)
        assert match, key
        assert match[1] in modules
    assert len(keys) == 2 * 2 * 7


def test_d10_a_trained_adapter_changes_what_the_model_answers(make_job: MakeJob, tiny_folder: Path) -> None:
    folder = last_folder(trained(make_job(epochs=1)))
    adapted = logits_of(run_card(folder, base=tiny_folder)["model"], IDS)
    base = logits_of(AutoModelForCausalLM.from_pretrained(tiny_folder), IDS)
    assert float((adapted - base).abs().max()) > 0.01
    assert torch.isfinite(adapted).all()
