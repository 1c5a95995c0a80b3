"""LoRA (Hu et al. 2021, arXiv:2106.09685) on a model's projections: y = W x + (alpha / rank) B A x.

Master weights are float32; the matmuls run in the base's dtype. Matrices of `modules_to_save` are trained whole.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from finery.types.methods import LoraAdapter
from finery_gpu_workers.models.decoder import Projection
from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.models.kernels import lora_linear
from finery_gpu_workers.models.targets import SAVED, check_targets
from finery_gpu_workers.optim import FlatParameters
from finery_gpu_workers.working import WorkingCopies


class Lora:
    """The adapter of one job; `parameters` are named `<module>.lora_A` [rank, in] and `<module>.lora_B` [out, rank],
    and those of `modules_to_save` as in transformers (`model.embed_tokens.weight`, `lm_head.weight`).
    """

    def __init__(self, adapter: LoraAdapter, parameters: FlatParameters, working: WorkingCopies, *, tied: bool) -> None:
        self.adapter = adapter
        self.parameters = parameters
        self.tied = tied
        """The model's output matrix is its embedding, also where the adapter trains that whole."""
        self._working = working

    def refresh(self) -> None:
        """After a change of `parameters`: the model computes with them."""
        self._working.refresh()


def attach(model: Model, adapter: LoraAdapter, seed: int) -> Lora:
    """Hooks a new adapter into every targeted projection: A uniform as in PEFT, B zero, so that nothing changes yet.

    The draw depends on seed, rank and targets only, not on the device. With `lm_head` saved a tied model is untied;
    with `embed_tokens` alone it stays tied, and the one matrix is trained.
    """
    check_targets(model, adapter)
    generator = torch.Generator().manual_seed(seed)
    initial: dict[str, Tensor] = {}
    for projection in model.projections():
        inputs = projection.weight.shape[1]
        for name, size in _targeted(projection, adapter):
            bound = inputs**-0.5
            initial[f"{name}.lora_A"] = torch.empty(adapter.rank, inputs).uniform_(-bound, bound, generator=generator)
            initial[f"{name}.lora_B"] = torch.zeros(size, adapter.rank)
    if "lm_head" in adapter.modules_to_save:
        model.untie()
    saved = [SAVED[name] for name in dict.fromkeys(adapter.modules_to_save)]
    weights = dict(model.named_weights())
    initial |= {name: weights[name] for name in saved}
    parameters = FlatParameters(initial, model.device)
    for projection in model.projections():
        if _targeted(projection, adapter):
            projection.delta = LoraDelta(projection, adapter, parameters.views)
    return Lora(adapter, parameters, WorkingCopies(model, parameters, saved), tied=model.tied)


class LoraDelta:
    """The adapters of one projection, stacked like its layers: one matmul down, one up."""

    def __init__(self, projection: Projection, adapter: LoraAdapter, views: dict[str, Tensor]) -> None:
        present = [name for name in projection.names if f"{name}.lora_A" in views]
        self.scale = adapter.alpha / adapter.rank
        self.down = [views[f"{name}.lora_A"] for name in present]
        # A layer without an adapter keeps its rows in the block-diagonal matrix, with no column.
        self.up = [
            views[f"{name}.lora_B"] if name in present else projection.weight.new_zeros(size, 0, dtype=torch.float32)
            for name, size in zip(projection.names, projection.sizes, strict=True)
        ]

    def __call__(self, y: Tensor, x: Tensor) -> Tensor:
        inner = F.linear(x, torch.cat(self.down).to(x.dtype))
        return y.addmm_(inner, torch.block_diag(*self.up).to(x.dtype).t(), alpha=self.scale)

    def stacked(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The adapters as they are now: A [sum of ranks, inputs], and scale · B [sum of outputs, sum of ranks]."""
        return torch.cat(self.down).to(dtype), torch.block_diag(*self.up).mul_(self.scale).to(dtype)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return lora_linear(x, weight, bias, self.down, self.up, self.scale)


def _targeted(projection: Projection, adapter: LoraAdapter) -> list[tuple[str, int]]:
    """(module, outputs) of the layers that get an adapter."""
    layers = zip(projection.names, projection.sizes, strict=True)
    wanted = adapter.targets
    return [(n, s) for n, s in layers if wanted == "all-linear" or n.rsplit(".", 1)[-1] in wanted]
