"""What must hold before a run may call itself a success."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finery.types.methods import FullWeights, LoraAdapter
from finery_gpu_workers import run
from finery_gpu_workers.methods import gates
from finery_gpu_workers.models.load import load_model
from finery_gpu_workers.optim import FlatParameters
from finery_protos.v1 import worker_pb2 as pb

from .conftest import MakeJob, chat_rows, ended, trained

LAYERS = [f"model.layers.{n}.self_attn.{name}" for n in range(2) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
LAYERS += [f"model.layers.{n}.mlp.{name}" for n in range(2) for name in ("gate_proj", "up_proj", "down_proj")]


def test_trained_modules_are_those_asked_for(tiny_folder: Path) -> None:
    model = load_model(tiny_folder, device="cpu", dtype=torch.float32)
    gates.check_modules(model, LoraAdapter(), LAYERS)
    saved = LoraAdapter(targets=("v_proj",), modules_to_save=("embed_tokens",))
    some = ["model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.v_proj", "model.embed_tokens"]
    gates.check_modules(model, saved, some)
    for wrong in (some[1:], [*some, "lm_head"], []):
        with pytest.raises(RuntimeError, match="trained modules: expected 3"):
            gates.check_modules(model, saved, wrong)
    norms = [f"model.layers.{n}.{name}_layernorm" for n in range(2) for name in ("input", "post_attention")]
    gates.check_modules(model, FullWeights(type="full"), [*LAYERS, *norms, "model.embed_tokens", "model.norm"])


def test_a_module_without_any_gradient_is_found() -> None:
    """After one step the first low-rank matrix has none yet, as the second one began as zero."""
    names = [f"{module}.lora_{side}" for module in ("a.q_proj", "a.v_proj") for side in "AB"]
    assert gates.without_gradient(names, [], 9) == []
    assert gates.without_gradient(names, ["a.q_proj.lora_A", "a.v_proj.lora_A"], 9) == []
    assert gates.without_gradient(names, ["a.v_proj.lora_A", "a.v_proj.lora_B"], 9) == ["a.v_proj"]
    assert gates.without_gradient(["a.weight", "a.bias"], ["a.bias"], 9) == []
    # Rows of two tokens: one key to attend to.
    assert gates.without_gradient(names, names, 2) == ["a.v_proj"]


def test_a_part_of_the_adapter_that_is_cut_off_is_a_fault(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss falls all the same."""
    control = make_job(epochs=2)
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    made = FlatParameters.__init__

    def cut_off(self: FlatParameters, initial: Any, device: Any) -> None:
        made(self, initial, device)
        for name in [name for name in self.views if name.startswith("model.layers.1.mlp.up_proj")]:
            self.views[name].register_hook(torch.zeros_like)

    monkeypatch.setattr(FlatParameters, "__init__", cut_off)
    run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    assert ended(control) == "platform_fault"
    assert not any(checkpoint.final for checkpoint in control.checkpoints)


@pytest.mark.parametrize("early", [False, True])
def test_a_row_that_is_lost_on_the_way_is_a_fault(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """A loop that lost a row would still show a falling loss. No final checkpoint is published, so nobody is billed."""
    stopping = {"early_stopping_patience": 1, "early_stopping_min_delta": 50.0} if early else {}
    control = make_job(epochs=1, validation=chat_rows(2), eval_every=2, **stopping)
    run.main(control.attempt(pb.ATTEMPT_KIND_PREPARE))
    assert control.prepared is not None
    total, evaluated = control.prepared.total_steps, len(chat_rows(2))

    def losing(rows: Any, lengths: Any, limit: int) -> list[Any]:
        return [rows[:1]] if len(rows) > 1 and not np.array_equal(rows, np.arange(evaluated)) else [rows]

    monkeypatch.setattr("finery_gpu_workers.methods.objective.micro_batches", losing)
    run.main(control.attempt(pb.ATTEMPT_KIND_TRAIN))
    assert ended(control) == "platform_fault"
    assert not control.checkpoints
    assert control.step < total


@pytest.mark.parametrize("behind", [[], [7], [7, 8, 9]])
def test_rows_whose_second_token_alone_is_trained_train(make_job: MakeJob, behind: list[int]) -> None:
    """Queries and keys get no gradient there, however long the rows are, and that is right."""
    labels = [-100] * len(behind)
    rows = [{"input_ids": [n, n + 1, *behind], "labels": [-100, n + 1, *labels]} for n in range(1, 9)]
    control = trained(make_job(rows, max_steps=3))
    assert ended(control) == "completed"
