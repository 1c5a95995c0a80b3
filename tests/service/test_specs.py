"""Whatever a job was taken as can be asked for again: settings that a job shows are never refused."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from finery.types.methods import JobCreate, RlHyperparameters, RlJobCreate
from finery_service.errors import ServiceError
from finery_service.jobs import specs
from finery_service.models.tables import ModelRow

_CREATE: TypeAdapter[JobCreate] = TypeAdapter(JobCreate)
_GYM = {"type": "reasoning_gym", "task": "chain_sum"}
_DPO: dict[str, st.SearchStrategy[Any]] = {
    "loss": st.sampled_from(["sigmoid", "robust", "ipo", "hinge", "simpo", "orpo", "apo_zero", "apo_down"]),
    "beta": st.sampled_from([None, 0.1, 2.0]),
    "label_smoothing": st.sampled_from([0.0, 0.1]),
    "margin": st.sampled_from([0.5, 1.0]),
    "sft_weight": st.sampled_from([0.0, 0.5]),
    "max_length": st.sampled_from([64, 512]),
}
_RL: dict[str, st.SearchStrategy[Any]] = {
    "algorithm": st.sampled_from(["grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo"]),
    "prompts_per_step": st.integers(1, 12),
    "updates_per_step": st.integers(1, 4),
    "max_prompt_tokens": st.integers(1, 400),
    "max_new_tokens": st.integers(1, 400),
    "overlong": st.sampled_from([None, "keep", "mask", "penalize"]),
    "overlong_buffer": st.sampled_from([None, 1, 64]),
    "dynamic_sampling": st.sampled_from([None, True, False]),
    "max_resampling": st.sampled_from([3, 4]),
    "kl_coefficient": st.sampled_from([0.0, 0.1]),
    "kl_estimator": st.sampled_from(["k1", "k2", "k3"]),
    "eval_prompts": st.integers(0, 3),
    "eval_samples": st.integers(0, 2),
    "pass_threshold": st.sampled_from([1.0, 0.5]),
    "target_reward": st.sampled_from([None, 0.5]),
}
_START = {"model": "m", "resources": {}, "limits": {}}


def _any_of(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


_BODIES = st.one_of(
    _any_of(_DPO).map(lambda hyper: {"method": "dpo", "training_file": "file_1", **_START, "hyperparameters": hyper}),
    _any_of(_RL).map(lambda hyper: {"method": "rl", "environment": _GYM, **_START, "hyperparameters": hyper}),
)


def _taken(spec: JobCreate, model: ModelRow) -> JobCreate | None:
    try:
        specs.check(spec)
        return specs.settled(spec, model)
    except ServiceError:
        return None


_BUFFER = {"overlong": "penalize", "overlong_buffer": 64}


@example({"method": "rl", "environment": _GYM, **_START, "hyperparameters": _BUFFER}, 64)
@given(_BODIES, st.sampled_from([2, 3, 64, 300, 512, 8192]))
def test_what_a_job_shows_is_taken_again_as_it_is(body: dict[str, Any], limit: int) -> None:
    model = ModelRow(id="mdl_1", name="m", max_length=limit, created_at=None)  # type: ignore[arg-type]
    taken = _taken(_CREATE.validate_python(body), model)
    if taken is None:
        return
    hyper = taken.hyperparameters
    if isinstance(hyper, RlHyperparameters):
        assert isinstance(taken, RlJobCreate)
        assert hyper.max_prompt_tokens + hyper.max_new_tokens <= limit
        assert hyper.prompts_per_step % hyper.updates_per_step == 0
        assert None not in (hyper.clip_low, hyper.clip_high, hyper.dynamic_sampling, hyper.overlong)
        assert (hyper.overlong_buffer or 0) <= hyper.max_new_tokens
        assert (hyper.overlong_buffer is not None) == (hyper.overlong == "penalize")
    else:
        assert hyper.max_length <= limit
    asked = body["hyperparameters"]
    shown = hyper.model_dump(mode="json")
    assert {name: shown[name] for name, value in asked.items() if value is not None} == {
        name: value for name, value in asked.items() if value is not None
    }, "what was asked for stays"
    copied = _CREATE.validate_python({**taken.model_dump(mode="json"), "hyperparameters": shown})
    assert _taken(copied, model) == copied
