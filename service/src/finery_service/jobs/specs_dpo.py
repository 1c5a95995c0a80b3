"""What of the settings of a DPO job contradicts itself, or would silently do nothing. Pure."""

from __future__ import annotations

from finery.types.dpo import DpoHyperparameters
from finery_service.errors import refusal

_DEFAULTS = DpoHyperparameters()
_SMOOTHED = ("sigmoid", "robust")


def check(hyper: DpoHyperparameters) -> None:
    """Raises 400 naming the field."""
    if hyper.label_smoothing != _DEFAULTS.label_smoothing and hyper.loss not in _SMOOTHED:
        expected = f"the loss {' or '.join(_SMOOTHED)} next to it, as no other smooths labels"
        raise refusal("not_applicable", "hyperparameters.label_smoothing", expected, hyper.loss)
    if hyper.loss == "robust" and hyper.label_smoothing == 0:
        expected = "a number above 0, below 0.5: the share of swapped pairs that the loss robust corrects for"
        raise refusal("invalid_value", "hyperparameters.label_smoothing", expected, hyper.label_smoothing)
    if hyper.loss != "simpo" and hyper.margin != _DEFAULTS.margin:
        expected = "the loss simpo next to it, as no other has a margin"
        raise refusal("not_applicable", "hyperparameters.margin", expected, hyper.loss)
    if hyper.loss == "orpo" and hyper.sft_weight != _DEFAULTS.sft_weight:
        expected = f"{_DEFAULTS.sft_weight:g}, as the loss orpo has the likelihood of the chosen answer in it"
        raise refusal("not_applicable", "hyperparameters.sft_weight", expected, hyper.sft_weight)
