"""A causal language model as transformers computes it, one length of rows at a time: slower than ours, but right."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.decoder import Projection


class ForeignModel:
    """A `Model` around one of transformers, whose weights are frozen and which is in evaluation mode."""

    def __init__(self, net: Any, reason: str) -> None:
        self.net = net
        self._reason = reason
        self._given = _Given()
        # The same model with its blocks replaced by an answer that is given: what it does to hidden states stays.
        self._head = copy.copy(net)
        self._head._modules = dict(net._modules) | {net.base_model_prefix: self._given}
        self._longest = longest_row(net)
        self._stored_names = _stored_names(net)
        self._projections = [_hooked(name, layer) for name, layer in linear_layers(net).items()]

    @property
    def engine(self) -> str:
        return "transformers"

    @property
    def engine_reason(self) -> str:
        return self._reason

    @property
    def vocab(self) -> int:
        rows: int = self._embedding.weight.shape[0]
        return rows

    @property
    def tied(self) -> bool:
        return self._output.weight is self._embedding.weight

    @property
    def device(self) -> torch.device:
        device: torch.device = self._embedding.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._embedding.weight.dtype
        return dtype

    def token_matrices(self) -> tuple[Tensor, ...]:
        return (self._embedding.weight,) if self.tied else (self._embedding.weight, self._output.weight)

    def untie(self) -> None:
        if self.tied:
            self._output.weight = nn.Parameter(self._embedding.weight.detach().clone(), requires_grad=False)

    def projections(self) -> Iterator[Projection]:
        yield from self._projections

    @property
    def shares_prefixes(self) -> bool:
        return False

    def forward(
        self, tokens: Tensor, positions: Tensor, lengths: tuple[int, ...], parents: tuple[int, ...] = ()
    ) -> Tensor:
        """Rows of one length run together, without padding, under the model's own causal mask."""
        if parents:
            raise ValueError("parents: expected rows apart, found shared prefixes; expand the batch")
        if self._longest is not None and max(lengths) > self._longest:
            found = f"expected rows of at most {self._longest} tokens, which have a position, found {max(lengths)}"
            raise WorkerError("row_too_long_for_model", f"{found}; lower hyperparameters.max_length")
        starts, groups = _starts(lengths), defaultdict(list)
        for row, length in enumerate(lengths):
            groups[length].append(row)
        hidden, places = [], []
        for length, rows in groups.items():
            place = torch.tensor([starts[row] for row in rows])[:, None] + torch.arange(length)
            place = place.to(tokens.device)
            if not torch.equal(positions[place], torch.arange(length, device=tokens.device).expand_as(place)):
                raise ValueError("positions: expected every row to count from 0, as the model itself does")
            hidden.append(self.net.base_model(input_ids=tokens[place], use_cache=False).last_hidden_state.flatten(0, 1))
            places.append(place.flatten())
        return torch.cat(hidden)[torch.cat(places).argsort()]

    def logits(self, hidden: Tensor) -> Tensor:
        """As the model's own: with its scaling and soft caps."""
        self._given.hidden = hidden[None]
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            logits: Tensor = self._head(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._given.hidden = None
        return logits

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.net.named_parameters()

    def stored_name(self, name: str) -> str:
        """transformers keeps some old names in files (GPT-NeoX: `embed_out`)."""
        return self._stored_names[name]

    @property
    def _embedding(self) -> Any:
        return self.net.get_input_embeddings()

    @property
    def _output(self) -> Any:
        return self.net.get_output_embeddings()


def linear_layers(net: Any) -> dict[str, nn.Linear]:
    """Of the decoder layers, under their names in transformers; a router of experts is none of them."""
    prefix = _layers_prefix(net)
    named = {name: layer for name, layer in net.named_modules() if name.startswith(prefix)}
    routers = (".gate", ".router", ".classifier")
    return {n: layer for n, layer in named.items() if isinstance(layer, nn.Linear) and not n.endswith(routers)}


def _layers_prefix(net: Any) -> str:
    """The list of blocks is the one with the most parameters."""
    lists = {name: one for name, one in net.named_modules() if isinstance(one, nn.ModuleList)}
    sizes = {name: sum(p.numel() for p in one.parameters()) for name, one in lists.items()}
    return f"{max(sizes, key=lambda name: sizes[name])}." if sizes else "\0"


def _stored_names(net: Any) -> dict[str, str]:
    """Name in memory → in files, where files only name tensors otherwise. transformers reads names in memory, too:
    they are kept where files would split or join tensors.
    """
    names: dict[str, str] = {}
    for name, weight in net.named_parameters(remove_duplicate=False):
        stored = revert_weight_conversion(net, {name: weight})
        renamed = len(stored) == 1 and next(iter(stored.values())).shape == weight.shape
        names[name] = str(next(iter(stored))) if renamed else name
    return names if len(set(names.values())) == len(names) else {name: name for name in names}


def longest_row(net: Any) -> int | None:
    """Where positions are learned, there are only so many: a second table besides that of the tokens."""
    tables = [module for module in net.modules() if isinstance(module, nn.Embedding)]
    return int(net.config.max_position_embeddings) if len(tables) > 1 else None


class _Given(nn.Module):
    """Stands where the blocks were."""

    hidden: Tensor | None = None

    @property
    def decoder(self) -> nn.Module:
        """Some heads ask the decoder inside (OPT)."""
        return self

    def forward(self, *_: Any, **__: Any) -> Any:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.hidden)


def _hooked(name: str, layer: nn.Linear) -> Projection:
    projection = Projection(layer.weight, (name,), (layer.out_features,), layer.bias)

    def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if projection.delta is None:
            return output
        y = projection.delta(output.flatten(0, -2), inputs[0].flatten(0, -2))
        return y.view(output.shape)

    layer.register_forward_hook(hook)
    return projection


def _starts(lengths: tuple[int, ...]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts
