"""LoRA (Hu et al. 2021, arXiv:2106.09685) on a decoder's projections: y = W x + (alpha / rank) B A x.

Master weights are float32; the matmuls run in the base's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from finery.types.methods import LoraAdapter
from finery_gpu_workers.models.decoder import Decoder, Projection
from finery_gpu_workers.optim import FlatParameters


class Lora:
    """The adapter of one job; `parameters` are named `<module>.lora_A` [rank, in] and `<module>.lora_B` [out, rank]."""

    def __init__(self, adapter: LoraAdapter, parameters: FlatParameters) -> None:
        self.adapter = adapter
        self.parameters = parameters


def attach(decoder: Decoder, adapter: LoraAdapter, seed: int) -> Lora:
    """Hooks a new adapter into every targeted projection: A uniform as in PEFT, B zero, so that nothing changes yet.

    The draw depends on seed, rank and targets only, not on the device.
    """
    generator = torch.Generator().manual_seed(seed)
    initial: dict[str, Tensor] = {}
    for projection in decoder.projections():
        inputs = projection.weight.shape[1]
        for name, size in _targeted(projection, adapter):
            bound = inputs**-0.5
            initial[f"{name}.lora_A"] = torch.empty(adapter.rank, inputs).uniform_(-bound, bound, generator=generator)
            initial[f"{name}.lora_B"] = torch.zeros(size, adapter.rank)
    lora = Lora(adapter, FlatParameters(initial, decoder.device))
    for projection in decoder.projections():
        if _targeted(projection, adapter):
            projection.delta = _Delta(projection, lora)
    return lora


class _Delta:
    """The adapters of one projection, stacked like its layers: one matmul down, one up."""

    def __init__(self, projection: Projection, lora: Lora) -> None:
        views = lora.parameters.views
        present = [name for name in projection.names if f"{name}.lora_A" in views]
        self.scale = lora.adapter.alpha / lora.adapter.rank
        self.down = [views[f"{name}.lora_A"] for name in present]
        # A layer without an adapter keeps its rows in the block-diagonal matrix, with no column.
        self.up = [
            views[f"{name}.lora_B"] if name in present else projection.weight.new_zeros(size, 0, dtype=torch.float32)
            for name, size in zip(projection.names, projection.sizes, strict=True)
        ]

    def __call__(self, y: Tensor, x: Tensor) -> Tensor:
        inner = F.linear(x, torch.cat(self.down).to(x.dtype))
        up = self.up[0] if len(self.up) == 1 else torch.block_diag(*self.up)
        return y.addmm_(inner, up.to(x.dtype).t(), alpha=self.scale)


def _targeted(projection: Projection, adapter: LoraAdapter) -> list[tuple[str, int]]:
    """(module, outputs) of the layers that get an adapter."""
    layers = zip(projection.names, projection.sizes, strict=True)
    wanted = adapter.targets
    return [(n, s) for n, s in layers if wanted == "all-linear" or n.rsplit(".", 1)[-1] in wanted]
