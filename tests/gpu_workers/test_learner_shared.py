"""Prefixes that are computed once, and losses of log-probs: the same numbers as rows apart, and as transformers has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from finery.types.methods import Adapter, FullWeights, LoraAdapter, SftHyperparameters
from finery_gpu_workers.batch import PackedBatch, SharedRows, pack, pack_shared
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.models.load import load_model
from finery_testing.tiny import make_tiny_model

torch.set_num_threads(1)

HYPER = SftHyperparameters(learning_rate=1e-2, max_grad_norm=None)
LORA = LoraAdapter(rank=4, alpha=8, modules_to_save=("embed_tokens",))


def draw(length: int, generator: torch.Generator) -> list[int]:
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def groups(seed: int = 0) -> list[SharedRows]:
    """Prompts of 1 to 150 tokens, answers of unequal lengths, some with tokens that do not count."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(40, (3, 17, 9)), (1, (4, 6)), (2, (1, 5)), (150, (140, 131, 30)), (9, (8, 8))]
    made = []
    for prompt, lengths in shapes:
        weights = [[float(n % 5 != 3) for n in range(length)] for length in lengths]
        answers = [(draw(length, generator), w) for length, w in zip(lengths, weights, strict=True)]
        made.append(SharedRows(draw(prompt, generator), answers))
    return made


def rows_of(some: list[SharedRows]) -> list[tuple[list[int], list[float]]]:
    return [([*g.prompt, *a], [0.0] * len(g.prompt) + [*w]) for g in some for a, w in g.answers]  # type: ignore[misc, arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("shared") / "model")


def learner(folder: Path, adapter: Adapter = LORA) -> Learner:
    one = Learner.create(load_model(folder, device="cpu", dtype=torch.float32), adapter, HYPER, seed=1)
    batch = pack(rows_of(groups(seed=9)))
    for _ in range(2):  # B is no longer 0, so that A gets a gradient too
        one.forward_backward(batch, batch.scored)
        one.optim_step(1e-2)
    return one


def gradient(one: Learner) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in one._parameters.named(one._parameters.gradients).items()}


def curved(log_probs: Tensor) -> Tensor:
    """Depends on every log-prob in its own way."""
    factors = torch.linspace(-1.0, 2.0, len(log_probs))
    return (factors * log_probs.exp()).sum() + (log_probs * factors.flip(0)).square().mean()


@pytest.mark.parametrize("adapter", [LORA, FullWeights(type="full")], ids=["lora", "full"])
def test_a_shared_prefix_gives_the_loss_and_every_gradient_of_rows_apart(folder: Path, adapter: Adapter) -> None:
    one, shared, apart = learner(folder, adapter), pack_shared(groups()), pack(rows_of(groups()))
    assert sum(shared.lengths) < 0.6 * sum(apart.lengths)
    found = []
    for batch in (shared, apart, shared.expanded()):
        assert batch.scored_counts == apart.scored_counts
        sums = one.forward_backward(batch, 1)
        weighted = gradient(one)
        one._parameters.gradients.zero_()
        log_probs = one.forward_backward_with(batch, curved)
        found.append((sums.loss_sum, weighted, log_probs, gradient(one)))
        one._parameters.gradients.zero_()
    expected = found[1]
    for other in (found[0], found[2]):
        assert other[0] == pytest.approx(expected[0], rel=1e-6)
        torch.testing.assert_close(other[2], expected[2], rtol=1e-5, atol=1e-5)
        for mine, theirs in ((other[1], expected[1]), (other[3], expected[3])):
            for name, value in theirs.items():
                assert value.any(), name
                torch.testing.assert_close(mine[name], value, rtol=1e-3, atol=2e-5 * float(value.abs().max()), msg=name)


