"""What of the settings of an RL job contradicts itself, or would silently do nothing. Pure."""

from __future__ import annotations

from finery.types.environments import PromptsEnvironment
from finery.types.rl import RlHyperparameters, RlJobCreate
from finery.types.rl_algorithms import resolved
from finery_service.errors import refusal
from finery_service.models.tables import ModelRow

_DEFAULTS = RlHyperparameters()
_ABOUT_HELD_OUT = ("eval_every", "early_stopping_patience", "eval_samples", "pass_threshold", "target_reward")
_MAX_UPDATES = 64
_MAX_TOKENS = 2**27
"""Of all answers of a step, or of an evaluation: workers hold them until they are stored, some 150 bytes a token."""


def check(spec: RlJobCreate) -> None:
    """Raises 400 naming the field."""
    hyper = resolved(spec.hyperparameters)
    _check_updates(hyper)
    _check_evaluation(spec)
    for name in ("kl_estimator", "kl_placement"):
        if hyper.kl_coefficient == 0:
            _must_be_default(hyper, name, "kl_coefficient above 0 next to it, as there is no KL term", 0)
    if hyper.eval_samples == 0:
        expected = "eval_samples above 0 next to it, as it says which of them pass"
        _must_be_default(hyper, "pass_threshold", expected, 0)
    if not hyper.dynamic_sampling:
        _must_be_default(hyper, "max_resampling", "dynamic_sampling next to it, as nothing else resamples", "none")
    if hyper.overlong != "penalize":
        expected = "overlong penalize next to it, as nothing else has a buffer"
        _must_be_default(hyper, "overlong_buffer", expected, hyper.overlong)


def check_held_out(hyper: RlHyperparameters, rows: int, held_out: int | None, param: str) -> None:
    """That the prompts of a file suffice: `rows` to train on, `held_out` in a file of its own (None: there is none)."""
    if held_out is not None and hyper.eval_prompts > held_out:
        expected = f"at most the {held_out} rows of the file that is held out"
        raise refusal("invalid_value", param, expected, hyper.eval_prompts)
    if held_out is None and hyper.eval_prompts >= rows:
        expected = f"fewer than the file's {rows} rows, as they are held out of it, or a held_out_file"
        raise refusal("invalid_value", param, expected, hyper.eval_prompts)


def check_prompts(hyper: RlHyperparameters, rows: int, held_out: int | None) -> None:
    """That a step's prompts are different ones; arguments as of `check_held_out`."""
    left = rows - (hyper.eval_prompts if held_out is None else 0)
    if hyper.prompts_per_step > left:
        expected = f"at most {left}, the prompts that there are to train on"
        raise refusal("invalid_value", "hyperparameters.prompts_per_step", expected, hyper.prompts_per_step)


def fitted(hyper: RlHyperparameters, model: ModelRow) -> RlHyperparameters:
    """With nothing left open, and with prompts and answers that the model takes, as far as nobody wrote their lengths.

    Raises 400 for given ones that together are longer than the model takes, and for a buffer that is longer than an
    answer.
    """
    limit, given = model.max_length, hyper.model_fields_set
    new, prompt = hyper.max_new_tokens, hyper.max_prompt_tokens
    if "max_new_tokens" not in given:
        new = max(1, min(new, limit - prompt if "max_prompt_tokens" in given else limit // 2))
    if "max_prompt_tokens" not in given:
        prompt = max(1, min(prompt, limit - new))
    if prompt + new > limit:
        name = "max_prompt_tokens" if "max_prompt_tokens" in given else "max_new_tokens"
        expected = f"max_prompt_tokens + max_new_tokens of at most {limit}, which {model.name} takes"
        raise refusal("max_length_too_long", f"hyperparameters.{name}", expected, f"{prompt} + {new}")
    if hyper.overlong_buffer is not None and hyper.overlong_buffer > new:
        expected = f"at most max_new_tokens ({new})"
        raise refusal("invalid_value", "hyperparameters.overlong_buffer", expected, hyper.overlong_buffer)
    found = resolved(hyper.model_copy(update={"max_new_tokens": new, "max_prompt_tokens": prompt}))
    _check_size(found)
    return found


def _check_size(hyper: RlHyperparameters) -> None:
    """Of a step with all its rounds, and of an evaluation."""
    rounds = 1 + hyper.max_resampling if hyper.dynamic_sampling else 1
    answers = {
        "prompts_per_step × samples_per_prompt × rounds": hyper.prompts_per_step * hyper.samples_per_prompt * rounds,
        "eval_prompts × (1 + eval_samples)": hyper.eval_prompts * (1 + hyper.eval_samples),
    }
    for product, count in answers.items():
        if (tokens := count * hyper.max_new_tokens) > _MAX_TOKENS:
            expected = f"{product} × max_new_tokens of at most {_MAX_TOKENS} tokens, which are held together"
            raise refusal("invalid_value", f"hyperparameters.{product.split()[0]}", expected, tokens)


def _check_updates(hyper: RlHyperparameters) -> None:
    prompts = hyper.prompts_per_step
    if prompts % hyper.updates_per_step:
        possible = [str(n) for n in range(1, min(prompts, _MAX_UPDATES) + 1) if prompts % n == 0]
        expected = f"a divisor of prompts_per_step ({prompts}), one of {', '.join(possible)}"
        raise refusal("invalid_value", "hyperparameters.updates_per_step", expected, hyper.updates_per_step)


def _check_evaluation(spec: RlJobCreate) -> None:
    if spec.hyperparameters.eval_prompts > 0:
        return
    for name in _ABOUT_HELD_OUT:
        if getattr(spec.hyperparameters, name) != getattr(_DEFAULTS, name):
            expected = f"at least 1 to evaluate on, because of hyperparameters.{name}"
            raise refusal("eval_prompts_required", "hyperparameters.eval_prompts", expected, 0)
    environment = spec.environment
    if isinstance(environment, PromptsEnvironment) and environment.held_out_file is not None:
        expected = "hyperparameters.eval_prompts above 0 next to it, as nothing else looks at it"
        raise refusal("not_applicable", "environment.held_out_file", expected, 0)


def _must_be_default(hyper: RlHyperparameters, name: str, expected: str, found: object) -> None:
    if getattr(hyper, name) != getattr(_DEFAULTS, name):
        raise refusal("not_applicable", f"hyperparameters.{name}", expected, found)
