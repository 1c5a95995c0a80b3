"""Writes tests/gpu_workers/golden/trl_preference.json: preference losses and gradients as TRL computes them.

bench/.venv/bin/python bench/trl_preference.py

The numbers come out of `DPOTrainer._compute_loss` itself, on a model that answers with fixed log-probs. Label smoothing
is compared for `robust` only: TRL's sigmoid ignores it.
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
from trl import DPOTrainer

GOLDEN = Path(__file__).resolve().parent.parent / "tests/gpu_workers/golden/trl_preference.json"
LENGTHS = {"chosen": (4, 2, 6, 1), "rejected": (5, 3, 1, 2)}
CASES = (
    ("sigmoid", 0.1, 0.0),
    ("sigmoid", 0.7, 0.0),
    ("robust", 0.3, 0.2),
    ("ipo", 0.1, 0.0),
    ("hinge", 0.2, 0.0),
    ("apo_zero", 0.3, 0.0),
    ("apo_down", 0.3, 0.0),
)


class FixedModel(torch.nn.Module):
    """Answers with the log-probs that it was made of; [2 × pairs, tokens], 0 where nothing is scored."""

    def __init__(self, per_token: Tensor) -> None:
        super().__init__()
        self.per_token = torch.nn.Parameter(per_token)

    def forward(self, **_: Any) -> Any:
        zeros = torch.zeros_like(self.per_token)
        return SimpleNamespace(
            log_probs=self.per_token, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), aux_loss=None
        )


def main() -> None:
    torch.manual_seed(0)
    lengths = [*LENGTHS["chosen"], *LENGTHS["rejected"]]
    mask = torch.tensor([[1.0] * n + [0.0] * (max(lengths) - n) for n in lengths])
    per_token, reference = (-3 * torch.rand(mask.shape) * mask for _ in range(2))
    found = [case(mask, per_token, reference.sum(1), *settings) for settings in CASES]
    chosen, rejected = per_token.sum(1).chunk(2)
    reference_chosen, reference_rejected = reference.sum(1).chunk(2)
    pairs = {
        "chosen": chosen,
        "rejected": rejected,
        "chosen_reference": reference_chosen,
        "rejected_reference": reference_rejected,
        "chosen_tokens": torch.tensor(LENGTHS["chosen"], dtype=torch.float32),
        "rejected_tokens": torch.tensor(LENGTHS["rejected"], dtype=torch.float32),
    }
    content = {
        "made_by": f"bench/trl_preference.py with trl {trl.__version__}, torch {torch.__version__}",
        "pairs": {name: values.tolist() for name, values in pairs.items()},
        "cases": found,
    }
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n")


def case(
    mask: Tensor, per_token: Tensor, reference: Tensor, loss: str, beta: float, smoothing: float
) -> dict[str, Any]:
    model = FixedModel(per_token)
    completion_mask = torch.cat((torch.zeros(len(mask), 1), mask), dim=1)  # one token of prompt
    reference_chosen, reference_rejected = reference.chunk(2)
    inputs = {
        "input_ids": torch.zeros(completion_mask.shape, dtype=torch.int64),
        "attention_mask": torch.ones(completion_mask.shape, dtype=torch.int64),
        "completion_mask": completion_mask,
        "ref_chosen_logps": reference_chosen,
        "ref_rejected_logps": reference_rejected,
    }
    total = DPOTrainer._compute_loss(trainer(model, loss, beta, smoothing), model, inputs, False)
    total.backward()
    assert model.per_token.grad is not None
    # Every scored token of an answer has the gradient of the answer's sum.
    of_answer = ((model.per_token.grad * mask).sum(1) / mask.sum(1)).chunk(2)
    gradients = {name: part.tolist() for name, part in zip(("chosen", "rejected"), of_answer, strict=True)}
    return {
        "loss": loss,
        "beta": beta,
        "label_smoothing": smoothing,
        "mean_loss": total.item(),
        "gradients": gradients,
    }


def trainer(model: FixedModel, loss: str, beta: float, smoothing: float) -> Any:
    """As much of a trainer as `_compute_loss` looks at."""
    alone = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x)
    return SimpleNamespace(
        model=model,
        accelerator=alone,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=smoothing,
        use_weighting=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )


if __name__ == "__main__":
    main()