def test_log_probs_are_those_of_transformers_at_any_temperature(folder: Path) -> None:
    one = Learner.create(load_model(folder, device="cpu", dtype=torch.float32), LORA, HYPER, seed=1)
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for temperature in (1.0, 0.7):
        expected = []
        with torch.no_grad():
            for tokens, weights in rows_of(groups()):
                logits = net(torch.tensor([tokens])).logits[0, :-1].double() / temperature
                picked = logits.log_softmax(-1)[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
                expected.append(picked[torch.tensor(weights[1:]) > 0])
        found = one.log_probs(pack_shared(groups()), temperature)
        torch.testing.assert_close(found, torch.cat(expected).float(), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_loss_of_log_probs_is_that_of_autograd(folder: Path) -> None:
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    one = Learner.create(load_model(folder, device="cpu", dtype=torch.float32), FullWeights(type="full"), HYPER, seed=1)
    parts = []
    for tokens, weights in rows_of(groups()):
        logits = net(torch.tensor([tokens])).logits[0, :-1] / 0.7
        picked = logits.log_softmax(-1)[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
        parts.append(picked[torch.tensor(weights[1:]) > 0])
    curved(torch.cat(parts)).backward()
    one.forward_backward_with(pack_shared(groups()), curved, temperature=0.7)
    found, peers = gradient(one), dict(net.named_parameters())
    assert found.keys() == peers.keys()
    for name, value in found.items():
        peer = peers[name].grad
        assert peer is not None
        torch.testing.assert_close(value, peer, rtol=1e-3, atol=2e-5 * float(peer.abs().max()), msg=name)


@pytest.mark.parametrize("kept", [0, 261 * 4 * 100])
def test_chunks_of_logits_kept_or_computed_again_change_nothing(
    folder: Path, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, batch = learner(folder), pack_shared(groups())
    expected = one.forward_backward_with(batch, curved), gradient(one)
    one._parameters.gradients.zero_()
    monkeypatch.setattr("finery_gpu_workers.scoring._LOGITS_AT_ONCE", 261 * 33)
    monkeypatch.setattr("finery_gpu_workers.scoring._KEPT_BYTES", kept)
    torch.testing.assert_close(one.forward_backward_with(batch, curved), expected[0], rtol=1e-6, atol=1e-6)
    for name, value in gradient(one).items():
        torch.testing.assert_close(value, expected[1][name], rtol=1e-3, atol=2e-5 * float(value.abs().max()), msg=name)


@pytest.mark.parametrize("adapter", [LORA, FullWeights(type="full")], ids=["lora", "full"])
def test_b09_the_reference_never_moves_and_leaves_no_trace(folder: Path, adapter: Adapter) -> None:
    one, batch = learner(folder, adapter), pack_shared(groups())
    start = one.log_probs(batch)
    one.keep_reference()
    for step in range(3):
        one.forward_backward_with(batch, curved)
        assert one.optim_step(1e-2).finite
        assert one.version == 3 + step
        moved, state = one.log_probs(batch), one.state()
        with one.reference():
            assert torch.equal(one.log_probs(batch), start)
        assert not torch.equal(moved, start)
        assert torch.equal(one.log_probs(batch), moved)
        assert all(torch.equal(value, state[name]) for name, value in one.state().items())


def test_without_a_reference_that_was_kept_there_is_none(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="none"), learner(folder).reference():
        pass


def test_a_row_is_as_long_as_what_it_sees(tmp_path: Path) -> None:
    sliding: dict[str, Any] = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 2048}
    folder = make_tiny_model(tmp_path / "m", **sliding)
    model = load_model(folder, device="cpu", dtype=torch.float32)
    batch = pack_shared([SharedRows([1] * 2000, [([2] * 49, [1.0] * 49)])])
    assert max(batch.lengths) < 2048
    with pytest.raises(WorkerError, match="found 2049"):
        model.forward(batch.tokens, batch.positions, batch.lengths, batch.parents)


def test_what_a_batch_says_of_parents_is_checked() -> None:
    good = pack_shared([SharedRows([1, 2, 3], [([4, 5], [1.0, 1.0])])])
    assert good.lengths == (2, 3)
    assert good.parents == (-1, 0)
    assert good.positions.tolist() == [0, 1, 2, 3, 4]
    assert good.targets[good.weights > 0].tolist() == [4, 5]
    assert pack_shared([SharedRows([1], [([4, 5], [1.0, 1.0])])]).parents == ()
    parts = good.tokens, good.positions, good.targets
    for parents in ((-1,), (0, -1), (1, -1), (-1, 1)):
        with pytest.raises(ValueError, match="parents"):
            PackedBatch(*parts, good.weights, good.lengths, parents)
    weights = good.weights.clone()
    weights[0] = 1.0
    with pytest.raises(ValueError, match="in a parent"):
        PackedBatch(*parts, weights, good.lengths, good.parents)
    bare = pack_shared([SharedRows([], [([4, 5], [1.0, 1.0]), ([6], [1.0])])])
    assert (bare.parents, bare.lengths, bare.scored_counts) == ((), (2, 1), (1, 0))
