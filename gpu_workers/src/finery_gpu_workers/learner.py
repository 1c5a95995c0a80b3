"""The learner: the one primitive that SFT, DPO and RL are loops over."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from finery.types.methods import LoraAdapter, SftHyperparameters
from finery_gpu_workers.batch import PackedBatch
from finery_gpu_workers.losses import cross_entropy
from finery_gpu_workers.models.decoder import Decoder
from finery_gpu_workers.models.load import compute_dtype, load_decoder, stored_dtype
from finery_gpu_workers.models.lora import Lora, attach
from finery_gpu_workers.models.peft_layout import export_peft, load_peft
from finery_gpu_workers.optim import AdamW, clip

# Logits are computed for this many numbers at a time: 256 MB in float32.
_LOGITS_AT_ONCE = 2**26


@dataclass(frozen=True)
class LossSum:
    loss_sum: float
    """Weighted sum over the batch, not divided by anything."""
    tokens: int
    """Positions with weight > 0."""


@dataclass(frozen=True)
class StepStats:
    grad_norm: float
    """Global L2 norm before clipping."""
    finite: bool
    """False: a loss or the gradient was NaN or infinite, and the step changed nothing."""


class Learner:
    """Trains an adapter on a frozen decoder. Not thread-safe."""

    def __init__(self, decoder: Decoder, lora: Lora, hyper: SftHyperparameters) -> None:
        self._decoder = decoder
        self._lora = lora
        self._hyper = hyper
        self._parameters = lora.parameters
        self._optimizer = AdamW(self._parameters.values, hyper.weight_decay)
        self._finite = True

    @classmethod
    def create(
        cls,
        folder: Path,
        adapter: LoraAdapter,
        hyper: SftHyperparameters,
        *,
        seed: int,
        device: str,
        dtype: torch.dtype | None = None,
    ) -> Learner:
        """Loads the base model of `folder`, with a fresh adapter. `dtype`: None takes what suits weights and device."""
        decoder = load_decoder(folder, device=device, dtype=dtype or compute_dtype(stored_dtype(folder), device))
        return cls(decoder, attach(decoder, adapter, seed), hyper)

    @property
    def dtype(self) -> torch.dtype:
        """Of the base's weights and of the computation; the adapter's own weights are always float32."""
        return self._decoder.dtype

    def forward_backward(self, batch: PackedBatch, denominator: int) -> LossSum:
        """Adds the gradient of (weighted loss sum / denominator) to what is there."""
        if denominator < 1:
            raise ValueError(f"denominator: expected at least 1 token, found {denominator}")
        batch = batch.to(self._decoder.device)
        scored = batch.weights.nonzero().squeeze(1)
        if len(scored) == 0:
            return LossSum(0.0, 0)
        hidden = self._decoder.forward(batch.tokens, batch.positions, batch.lengths)[scored]
        # The head is frozen: its gradient ends at the hidden states, so logits live for one chunk only.
        gradient = torch.empty_like(hidden)
        total = self._score(hidden.detach(), batch.targets[scored], batch.weights[scored], gradient)
        hidden.backward(gradient / denominator)
        self._finite &= math.isfinite(total.loss_sum)
        return total

    @torch.no_grad()
    def evaluate(self, batch: PackedBatch) -> LossSum:
        batch = batch.to(self._decoder.device)
        scored = batch.weights.nonzero().squeeze(1)
        hidden = self._decoder.forward(batch.tokens, batch.positions, batch.lengths)[scored]
        return self._score(hidden, batch.targets[scored], batch.weights[scored], None)

    @torch.no_grad()
    def optim_step(self, learning_rate: float) -> StepStats:
        """Clips, updates, forgets the gradient. A non-finite loss or gradient changes nothing."""
        gradients = self._parameters.gradients
        norm = clip(gradients, self._hyper.max_grad_norm)
        finite = self._finite and math.isfinite(norm)
        if finite:
            self._optimizer.step(self._parameters.values, gradients, learning_rate)
        gradients.zero_()
        self._finite = True
        return StepStats(grad_norm=norm, finite=finite)

    def save_adapter(self, folder: Path, *, base_model: str) -> None:
        """Writes the adapter in the layout of PEFT."""
        export_peft(self._lora, folder, base_model=base_model)

    def load_adapter(self, folder: Path) -> None:
        """Goes on from an adapter in the layout of PEFT; the optimizer stays fresh."""
        load_peft(self._lora, folder)

    def state(self) -> dict[str, Tensor]:
        """A copy of all that training has changed, on the CPU, for `load_state` of a learner made alike."""
        parameters, optimizer = self._parameters, self._optimizer
        buffers = {"master": parameters.values, "mean": optimizer.mean, "square": optimizer.square}
        state = {
            f"{kind}.{name}": part.detach().cpu().clone()
            for kind, flat in buffers.items()
            for name, part in parameters.named(flat).items()
        }
        return state | {"steps": torch.tensor(optimizer.steps, dtype=torch.int64)}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Exact: the next step is the one that the learner which gave `state` would have taken."""
        mine = self.state()
        for name in sorted(mine.keys() | state.keys()):
            expected, found = (tuple(s[name].shape) if name in s else None for s in (mine, state))
            if expected != found:
                raise ValueError(f"resume state: `{name}`: expected shape {expected}, found {found}")
        parameters, optimizer = self._parameters, self._optimizer
        buffers = {"master": parameters.values, "mean": optimizer.mean, "square": optimizer.square}
        for kind, flat in buffers.items():
            for name, part in parameters.named(flat).items():
                part.copy_(state[f"{kind}.{name}"])
        optimizer.steps = int(state["steps"])
        parameters.gradients.zero_()
        self._finite = True

    def _score(self, hidden: Tensor, targets: Tensor, weights: Tensor, gradient: Tensor | None) -> LossSum:
        """The loss, chunk by chunk; its gradient with respect to `hidden` is written to `gradient`."""
        size = max(1, _LOGITS_AT_ONCE // self._decoder.config.vocab)
        loss_sum, tokens = 0.0, 0
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            leaf = hidden[part].requires_grad_(gradient is not None)
            loss = cross_entropy(self._decoder.logits(leaf), targets[part], weights[part])
            if gradient is not None:
                gradient[part] = torch.autograd.grad(loss.numerator, leaf)[0]
            loss_sum += float(loss.numerator.detach())
            tokens += loss.tokens
        return LossSum(loss_sum, tokens)
