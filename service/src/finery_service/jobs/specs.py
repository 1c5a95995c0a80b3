"""What of a job's spec contradicts itself, or would silently do nothing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from finery.types import dpo
from finery.types.files import SFT_FORMATS
from finery.types.methods import (
    DpoJobCreate,
    JobCreate,
    JobSpec,
    LoraAdapter,
    Optimization,
    Passes,
    RlJobCreate,
    SftJobCreate,
    TrainOn,
)
from finery.types.previews import PreviewCreate
from finery_service.errors import refusal
from finery_service.jobs import specs_dpo, specs_rl
from finery_service.models.tables import ModelRow

_TRAIN_ON = {"text": ("assistant", "all"), "chat": ("assistant", "last", "all")}
"""What each format's rows can be trained on, where it is not everything."""
_FORMATS: Mapping[str, Sequence[str]] = {"sft": SFT_FORMATS, "dpo": ("preference",), "rl": ("prompts",)}
_DEFAULTS = Optimization()


def check(spec: JobCreate) -> None:
    """Raises 400 naming the field. What a checkpoint brings along is not known yet: see `check_added_tokens`."""
    _check_available(spec)
    _check_repeats(spec)
    _check_schedule(spec.hyperparameters)
    if isinstance(spec, RlJobCreate):
        specs_rl.check(spec)
    else:
        _check_evaluation(spec)
    if isinstance(spec, DpoJobCreate):
        specs_dpo.check(spec.hyperparameters)
    if spec.export_merged and spec.adapter.type != "lora":
        expected = "false, as a job that trains all weights has nothing to merge"
        raise refusal("not_applicable", "export_merged", expected, "true")


def settled(spec: JobCreate, model: ModelRow) -> JobCreate:
    """With what was left open as it will be, so that the job shows it. Raises 400 for what the model does not take."""
    if isinstance(spec, RlJobCreate):
        return spec.model_copy(update={"hyperparameters": specs_rl.fitted(spec.hyperparameters, model)})
    length = fitting_length(spec.hyperparameters, model, "hyperparameters.max_length")
    changed = {"max_length": length}
    if isinstance(spec, DpoJobCreate):
        preferences = dpo.resolved(spec.hyperparameters).model_copy(update=changed)
        return spec.model_copy(update={"hyperparameters": preferences})
    return spec.model_copy(update={"hyperparameters": spec.hyperparameters.model_copy(update=changed)})


def check_format(method: str, format_: str | None, param: str) -> None:
    """Raises 400 for a file whose rows are not those of the method."""
    wanted = _FORMATS[method]
    if format_ not in wanted:
        owners = [f", which is for method {other}" for other, formats in _FORMATS.items() if format_ in formats]
        names = " or ".join(filter(None, (", ".join(wanted[:-1]), wanted[-1])))
        expected = f"a file of {names} rows for method {method}"
        raise refusal("wrong_task_format", param, expected, f"one of {format_} rows{''.join(owners)}")


def check_added_tokens(spec: JobSpec) -> None:
    """New tokens have new rows in the embedding: nobody but this job can train them."""
    adapter = spec.adapter
    if not spec.added_tokens or not isinstance(adapter, LoraAdapter) or "embed_tokens" in adapter.modules_to_save:
        return
    expected = (
        "embed_tokens among them (and lm_head, unless the model ties the two) because of added_tokens, or adapter "
        '{"type": "full"}'
    )
    found = ", ".join(adapter.modules_to_save) or "none"
    raise refusal("untrained_tokens", "adapter.modules_to_save", expected, found)


def check_train_on(wanted: TrainOn, format_: str | None, param: str) -> None:
    """Raises 400 for rows that have no such part."""
    possible = _TRAIN_ON.get(format_ or "")
    if possible is not None and wanted not in possible:
        expected = f"one of {', '.join(possible)} for a training file of {format_} rows"
        raise refusal("train_on_not_possible", param, expected, wanted)


def fitting_length(settings: Passes | PreviewCreate, model: ModelRow, param: str) -> int:
    """The `max_length` of the settings, or of the model where it takes less than a default that nobody wrote.

    Raises 400 for a given one that is longer than the model takes.
    """
    if settings.max_length <= model.max_length:
        return settings.max_length
    if "max_length" not in settings.model_fields_set:
        return model.max_length
    raise refusal(
        "max_length_too_long", param, f"at most {model.max_length} tokens with {model.name}", settings.max_length
    )


def _check_available(spec: JobSpec) -> None:
    wanted = {f"limits.{name}": value for name, value in spec.limits if value is not None}
    if spec.resources.accelerators > 1:
        wanted["resources.accelerators"] = spec.resources.accelerators
    if isinstance(spec, RlJobCreate):
        wanted |= {f"resources.samplers.{name}": value for name, value in spec.resources.samplers if value}
    for param, value in wanted.items():
        expected = {"resources.accelerators": "1"}.get(param, "0" if "samplers" in param else "null")
        raise refusal("not_available", param, f"{expected}, as more is not available yet", value)


def _check_repeats(spec: JobCreate) -> None:
    lists: dict[str, Sequence[str]] = {"added_tokens": spec.added_tokens}
    if isinstance(spec.adapter, LoraAdapter):
        lists["adapter.modules_to_save"] = spec.adapter.modules_to_save
        lists["adapter.targets"] = () if isinstance(spec.adapter.targets, str) else spec.adapter.targets
    if isinstance(spec, RlJobCreate):
        lists["hyperparameters.stop"] = spec.hyperparameters.stop
    for param, values in lists.items():
        twice = _repeated(values)
        if twice is not None:
            raise refusal("duplicate_value", param, "each value once", f"{twice!r} twice")


def _check_evaluation(spec: SftJobCreate | DpoJobCreate) -> None:
    hyper = spec.hyperparameters
    for name in ("early_stopping_patience", "eval_every"):
        if getattr(hyper, name) is not None and spec.validation_file is None:
            expected = f"a file to evaluate on, because of hyperparameters.{name}"
            raise refusal("validation_file_required", "validation_file", expected, "none")


def _check_schedule(hyper: Optimization) -> None:
    """A setting that nothing would look at is refused, unless it is the default, which says nothing."""
    if hyper.early_stopping_patience is None and hyper.early_stopping_min_delta != _DEFAULTS.early_stopping_min_delta:
        expected = "early_stopping_patience next to it"
        raise refusal("not_applicable", "hyperparameters.early_stopping_min_delta", expected, "none")
    if hyper.schedule != "wsd" and hyper.decay_ratio != _DEFAULTS.decay_ratio:
        expected = "the schedule wsd next to it, as no other decays by it"
        raise refusal("not_applicable", "hyperparameters.decay_ratio", expected, hyper.schedule)
    if hyper.schedule == "wsd" and hyper.warmup_ratio + hyper.decay_ratio > 1:
        expected = "warmup_ratio + decay_ratio of at most 1"
        raise refusal("invalid_value", "hyperparameters.decay_ratio", expected, hyper.warmup_ratio + hyper.decay_ratio)


def _repeated(values: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None
