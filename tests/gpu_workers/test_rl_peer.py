"""Both updates of a step, whole, against autograd through transformers in float64, with the formulas written out."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from finery.types.methods import FullWeights
from finery.types.rl import RlHyperparameters
from finery_gpu_workers.learner import Learner
from finery_gpu_workers.methods.rl_sampling import Rollout
from finery_gpu_workers.methods.rl_terms import shape_rewards
from finery_gpu_workers.methods.rl_update import Updater
from finery_gpu_workers.models.load import load_model

from .rl_jobs import hyper, prompt, rollout

LONGEST, BUFFER, TEMPERATURE, LOW, HIGH, BETA = 8, 4, 0.7, 0.02, 0.03, 0.3
LENGTHS = ((3, 8, 1), (5, 2, 8), (8, 7, 4), (1, 1, 6))
REWARDS: tuple[tuple[float | None, ...], ...] = ((1, 0, 2), (1, 1, None), (0, None, 1), (3, 0, 0))
"""Four groups, of which two go into each update; an answer of 8 tokens was cut off."""


def learner_apart(folder: Path, settings: RlHyperparameters) -> Learner:
    """All weights, some way from the reference."""
    model = load_model(folder, device="cpu", dtype=torch.float32)
    made = Learner.create(model, FullWeights(type="full"), settings, seed=0)
    made.keep_reference()
    values = made._parameters.values
    with torch.no_grad():
        values.add_(0.03 * torch.randn(values.shape, generator=torch.Generator().manual_seed(1)))
    made._tied_to.refresh()
    made._optimizer.steps = 1
    return made


def as_peer(one: Learner, folder: Path) -> Any:
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    values = one._parameters.named(one._parameters.values)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(values[name])
    return net


def log_probs(net: Any, one: Rollout) -> Tensor:
    ids, first = [*one.prompt.tokens.tolist(), *one.tokens], len(one.prompt.tokens)
    scores = (net(torch.tensor([ids])).logits[0] / TEMPERATURE).log_softmax(-1)
    return scores[torch.arange(first - 1, len(ids) - 1), torch.tensor(one.tokens)]  # type: ignore[no-any-return]


def answers(net: Any) -> list[Rollout]:
    """Sampled from something that differs from the policy."""
    seeded, made = torch.Generator().manual_seed(2), []
    for g, (lengths, rewards) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        asked = prompt(g, torch.randint(0, 255, (1 + g,), generator=seeded).tolist())
        for n, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
            ids, finish = (
                torch.randint(0, 255, (length,), generator=seeded).tolist(),
                "length" if length == 8 else "stop",
            )
            made.append(rollout(g, n, reward, ids, prompt=asked, finish=finish))
            noise = 0.3 * torch.randn(length, generator=seeded, dtype=torch.float64)
            with torch.no_grad():
                made[-1].completion.log_probs = (log_probs(net, made[-1]) + noise).tolist()  # type: ignore[union-attr]
    return made


def divergence(apart: Tensor, scored: Tensor, estimator: str) -> Tensor:
    """`apart`: policy over reference, in logarithms. Of k1 that which has the gradient of the divergence."""
    return {"k1": apart.detach() * scored, "k2": apart**2 / 2, "k3": (-apart).exp() - 1 + apart}[estimator]


def advantages(rollouts: Sequence[Rollout], charges: dict[int, float], settings: RlHyperparameters) -> dict[int, float]:
    """By place in the list, of those that are compared."""
    shaped = {}
    for place, one in enumerate(rollouts):
        if one.reward is not None:
            late = min(0.0, (LONGEST - BUFFER - len(one.tokens)) / BUFFER) if settings.overlong == "penalize" else 0.0
            shaped[place] = one.reward + late - charges.get(place, 0.0)
    found = {}
    for group in range(4):
        mine = {place: reward for place, reward in shaped.items() if rollouts[place].group == group}
        for place, reward in mine.items():
            others = [r for other, r in mine.items() if settings.algorithm != "rloo" or other != place]
            compared = {"group": list(mine.values()), "batch": list(shaped.values()), "none": []}
            spread = compared[str(settings.advantage_scale)]
            equal = max(mine.values()) == min(mine.values())
            value = reward - sum(others) / len(others)
            found[place] = 0.0 if equal else value / (statistics.stdev(spread) if spread else 1.0)
    return found


def token_losses(now: Tensor, old: Tensor, advantage: float, algorithm: str) -> Tensor:
    ratio = (now - old).mean().exp().expand_as(now) if algorithm == "gspo" else (now - old).exp()
    bounded = ratio.clamp(1 - LOW, 1 + HIGH)
    if algorithm == "cispo":
        return -bounded.detach() * advantage * now
    return -torch.minimum(ratio * advantage, bounded * advantage)


def peer_loss(nets: Sequence[Any], rollouts: Sequence[Rollout], update: int, settings: RlHyperparameters) -> Tensor:
    """`nets`: the reference, the policy before the step, and before this update."""
    reference, before, now = nets
    apart = [(log_probs(before, one) - log_probs(reference, one)).detach() for one in rollouts]
    in_reward = settings.kl_placement == "reward"
    charges = {n: BETA * float(divergence(x, x, "k3").sum()) for n, x in enumerate(apart)} if in_reward else {}
    compared = advantages(rollouts, charges, settings)
    masked = settings.overlong == "mask"
    members = [n for n in compared if rollouts[n].group // 2 == update]
    members = [n for n in members if not (masked and rollouts[n].finish == "length")]
    tokens, total = sum(len(rollouts[n].tokens) for n in members), torch.zeros((), dtype=torch.float64)
    for n in members:
        one = rollouts[n]
        assert one.completion is not None
        scored, old = log_probs(now, one), log_probs(before, one).detach()
        losses = token_losses(scored, old, compared[n], settings.algorithm)
        if settings.importance_cap is not None:
            sampled = torch.tensor(one.completion.log_probs, dtype=torch.float64)
            losses = losses * (old - sampled).exp().clamp(max=settings.importance_cap)
        if not in_reward:
            away = scored - log_probs(reference, one).detach()
            losses = losses + BETA * divergence(away, scored, settings.kl_estimator)
        each = {"sequence": len(members) * len(one.tokens), "token": tokens, "constant": len(members) * LONGEST}
        total = total + losses.sum() / each[str(settings.loss_normalization)]
    return total


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "grpo", "kl_estimator": "k3", "importance_cap": 1.1},
        {"algorithm": "dr_grpo", "kl_estimator": "k2", "overlong": "mask"},
        {"algorithm": "rloo", "kl_placement": "reward", "kl_estimator": "k3"},
        {"algorithm": "dapo", "advantage_scale": "batch", "kl_estimator": "k1", "overlong_buffer": BUFFER},
        {"algorithm": "gspo", "importance_cap": 1.1},
        {"algorithm": "cispo", "overlong_buffer": BUFFER, "loss_normalization": "constant"},
    ],
    ids=lambda changes: changes["algorithm"],
)
@pytest.mark.parametrize("micro", [20, 1000])
def test_both_updates_of_a_step_have_the_gradients_of_transformers(
    tiny_folder: Path, changes: dict[str, Any], micro: int
) -> None:
    common: dict[str, Any] = {"temperature": TEMPERATURE, "clip_low": LOW, "clip_high": HIGH, "kl_coefficient": BETA}
    common |= {"prompts_per_step": 4, "updates_per_step": 2, "samples_per_prompt": 3, "importance_cap": None}
    settings = hyper(**(common | {"max_grad_norm": None} | changes))
    one = learner_apart(tiny_folder, settings)
    reference = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    nets, gradients, step = [as_peer(one, tiny_folder)], [], one.optim_step
    rollouts = answers(nets[0])

    def keeping(rate: float) -> Any:
        named = one._parameters.named(one._parameters.gradients)
        gradients.append({name: value.clone() for name, value in named.items()})
        stats = step(rate)
        nets.append(as_peer(one, tiny_folder))
        return stats

    shape_rewards(rollouts, settings)
    with mock.patch.object(one, "optim_step", keeping):
        Updater(one, settings, micro).run(rollouts, lambda _: 3e-3)
    assert len(gradients) == 2
    for update, found in enumerate(gradients):
        now = copy.deepcopy(nets[update])
        peer_loss((reference, nets[0], now), rollouts, update, settings).backward()
        for name, parameter in now.named_parameters():
            size = float(parameter.grad.abs().max())
            assert math.isfinite(size)
            torch.testing.assert_close(found[name].double(), parameter.grad, rtol=1e-4, atol=2e-5 * size, msg=name)
