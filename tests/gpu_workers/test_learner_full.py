"""All weights, and whole matrices next to an adapter: against transformers, PEFT and torch.optim."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from finery.types.methods import FullWeights, LoraAdapter, SftHyperparameters
from finery_gpu_workers.batch import pack
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.models.load import load_model
from finery_testing.tiny import make_tiny_model

torch.set_num_threads(1)

Row = tuple[list[int], list[float]]
HYPER = SftHyperparameters(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5)
FULL = FullWeights(type="full")
RATE = 3e-3
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def rows(count: int, seed: int) -> list[Row]:
    """A prompt without loss, then an answer; lengths differ, and tokens come more than once."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(6, 40, (1,), generator=generator))
        prompt = int(torch.randint(1, length - 2, (1,), generator=generator))
        tokens = torch.randint(97, 110, (length,), generator=generator).tolist()
        made.append((tokens, [0.0] * prompt + [1.0] * (length - prompt)))
    return made


def scored(some: Sequence[Row]) -> int:
    return sum(int(sum(weights[1:])) for _, weights in some)


def learner(folder: Path, adapter: FullWeights | LoraAdapter = FULL, dtype: torch.dtype = torch.float32) -> Learner:
    return Learner.create(load_model(folder, (), device="cpu", dtype=dtype), adapter, HYPER, seed=1)


def gradients(one: Learner) -> dict[str, Tensor]:
    return {name: part.clone() for name, part in one._parameters.named(one._parameters.gradients).items()}


def peer_loss(model: nn.Module, some: Sequence[Row]) -> Tensor:
    """One unpadded row at a time."""
    total = torch.zeros(())
    for tokens, weights in some:
        ids = torch.tensor([tokens])
        labels = torch.where(torch.tensor([weights]) > 0, ids, -100)
        logits = model(ids).logits[0, :-1].float()
        total = total + nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum", ignore_index=-100)
    return total / scored(some)


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float(value.norm()) > 0, name
        assert float((found[name] - value).norm() / value.norm()) <= tolerance, name


