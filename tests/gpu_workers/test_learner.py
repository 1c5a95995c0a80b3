"""The learner: against transformers + PEFT + torch.optim, and against itself after a resume."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor
from transformers import AutoModelForCausalLM

from finery.types.methods import LoraAdapter, SftHyperparameters
from finery_gpu_workers.batch import PackedBatch, pack
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.models.load import load_model
from finery_testing.tiny import make_tiny_model

torch.set_num_threads(1)

Row = tuple[list[int], list[float]]
ADAPTER = LoraAdapter(rank=4, alpha=8)
HYPER = SftHyperparameters(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.05)
RATE = 1e-2


def rows(count: int, seed: int, longest: int = 30) -> list[Row]:
    """Rows that repeat themselves, so that there is something to learn; a prompt without loss, then an answer."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(6, longest, (1,), generator=generator))
        word = torch.randint(97, 110, (3,), generator=generator).tolist()
        prompt = int(torch.randint(1, length - 2, (1,), generator=generator))
        made.append(((word * length)[:length], [0.0] * prompt + [1.0] * (length - prompt)))
    return made


def scored(some: Sequence[Row]) -> int:
    return sum(int(sum(w > 0 for w in weights[1:])) for _, weights in some)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def learner(folder: Path, hyper: SftHyperparameters = HYPER, seed: int = 1) -> Learner:
    model = load_model(folder, device="cpu", dtype=torch.float32)
    return Learner.create(model, ADAPTER, hyper, seed=seed)


def gradient(one: Learner) -> Tensor:
    return one._parameters.gradients.clone()


def train(one: Learner, steps: range) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of every step."""
    losses, norms = [], []
    for step in steps:
        some = rows(6, seed=step)
        result = one.forward_backward(pack(some), scored(some))
        losses.append(result.loss_sum / result.tokens)
        stats = one.optim_step(RATE)
        assert stats.finite
        norms.append(stats.grad_norm)
    return losses, norms


def peer_curve(folder: Path, adapter: Path, steps: range) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of every step, from transformers + PEFT, one unpadded row at a time."""
    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), adapter, is_trainable=True
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=HYPER.weight_decay)
    losses, norms = [], []
    for step in steps:
        some = rows(6, seed=step)
        total = 0.0
        for tokens, weights in some:
            ids = torch.tensor([tokens])
            labels = torch.where(torch.tensor([weights]) > 0, ids, -100)
            logits = model(ids).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits, labels[0, 1:], reduction="sum", ignore_index=-100
            ) / scored(some)
            loss.backward()
            total += float(loss.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, HYPER.max_grad_norm or math.inf)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


def test_the_loss_curve_equals_that_of_transformers_and_peft(folder: Path, tmp_path: Path) -> None:
    ours = learner(folder)
    ours.save(tmp_path / "start", base_model="tiny", source=folder)
    losses, norms = train(ours, range(20))
    expected, expected_norms = peer_curve(folder, tmp_path / "start", range(20))
    assert losses == pytest.approx(expected, rel=2e-4)
    assert norms == pytest.approx(expected_norms, rel=2e-3)
    assert expected[-1] < 0.8 * expected[0], "a curve that does not fall would prove little"
    assert min(norms) > (HYPER.max_grad_norm or 0), "clipping was never exercised"


def test_packing_changes_neither_loss_nor_gradient(folder: Path) -> None:
    some = rows(5, seed=3)
    together, apart = learner(folder), learner(folder)
    whole = together.forward_backward(pack(some), scored(some))
    parts = [apart.forward_backward(pack([row]), scored(some)) for row in some]
    assert whole.tokens == sum(p.tokens for p in parts) == scored(some)
    assert whole.loss_sum == pytest.approx(sum(p.loss_sum for p in parts), rel=1e-5)
    one, other = gradient(together), gradient(apart)
    assert float((one - other).norm() / other.norm()) <= 1e-5
    assert float(other.norm()) > 0


def test_a_row_of_weight_0_changes_neither_loss_nor_gradient(folder: Path) -> None:
    some = rows(2, seed=3)
    silent = ([5] * 9, [0.0] * 9)
    with_it, without = learner(folder), learner(folder)
    assert with_it.forward_backward(pack([silent, *some]), scored(some)).tokens == scored(some)
    without.forward_backward(pack(some), scored(some))
    torch.testing.assert_close(gradient(with_it), gradient(without), rtol=1e-5, atol=1e-8)
    assert with_it.forward_backward(pack([silent]), 1).tokens == 0


