"""The learner: the one primitive that SFT, DPO and RL are loops over."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from finery.types.methods import Adapter, LoraAdapter, Optimization
from finery_gpu_workers.batch import PackedBatch
from finery_gpu_workers.models.export import export_full, export_merged
from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.models.lora import Lora, attach
from finery_gpu_workers.models.peft_layout import export_peft, load_peft
from finery_gpu_workers.optim import AdamW, FlatParameters, clip
from finery_gpu_workers.scoring import Loss, LossSum, backward_from_log_probs, likelihood, log_probs
from finery_gpu_workers.working import WorkingCopies

_EXCHANGED_AT_ONCE = 2**20


@dataclass(frozen=True)
class StepStats:
    grad_norm: float
    """Global L2 norm before clipping."""
    finite: bool
    """False: a loss or the gradient was NaN or infinite, and the step changed nothing."""


@dataclass(frozen=True)
class Trained:
    parameters: int
    """Numbers that are trained; a tied matrix counts once."""
    modules: tuple[str, ...]
    """The modules that they belong to, named as in transformers."""


class Learner:
    """Trains an adapter on a frozen model, or the whole model. Not thread-safe.

    Weight decay is for matrices (adapters' and embeddings too), not for norms and biases.
    """

    def __init__(
        self, model: Model, parameters: FlatParameters, tied_to: Lora | WorkingCopies, hyper: Optimization
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._tied_to = tied_to
        """What makes the model compute with the parameters."""
        self._hyper = hyper
        self._optimizer = AdamW(parameters.values, hyper.weight_decay, decayed=parameters.matrices)
        self._finite = True
        self._untouched = set(parameters.views)
        self._reference: Tensor | None = None
        """Values of the parameters, see `keep_reference`."""

    @classmethod
    def create(cls, model: Model, adapter: Adapter, hyper: Optimization, *, seed: int) -> Learner:
        """Takes the model over. LoRA starts fresh by `seed`, with the matrices of `modules_to_save` next to it."""
        if isinstance(adapter, LoraAdapter):
            lora = attach(model, adapter, seed)
            return cls(model, lora.parameters, lora, hyper)
        parameters = FlatParameters(dict(model.named_weights()), model.device)
        return cls(model, parameters, WorkingCopies(model, parameters, parameters.views), hyper)

    @property
    def model(self) -> Model:
        """The one that is trained: what samples from it sees every step at once."""
        return self._model

    @property
    def version(self) -> int:
        """Optimizer steps done."""
        return self._optimizer.steps

    @property
    def kind(self) -> Literal["adapter", "full"]:
        """What `save` writes."""
        return "adapter" if isinstance(self._tied_to, Lora) else "full"

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's weights and of the computation; what is trained has float32 masters always."""
        return self._model.dtype

    @property
    def trained(self) -> Trained:
        modules = dict.fromkeys(name.rpartition(".")[0] for name in self._parameters.views)
        return Trained(len(self._parameters.values), tuple(modules))

    def without_gradient(self) -> list[str]:
        """The parameters whose gradient was zero in every optimizer step of this learner so far."""
        return [name for name in self._parameters.views if name in self._untouched]

    def forward_backward(self, batch: PackedBatch, denominator: int) -> LossSum:
        """Adds the gradient of (weighted loss sum / denominator) to what is there."""
        if denominator < 1:
            raise ValueError(f"denominator: expected at least 1 token, found {denominator}")
        batch, scored = self._ready(batch)
        if len(scored) == 0:
            return LossSum(0.0, 0)
        hidden = self._hidden(batch)[scored]
        gradient, weights = torch.empty_like(hidden), batch.weights[scored]
        total = likelihood(self._model, hidden.detach(), batch.targets[scored], weights, gradient, denominator)
        hidden.backward(gradient)
        self._finite &= math.isfinite(total.loss_sum)
        return total

    def forward_backward_with(self, batch: PackedBatch, loss: Loss, temperature: float = 1.0) -> Tensor:
        """Adds the gradient of `loss`, a function of the log-probs that `log_probs` gives, to what is there.

        Weights above 0 only select positions. Returns the log-probs, on the CPU.
        """
        batch, scored = self._ready(batch)
        if len(scored) == 0:
            return torch.zeros(0)
        hidden, targets = self._hidden(batch)[scored], batch.targets[scored]
        found, value, gradient = backward_from_log_probs(self._model, hidden.detach(), targets, loss, temperature)
        hidden.backward(gradient)
        self._finite &= math.isfinite(value)
        return found.cpu()

    @torch.no_grad()
    def log_probs(self, batch: PackedBatch, temperature: float = 1.0) -> Tensor:
        """log softmax(logits / temperature)[target] where weights are above 0, in order of rows; float32 on the CPU."""
        batch, scored = self._ready(batch)
        if len(scored) == 0:
            return torch.zeros(0)
        return log_probs(self._model, self._hidden(batch)[scored], batch.targets[scored], temperature).cpu()

    @torch.no_grad()
    def evaluate(self, batch: PackedBatch) -> LossSum:
        batch, scored = self._ready(batch)
        return likelihood(self._model, self._hidden(batch)[scored], batch.targets[scored], batch.weights[scored])

    @torch.no_grad()
    def keep_reference(self) -> None:
        """Remembers what is trained as it is now: the starting point, before anything of a resume is restored."""
        self._reference = self._parameters.values.clone()

    def drop_reference(self) -> None:
        """Frees what `keep_reference` kept."""
        self._reference = None

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the model computes as when `keep_reference` was called; afterwards as before; exactly, both.

        Only `log_probs` and `evaluate` make sense inside.
        """
        if self._reference is None:
            raise RuntimeError("expected a reference that was kept, found none")
        self._exchange(self._reference)
        try:
            yield
        finally:
            self._exchange(self._reference)

    @torch.no_grad()
    def _exchange(self, other: Tensor) -> None:
        for mine, theirs in zip(*(x.split(_EXCHANGED_AT_ONCE) for x in (self._parameters.values, other)), strict=True):
            kept = mine.clone()
            mine.copy_(theirs)
            theirs.copy_(kept)
        self._tied_to.refresh()

    @torch.no_grad()
    def optim_step(self, learning_rate: float) -> StepStats:
        """Clips, updates, forgets the gradient. A non-finite loss or gradient changes nothing."""
        gradients = self._parameters.gradients
        norm = clip(gradients, self._hyper.max_grad_norm)
        finite = self._finite and math.isfinite(norm)
        if finite:
            if self._untouched:
                named = self._parameters.named(gradients)
                self._untouched = {name for name in self._untouched if not bool(named[name].any())}
            self._optimizer.step(self._parameters.values, gradients, learning_rate)
            self._tied_to.refresh()
        gradients.zero_()
        self._finite = True
        return StepStats(grad_norm=norm, finite=finite)

    def save(self, folder: Path, *, base_model: str, source: Path) -> None:
        """Writes the adapter in the layout of PEFT, or the whole model in that of transformers.

        `base_model` is the name that PEFT shows; `source` is the folder that the model was loaded from.
        """
        if isinstance(self._tied_to, Lora):
            export_peft(self._tied_to, folder, base_model=base_model)
        else:
            export_full(self._model, source, folder)

    def save_merged(self, folder: Path, source: Path) -> None:
        """Writes the whole model with the adapter merged into its weights."""
        if isinstance(self._tied_to, Lora):
            export_merged(self._model, self._tied_to, source, folder)
        else:
            export_full(self._model, source, folder)

    def load_adapter(self, folder: Path) -> None:
        """Goes on from an adapter in the layout of PEFT; the optimizer stays fresh."""
        if not isinstance(self._tied_to, Lora):
            raise ValueError("expected a learner of an adapter, found one of all weights; load the model instead")
        load_peft(self._tied_to, folder)
        self._tied_to.refresh()

    def state(self) -> dict[str, Tensor]:
        """A copy of all that training has changed, on the CPU, for `load_state` of a learner made alike."""
        state = {
            f"{kind}.{name}": part.detach().cpu().clone()
            for kind, flat in self._buffers().items()
            for name, part in self._parameters.named(flat).items()
        }
        return state | {"steps": torch.tensor(self._optimizer.steps, dtype=torch.int64)}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Exact: the next step is the one that the learner which gave `state` would have taken."""
        mine = {
            f"{kind}.{name}": part
            for kind, flat in self._buffers().items()
            for name, part in self._parameters.named(flat).items()
        }
        shapes = {name: tuple(part.shape) for name, part in mine.items()} | {"steps": ()}
        for name in sorted(shapes.keys() | state.keys()):
            expected, found = shapes.get(name), tuple(state[name].shape) if name in state else None
            if expected != found:
                raise ValueError(f"resume state: `{name}`: expected shape {expected}, found {found}")
        for name, part in mine.items():
            part.copy_(state[name])
        self._optimizer.steps = int(state["steps"])
        self._parameters.gradients.zero_()
        self._finite = True
        self._tied_to.refresh()

    def _buffers(self) -> dict[str, Tensor]:
        return {"master": self._parameters.values, "mean": self._optimizer.mean, "square": self._optimizer.square}

    def _ready(self, batch: PackedBatch) -> tuple[PackedBatch, Tensor]:
        """On the model's device, prefixes apart where the model cannot share them; and which positions are scored."""
        batch = (batch if self._model.shares_prefixes else batch.expanded()).to(self._model.device)
        return batch, batch.weights.nonzero().squeeze(1)

    def _hidden(self, batch: PackedBatch) -> Tensor:
        return self._model.forward(batch.tokens, batch.positions, batch.lengths, batch.parents)
