"""Writes tests/gpu_workers/golden/trl_policy.json: policy losses and gradients as TRL computes them.

bench/.venv/bin/python bench/trl_policy.py

The numbers come out of `GRPOTrainer._compute_loss` and `RLOOTrainer._compute_loss` themselves, with a model that
answers with fixed log-probs. Of RLOO the gradient at the old policy is compared: away from it TRL takes the product of
an answer's ratios, and its loss is not summed over tokens.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

GOLDEN = Path(__file__).resolve().parent.parent / "tests/gpu_workers/golden/trl_policy.json"
LENGTHS = (4, 1, 6, 3)
ADVANTAGES = (0.9, -1.3, -0.4, 0.0)
LONGEST = 8
IMPORTANCE_CAP = 1.2
GRPO: dict[str, Any] = {"loss_type": "grpo", "level": "token", "low": 0.2, "high": 0.2, "beta": 0.0, "weighed": False}
# Ours, and TRL's settings that are to be the same. Its upper bound of CISPO's ratio is ours + 1.
CASES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"algorithm": "grpo"}, {}),
    ({"algorithm": "grpo", "kl_coefficient": 0.4}, {"beta": 0.4}),
    ({"algorithm": "grpo", "clip_high": 0.28}, {"high": 0.28}),
    ({"algorithm": "grpo", "loss_normalization": "token"}, {"loss_type": "bnpo"}),
    ({"algorithm": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    ({"algorithm": "dapo", "kl_coefficient": 0.1}, {"loss_type": "dapo", "high": 0.28, "beta": 0.1}),
    ({"algorithm": "dapo", "importance_cap": IMPORTANCE_CAP}, {"loss_type": "dapo", "high": 0.28, "weighed": True}),
    ({"algorithm": "gspo"}, {"level": "sequence", "low": 3e-4, "high": 4e-4}),
    (
        {"algorithm": "gspo", "clip_low": 0.5, "clip_high": 0.6, "kl_coefficient": 0.2},
        {"level": "sequence", "low": 0.5, "high": 0.6, "beta": 0.2},
    ),
    ({"algorithm": "cispo"}, {"loss_type": "cispo", "high": 5.0}),
    ({"algorithm": "cispo", "clip_high": 0.1}, {"loss_type": "cispo", "high": 1.1}),
)


def main() -> None:
    torch.manual_seed(2)
    mask = torch.tensor([[1.0] * n + [0.0] * (max(LENGTHS) - n) for n in LENGTHS])
    fixed = {"log_probs": -3 * torch.rand(mask.shape)}
    for name in ("old", "sampled", "reference"):
        fixed[name] = fixed["log_probs"] + 0.4 * torch.randn(mask.shape)
    found = [grpo(mask, fixed, ours, GRPO | theirs) for ours, theirs in CASES]
    if len({case["loss"] for case in found}) < len(found):
        raise RuntimeError("expected settings that all make a difference, found two cases with one loss")
    content = {
        "made_by": f"bench/trl_policy.py with trl {trl.__version__}, torch {torch.__version__}",
        "lengths": LENGTHS,
        "advantages": ADVANTAGES,
        "longest": LONGEST,
        **{name: flat(values, mask) for name, values in fixed.items()},
        "cases": found,
        "rloo_gradient": rloo(mask, fixed["log_probs"]),
    }
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n")


def flat(values: Tensor, mask: Tensor) -> list[float]:
    """Answers end to end."""
    return values[mask > 0].tolist()


def grpo(mask: Tensor, fixed: dict[str, Tensor], ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    log_probs = fixed["log_probs"].clone().requires_grad_()
    inputs = inputs_of(mask) | {
        "old_per_token_logps": fixed["old"],
        "ref_per_token_logps": fixed["reference"],
        "importance_sampling_ratio": (fixed["old"] - fixed["sampled"]).exp().clamp(max=IMPORTANCE_CAP),
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer(log_probs, theirs), None, inputs)
    loss.backward()
    assert log_probs.grad is not None
    return {"settings": ours, "loss": loss.item(), "gradient": flat(log_probs.grad, mask)}


def rloo(mask: Tensor, values: Tensor) -> list[float]:
    log_probs = values.clone().requires_grad_()
    inputs = inputs_of(mask) | {"old_logps": (values * mask).sum(1)}
    RLOOTrainer._compute_loss(trainer(log_probs, GRPO), None, inputs).backward()
    assert log_probs.grad is not None
    return flat(log_probs.grad, mask)


def inputs_of(mask: Tensor) -> dict[str, Tensor]:
    prompt = torch.zeros(len(mask), 1, dtype=torch.int64)
    return {
        "prompt_ids": prompt,
        "prompt_mask": prompt + 1,
        "completion_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": torch.tensor(ADVANTAGES),
    }


def trainer(log_probs: Tensor, theirs: dict[str, Any]) -> Any:
    """As much of a trainer as `_compute_loss` looks at."""
    alone = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x)
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=alone,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        loss_type=theirs["loss_type"],
        importance_sampling_level=theirs["level"],
        epsilon_low=theirs["low"],
        epsilon_high=theirs["high"],
        beta=theirs["beta"],
        use_vllm=theirs["weighed"],
        vllm_importance_sampling_correction=True,
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )


if __name__ == "__main__":
    main()
