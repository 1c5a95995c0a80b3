"""The rollout engine with our decoder: what it draws is what the learner would say, whatever shares the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finery.types.methods import EmbeddingName, FullWeights, LoraAdapter, SftHyperparameters
from finery_gpu_workers.batch import pack
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.models.decoder import Decoder
from finery_gpu_workers.models.load import load_model
from finery_gpu_workers.rollout.cached import CachedDecoder, bytes_per_token
from finery_gpu_workers.rollout.engine import Engine
from finery_gpu_workers.rollout.types import Completion, Group, Sampling, Spent
from finery_testing.tiny import byte_tokenizer, make_tiny_model

torch.set_num_threads(1)

TOKENIZER = byte_tokenizer()
PROMPTS = [b"?", b"a longer prompt", b"of forty-one tokens, which pass a step", b"two", b"the quick brown fox"]
GROUPS = [Group(10 + n, tuple(text), tuple(range(100 * n, 100 * n + 4))) for n, text in enumerate(PROMPTS)]
SAMPLING = Sampling(max_new_tokens=37, temperature=0.8, stop_ids=frozenset({3, 77, 200}))
ByPlace = dict[tuple[int, int], Completion]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return load(folder)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    loaded = load_model(folder, device="cpu", dtype=dtype)
    assert isinstance(loaded, Decoder)
    return loaded


def text_of(tokens: Sequence[int]) -> str:
    text: str = TOKENIZER.decode(list(tokens), skip_special_tokens=True)
    return text


def engine(model: Any, max_rows: int = 32) -> Engine:
    return Engine(model, text_of=text_of, max_rows=max_rows)


def rollouts(model: Any, groups: Sequence[Group], sampling: Sampling = SAMPLING, max_rows: int = 32) -> ByPlace:
    found = list(engine(model, max_rows).generate(groups, sampling, 5))
    by_place = {(one.group, one.sample): one for one in found}
    assert by_place.keys() == {(group.key, n) for group in groups for n in range(len(group.seeds))}
    assert len(found) == len(by_place)
    return by_place


def assert_scored_alike(learner: Learner, groups: Sequence[Group], found: ByPlace, temperature: float) -> None:
    prompts = {group.key: group.prompt for group in groups}
    for (key, _), one in found.items():
        row = [*prompts[key], *one.tokens]
        expected = learner.log_probs(pack([(row, [0.0] * len(prompts[key]) + [1.0] * len(one.tokens))]), temperature)
        torch.testing.assert_close(torch.tensor(one.log_probs), expected, rtol=0, atol=1e-5)


def assert_same(found: ByPlace, expected: ByPlace) -> None:
    """Tokens exactly, log-probs up to rounding."""
    assert found.keys() == expected.keys()
    for place, one in found.items():
        assert (one.tokens, one.finish) == (expected[place].tokens, expected[place].finish)
        assert one.log_probs == pytest.approx(expected[place].log_probs, abs=1e-5)


def adapted(model: Decoder, *saved: EmbeddingName) -> Learner:
    """With an adapter that changes what is said."""
    adapter = LoraAdapter(rank=4, alpha=8, modules_to_save=saved)
    learner = Learner.create(model, adapter, SftHyperparameters(), seed=0)
    shake(learner)
    return learner


def shake(learner: Learner) -> None:
    for view in learner._parameters.views.values():
        view.detach().add_(0.2 * torch.randn(view.shape, generator=torch.Generator().manual_seed(len(view))))
    learner._tied_to.refresh()


@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.0, 2.0])
def test_log_probs_are_the_learners_at_that_temperature(folder: Path, temperature: float) -> None:
    model = load(folder)
    sampling = dataclasses.replace(SAMPLING, temperature=temperature)
    found = rollouts(model, GROUPS, sampling)
    assert {one.finish for one in found.values()} == {"stop", "length"}
    learner = Learner.create(model, FullWeights(type="full"), SftHyperparameters(), seed=0)
    assert_scored_alike(learner, GROUPS, found, temperature)


def test_a_rollout_is_what_it_says(model: Decoder) -> None:
    for one in rollouts(model, GROUPS).values():
        assert len(one.tokens) == len(one.log_probs) == len(one.versions) <= 37
        assert set(one.versions) == {5}
        assert (one.finish == "stop") is (one.tokens[-1] in SAMPLING.stop_ids)
        assert not SAMPLING.stop_ids & set(one.tokens[:-1])
        assert one.finish == "stop" or len(one.tokens) == 37
        assert one.seconds > 0


@pytest.mark.parametrize("max_rows", [1, 3, 7])
def test_neither_company_nor_order_changes_a_rollout(model: Decoder, max_rows: int) -> None:
    expected = rollouts(model, GROUPS)
    assert_same(rollouts(model, GROUPS[::-1], max_rows=max_rows), expected)
    alone = [rollouts(model, [group], max_rows=max_rows) for group in GROUPS]
    assert_same({place: one for group in alone for place, one in group.items()}, expected)


@settings(max_examples=15)
@given(st.permutations(range(5)), st.integers(1, 9), st.lists(st.integers(0, 6), min_size=5, max_size=5))
def test_continuous_batching_at_any_size(order: list[int], max_rows: int, sizes: list[int]) -> None:
    """Groups of unequal sizes, of which one may be empty; rows end at different times and others take their places."""
    model = _shared_model()
    groups = [dataclasses.replace(GROUPS[n], seeds=tuple(range(sizes[n]))) for n in order]
    sampling = Sampling(max_new_tokens=9, stop_ids=frozenset(range(0, 261, 6)))
    found = rollouts(model, groups, sampling, max_rows)
    for group in groups:
        for sample, seed in enumerate(group.seeds):
            alone = rollouts(model, [dataclasses.replace(group, seeds=(seed,))], sampling)
            assert_same({(group.key, 0): found[group.key, sample]}, alone)


_MODELS: list[Decoder] = []


def _shared_model() -> Decoder:
    """Fixtures of pytest and examples of hypothesis do not mix."""
    if not _MODELS:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            _MODELS.append(load(make_tiny_model(Path(folder) / "model")))
    return _MODELS[0]


def test_a_seed_decides_alone(model: Decoder) -> None:
    group = Group(0, tuple(b"hello"), (7, 8, 7, 9))
    found = rollouts(model, [group])
    assert found[0, 0].tokens == found[0, 2].tokens
    assert len({tuple(found[0, n].tokens) for n in (0, 1, 3)}) == 3
    assert_same(rollouts(model, [group]), found)


@pytest.mark.parametrize("saved", [(), ("lm_head",), ("embed_tokens",), ("embed_tokens", "lm_head")])
def test_with_an_adapter_and_matrices_of_its_own(folder: Path, saved: tuple[EmbeddingName, ...]) -> None:
    model = load(folder)
    before = rollouts(model, GROUPS)
    learner = adapted(model, *saved)
    found = rollouts(model, GROUPS)
    assert all(found[place].tokens != before[place].tokens for place in found if len(before[place].tokens) > 3)
    assert_scored_alike(learner, GROUPS, found, 0.8)


def test_weights_are_read_as_they_are_at_each_call(folder: Path) -> None:
    model = load(folder)
    learner = adapted(model)
    one = engine(model)
    first = {(c.group, c.sample): c for c in one.generate(GROUPS, SAMPLING, 1)}
    shake(learner)
    second = {(c.group, c.sample): c for c in one.generate(GROUPS, SAMPLING, 2)}
    assert_scored_alike(learner, GROUPS, second, 0.8)
    assert any(first[place].tokens != second[place].tokens for place in first)
    assert {version for c in second.values() for version in c.versions} == {2}


def test_a_model_trains_on_after_it_was_sampled_from(folder: Path) -> None:
    """Nothing that sampling leaves behind is in the way of a gradient."""
    learner = Learner.create(load(folder), LoraAdapter(rank=4), SftHyperparameters(), seed=0)
    batch = pack([(list(b"a row to learn"), [1.0] * 14), (list(b"and one more"), [1.0] * 12)])
    expected = learner.forward_backward(batch, 24)
    rollouts(learner._model, GROUPS)
    assert learner.forward_backward(batch, 24) == expected
    assert learner.optim_step(1e-3).finite


@pytest.mark.parametrize("samples", [5, 8], ids=["20 rows", "32 rows, column by column"])
def test_in_bfloat16_log_probs_are_those_of_the_learner_up_to_its_rounding(folder: Path, samples: int) -> None:
    model = load(folder, torch.bfloat16)
    learner = adapted(model)
    groups = [dataclasses.replace(group, seeds=tuple(range(samples))) for group in GROUPS[:4]]
    found = rollouts(model, groups, Sampling(max_new_tokens=40))
    prompts = {group.key: group.prompt for group in groups}
    differences = []
    for (key, _), one in found.items():
        row = [*prompts[key], *one.tokens]
        scored = learner.log_probs(pack([(row, [0.0] * len(prompts[key]) + [1.0] * len(one.tokens))]))
        differences.append((torch.tensor(one.log_probs) - scored).abs())
    joined = torch.cat(differences)
    assert len(joined) == 40 * 4 * samples
    assert float(joined.mean()) < 0.02
    assert float(joined.max()) < 0.2


def test_spent_counts_every_token_once(model: Decoder) -> None:
    spent = Spent(prefill=1, prefill_cached=2, generated=3)
    one = Engine(model, text_of=text_of, max_rows=3, spent=spent)
    found = list(one.generate(GROUPS, SAMPLING, 0))
    prompts = [len(text) for text in PROMPTS]
    generated = sum(len(completion.tokens) for completion in found)
    assert one.spent is spent
    assert spent == Spent(1 + sum(prompts), 2 + 3 * sum(prompts), 3 + generated)


def test_groups_are_taken_when_there_is_room(model: Decoder) -> None:
    taken: list[int] = []

    def groups() -> Iterator[Group]:
        for group in GROUPS:
            taken.append(group.key)
            yield group

    stream = engine(model, max_rows=4).generate(groups(), Sampling(max_new_tokens=3), 0)
    assert taken == []
    next(stream)
    assert taken == [10]
    assert len(list(stream)) == 19
    assert taken == [group.key for group in GROUPS]


def test_no_groups_and_groups_without_rollouts(model: Decoder) -> None:
    one = engine(model)
    assert list(one.generate([], SAMPLING, 0)) == []
    assert list(one.generate([Group(1, (5,), ()), Group(2, (5,), ())], SAMPLING, 0)) == []
    assert one.spent == Spent()


def test_one_new_token_and_a_stop_at_the_first(model: Decoder) -> None:
    once = rollouts(model, GROUPS, Sampling(max_new_tokens=1))
    assert all((len(one.tokens), one.finish) == (1, "length") for one in once.values())
    everything = frozenset(range(261))
    stopped = rollouts(model, GROUPS, Sampling(max_new_tokens=9, stop_ids=everything), max_rows=2)
    assert all((len(one.tokens), one.finish) == (1, "stop") for one in stopped.values())
    assert {place: one.tokens for place, one in once.items()} == {p: one.tokens for p, one in stopped.items()}


def test_a_stop_text_ends_a_rollout_with_the_token_that_completes_it(model: Decoder) -> None:
    whole = rollouts(model, GROUPS, Sampling(max_new_tokens=60))
    place, text = next(
        (place, text_of(one.tokens)[20:22])
        for place, one in whole.items()
        if "\ufffd" not in text_of(one.tokens)[20:22] and len(text_of(one.tokens)) > 30
    )
    cut = rollouts(model, GROUPS, Sampling(max_new_tokens=60, stop_texts=(text,)))
    assert cut[place].finish == "stop"
    for at, one in cut.items():
        assert whole[at].tokens[: len(one.tokens)] == one.tokens
        assert (text in text_of(one.tokens)) is (one.finish == "stop")
        assert text not in text_of(one.tokens[:-1])


def test_the_cache_holds_a_prompt_once_and_rows_as_long_as_they_are(model: Decoder) -> None:
    """2 layers × 2 (keys, values) × 2 heads × 8 numbers × 4 bytes = 256 bytes a token."""
    assert bytes_per_token(model) == 256
    backend = CachedDecoder(model)
    one, other = backend.read([tuple(range(40)), tuple(range(5))])
    for prefix in (one, one, one, other):
        backend.add(prefix)
    for _ in range(33):
        backend.step([1, 2, 3, 4])
    # Two prompts of the longest's 40 tokens, four rows of 33: each rounded up to 64.
    assert backend.memory() == 256 * (2 * 64 + 4 * 64)
    backend.retire(0)
    backend.add(other)
    assert backend.step([1, 2, 3, 4]).shape == (4, 261)