@pytest.fixture(params=[{}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return make_tiny_model(tmp_path / "model", 3, **request.param)


def test_full_gradients_equal_those_of_transformers_name_by_name(folder: Path) -> None:
    some = rows(5, seed=0)
    ours = learner(folder)
    found = ours.forward_backward(pack(some), scored(some))
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss = peer_loss(peer, some)
    loss.backward()
    assert found.loss_sum / found.tokens == pytest.approx(float(loss), rel=1e-5)
    assert_close(gradients(ours), {name: p.grad for name, p in peer.named_parameters()}, 1e-5)


def test_full_gradients_of_a_packed_batch_are_those_of_its_rows_alone(folder: Path) -> None:
    some = rows(6, seed=4)
    together, apart = learner(folder), learner(folder)
    whole = together.forward_backward(pack(some), scored(some))
    parts = [apart.forward_backward(pack([row]), scored(some)) for row in some]
    assert whole.loss_sum == pytest.approx(sum(part.loss_sum for part in parts), rel=1e-5)
    assert_close(gradients(together), gradients(apart), 1e-5)


def test_full_training_follows_transformers_and_torchs_adamw(folder: Path) -> None:
    ours = learner(folder)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in peer.parameters():
        kinds[parameter.ndim >= 2].append(parameter)
    groups = [{"params": kinds[True], "weight_decay": 0.1}, {"params": kinds[False], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    losses, expected = [], []
    for step in range(10):
        some = rows(4, seed=step)
        found = ours.forward_backward(pack(some), scored(some))
        losses.append(found.loss_sum / found.tokens)
        stats = ours.optim_step(RATE)
        loss = peer_loss(peer, some)
        loss.backward()
        expected.append(float(loss.detach()))
        norm = torch.nn.utils.clip_grad_norm_(peer.parameters(), HYPER.max_grad_norm or math.inf)
        assert stats.grad_norm == pytest.approx(float(norm), rel=1e-3)
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < 0.8 * expected[0], "a curve that does not fall would prove little"
    assert ours.without_gradient() == []


def test_what_is_trained_is_counted_once_and_named_as_in_transformers(folder: Path) -> None:
    ours = learner(folder)
    peer = AutoModelForCausalLM.from_pretrained(folder)
    assert ours.kind == "full"
    assert ours.trained.parameters == sum(p.numel() for p in peer.parameters())
    assert set(ours.trained.modules) == {name.rpartition(".")[0] for name, _ in peer.named_parameters()}
    assert set(ours.without_gradient()) == {name for name, _ in peer.named_parameters()}


def test_bf16_working_copies_round_float32_masters_that_keep_small_steps(folder: Path) -> None:
    ours = learner(folder, dtype=torch.bfloat16)
    start = ours.state()
    some = rows(4, seed=0)
    for _ in range(3):
        ours.forward_backward(pack(some), scored(some))
        ours.optim_step(1e-5)
    state, weights = ours.state(), dict(ours._model.named_weights())
    for name, weight in weights.items():
        master = state[f"master.{name}"]
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, master.bfloat16()), name
        assert not torch.equal(master, start[f"master.{name}"]), name
    # Steps of 1e-5 are far below the distance of bf16 numbers near 1.
    norm = "master.model.norm.weight"
    assert not torch.equal(state[norm], state[norm].bfloat16().float())


def test_gradients_of_micro_batches_in_bf16_add_up_in_float32(folder: Path) -> None:
    some = rows(8, seed=2)
    ours = learner(folder, dtype=torch.bfloat16)
    expected: dict[str, Tensor] = {}
    for row in some:
        alone = learner(folder, dtype=torch.bfloat16)
        alone.forward_backward(pack([row]), scored(some))
        ours.forward_backward(pack([row]), scored(some))
        expected = {name: expected.get(name, 0) + part for name, part in gradients(alone).items()}
    assert_close(gradients(ours), expected, 1e-6)


def test_d01_full_weights_resume_bit_for_bit(folder: Path) -> None:
    def train(one: Learner, steps: range) -> None:
        for step in steps:
            some = rows(3, seed=step)
            one.forward_backward(pack(some), scored(some))
            one.optim_step(RATE)

    straight, first, second = (learner(folder, dtype=torch.bfloat16) for _ in range(3))
    train(straight, range(5))
    train(first, range(2))
    train(second, range(20, 22))
    second.load_state(load(save(first.state())))
    train(second, range(2, 5))
    expected, found = straight.state(), second.state()
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


SAVED: list[tuple[tuple[str, ...], bool]] = [
    (("embed_tokens", "lm_head"), True),
    (("embed_tokens", "lm_head"), False),
    (("lm_head",), True),
    (("lm_head",), False),
    (("embed_tokens",), False),
]


@pytest.mark.parametrize(("saved", "tied"), SAVED)
def test_whole_matrices_next_to_an_adapter_train_as_pefts_do(
    tmp_path: Path, saved: tuple[Any, ...], tied: bool
) -> None:
    folder = make_tiny_model(tmp_path / "model", 3, tie_word_embeddings=tied)
    ours = learner(folder, LoraAdapter(rank=4, alpha=8, modules_to_save=saved))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", modules_to_save=list(saved))
    peer = peft.get_peft_model(base, config)
    views = ours._parameters.named(ours._parameters.values)
    parameters = {_plain(name): p for name, p in peer.named_parameters() if p.requires_grad}
    assert views.keys() == parameters.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(views[name])
    optimizer = torch.optim.AdamW(parameters.values(), lr=RATE, weight_decay=HYPER.weight_decay)
    for step in range(4):
        some = rows(4, seed=step)
        found = ours.forward_backward(pack(some), scored(some))
        loss = peer_loss(peer, some)
        loss.backward()
        assert found.loss_sum / found.tokens == pytest.approx(float(loss), rel=1e-5)
        if step:  # before that, every gradient of a lora_A is zero
            assert_close(gradients(ours), {name: p.grad for name, p in parameters.items()}, 1e-4)
        ours.optim_step(RATE)
        torch.nn.utils.clip_grad_norm_(parameters.values(), HYPER.max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()
    assert ours.without_gradient() == []
    assert ours.kind == "adapter"
    assert ours.trained.parameters == sum(p.numel() for p in parameters.values())


def test_a_tied_matrix_that_is_saved_as_embedding_stays_one(tmp_path: Path) -> None:
    """Against transformers, whose tied matrix is one parameter: it alone is trained there, all else is frozen."""
    folder = make_tiny_model(tmp_path / "model", 3)
    ours = learner(folder, LoraAdapter(rank=4, alpha=8, modules_to_save=("embed_tokens",)))
    some = rows(4, seed=0)
    ours.forward_backward(pack(some), scored(some))
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peer_loss(peer, some).backward()
    found = gradients(ours)
    assert HEAD not in found
    assert_close({EMBEDDING: found[EMBEDDING]}, {EMBEDDING: peer.get_input_embeddings().weight.grad}, 1e-5)


def _plain(name: str) -> str:
    """PEFT's name of a trained parameter → ours."""
    name = name.removeprefix("base_model.model.")
    return name.replace(".modules_to_save.default", "").replace(".default.weight", "")