def test_logits_in_chunks_give_the_same_loss_and_gradient(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = rows(5, seed=3)
    whole, chunked = learner(folder), learner(folder)
    one = whole.forward_backward(pack(some), scored(some))
    monkeypatch.setattr("finery_gpu_workers.scoring._LOGITS_AT_ONCE", 261 * 7)
    other = chunked.forward_backward(pack(some), scored(some))
    assert one.tokens == other.tokens
    assert other.loss_sum == pytest.approx(one.loss_sum, rel=1e-6)
    torch.testing.assert_close(gradient(whole), gradient(chunked), rtol=1e-4, atol=1e-8)


def test_evaluation_equals_the_training_loss_and_leaves_no_gradient(folder: Path) -> None:
    some = rows(4, seed=5)
    one = learner(folder)
    found = one.evaluate(pack(some))
    assert not gradient(one).any()
    trained = one.forward_backward(pack(some), scored(some))
    assert found.tokens == trained.tokens
    assert found.loss_sum == pytest.approx(trained.loss_sum, rel=1e-6)
    assert one.evaluate(pack([([1, 2], [0.0, 0.0])])).tokens == 0


def test_two_runs_are_equal_bit_for_bit(folder: Path) -> None:
    states = []
    for _ in range(2):
        one = learner(folder)
        train(one, range(5))
        states.append(one.state())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_d01_resumed_equals_uninterrupted_bit_for_bit(folder: Path) -> None:
    straight, first = learner(folder), learner(folder)
    train(straight, range(9))
    train(first, range(4))
    # Through safetensors, as in a resume bundle; into a learner that has another past.
    stored = load(save(first.state()))
    second = learner(folder, seed=77)
    train(second, range(20, 22))
    second.load_state(stored)
    train(second, range(4, 9))
    expected, found = straight.state(), second.state()
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert int(expected["steps"]) == 9


def test_a_state_is_a_copy(folder: Path) -> None:
    one = learner(folder)
    state = one.state()
    before = {name: value.clone() for name, value in state.items()}
    train(one, range(1))
    assert all(torch.equal(value, before[name]) for name, value in state.items())


def test_a_state_of_another_adapter_is_refused_by_name_and_changes_nothing(folder: Path) -> None:
    one = learner(folder)
    before = one.state()
    wrong = one.state()
    name = "master.model.layers.0.mlp.down_proj.lora_A"
    wrong[name] = torch.zeros(3, 64)
    with pytest.raises(ValueError, match=name):
        one.load_state(wrong)
    del wrong[name]
    with pytest.raises(ValueError, match=name):
        one.load_state(wrong)
    assert all(torch.equal(value, before[name]) for name, value in one.state().items())


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_non_finite_loss_or_gradient_changes_nothing(folder: Path, poison: float) -> None:
    hurt, well = learner(folder), learner(folder)
    train(hurt, range(2))
    train(well, range(2))
    before = hurt.state()
    batch = pack(rows(2, seed=1))
    weights = batch.weights.clone()
    weights[weights.nonzero()[0]] = poison
    hurt.forward_backward(
        PackedBatch(batch.tokens, batch.positions, batch.targets, weights, batch.lengths), denominator=5
    )
    stats = hurt.optim_step(RATE)
    assert not stats.finite
    assert not math.isfinite(stats.grad_norm)
    assert all(torch.equal(value, before[name]) for name, value in hurt.state().items())
    # And nothing of it lingers: the next step is that of a learner which never saw it.
    train(hurt, range(2, 4))
    train(well, range(2, 4))
    assert all(torch.equal(value, well.state()[name]) for name, value in hurt.state().items())


def test_an_adapter_goes_on_from_a_checkpoint_with_a_fresh_optimizer(folder: Path, tmp_path: Path) -> None:
    one = learner(folder)
    train(one, range(3))
    one.save(tmp_path / "adapter", base_model="tiny", source=folder)
    other = learner(folder, seed=8)
    other.load_adapter(tmp_path / "adapter")
    batch = pack(rows(3, seed=50))
    assert other.evaluate(batch).loss_sum == one.evaluate(batch).loss_sum
    assert int(other.state()["steps"]) == 0


def test_a_base_in_bf16_trains_float32_masters_near_the_float32_curve(folder: Path) -> None:
    curves = []
    for dtype in (torch.float32, torch.bfloat16):
        decoder = load_model(folder, device="cpu", dtype=dtype)
        one = Learner.create(decoder, ADAPTER, HYPER, seed=1)
        curves.append(train(one, range(12))[0])
        assert one.state()["master.model.layers.0.mlp.down_proj.lora_A"].dtype == torch.float32
    assert curves[1] == pytest.approx(curves[0], rel=0.02)
    assert curves[1] != curves[0]
