"""Jobs of every method, typed or plain; and what RL jobs sampled."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from finery import BadRequestError, graders
from finery.types.checkpoints import Checkpoint
from finery.types.environments import Environment, PromptsEnvironment, ReasoningGymEnvironment, StringCheckGrader
from finery.types.files import File
from finery.types.jobs import Job
from finery.types.methods import (
    DpoHyperparameters,
    DpoJobCreate,
    JobCreate,
    LoraAdapter,
    Resources,
    RlHyperparameters,
    RlJobCreate,
)

from .support import NOW, Client, checkpoint_json, error_json, file_json, items, job_json, mocked, page_json, value

BODY: TypeAdapter[JobCreate] = TypeAdapter(JobCreate)
GYM = {"type": "reasoning_gym", "task": "chain_sum"}
DPO = {"loss": "simpo", "beta": 2.5, "margin": 0.25, "sft_weight": 0.1, "batch_tokens": 512, "learning_rate": 1e-5}
RL = {
    "algorithm": "dapo",
    "steps": 3,
    "prompts_per_step": 2,
    "samples_per_prompt": 4,
    "max_new_tokens": 16,
    "temperature": 0.7,
    "top_k": 20,
    "stop": ["\n\n", "</answer>"],
    "clip_high": 0.28,
    "importance_cap": None,
    "eval_prompts": 8,
    "target_reward": 0.9,
}


class Recorder:
    def __init__(self, *documents: dict[str, Any]) -> None:
        self.documents = list(documents)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return httpx.Response(200, json=self.documents.pop(0) if len(self.documents) > 1 else self.documents[0])

    @property
    def queries(self) -> list[dict[str, str]]:
        return [dict(request.url.params) for request in self.requests]


async def sent(kind: Client, *requests: Any, **fields: Any) -> tuple[dict[str, Any], JobCreate]:
    """The body as it went out, and as the server reads it."""
    record = Recorder(job_json())
    await value(mocked(kind, record).jobs.create(*requests, **fields))
    (request,) = record.requests
    assert (request.method, request.url.path) == ("POST", "/v1/jobs")
    assert request.headers["idempotency-key"]
    return json.loads(request.content), BODY.validate_json(request.content)


async def test_a_dpo_job_goes_out_typed_or_plain(kind: Client) -> None:
    checkpoint = Checkpoint.model_validate(checkpoint_json({}))
    file = File.model_validate(file_json(format="preference"))
    fields = {"method": "dpo", "from_checkpoint": checkpoint, "training_file": file, "validation_file": "file_2"}
    body, read = await sent(kind, **fields, hyperparameters=DPO)
    assert body == {**fields, "from_checkpoint": "ckpt_1", "training_file": "file_1", "hyperparameters": DPO}
    _, typed = await sent(kind, **fields, hyperparameters=DpoHyperparameters.model_validate(DPO))
    request = DpoJobCreate(
        method="dpo",
        from_checkpoint="ckpt_1",
        training_file="file_1",
        validation_file="file_2",
        hyperparameters=DpoHyperparameters.model_validate(DPO),
    )
    _, whole = await sent(kind, request)
    assert read == typed == whole == request


async def test_an_rl_job_goes_out_typed_or_plain(kind: Client) -> None:
    fields = {"method": "rl", "model": "m", "seed": 7, "metadata": {"a": "b"}, "export_merged": True}
    body, read = await sent(kind, **fields, environment=GYM, hyperparameters=RL)
    assert body == {**fields, "environment": GYM, "hyperparameters": RL}
    hyper, environment = RlHyperparameters.model_validate(RL), ReasoningGymEnvironment.model_validate(GYM)
    _, typed = await sent(kind, **fields, environment=environment, hyperparameters=hyper)
    request = RlJobCreate(
        method="rl",
        model="m",
        seed=7,
        metadata={"a": "b"},
        export_merged=True,
        environment=environment,
        hyperparameters=hyper,
    )
    _, whole = await sent(kind, request)
    assert read == typed == whole == request


@pytest.mark.parametrize("given", ["object", "id", "spec", "plain"])
async def test_an_environment_is_an_object_an_id_a_spec_or_plain(kind: Client, given: str, tmp_path: Any) -> None:
    (tmp_path / "reward.py").write_text("def grade(sample, item):\n    return 1.0\n")
    made = {"id": "env_1", "project": "proj_1", "type": "reasoning_gym", "spec": GYM, "created_at": NOW}
    grader = StringCheckGrader(type="string_check", operation="eq", reference="{{ item.answer }}")
    environment: Any = {
        "object": Environment.model_validate(made),
        "id": "env_1",
        "spec": PromptsEnvironment(type="prompts", file="file_1", grader=grader),
        "plain": {"type": "prompts", "file": "file_1", "grader": graders.python(tmp_path / "reward.py")},
    }[given]
    _, read = await sent(kind, method="rl", model="m", environment=environment)
    assert isinstance(read, RlJobCreate)
    if given in ("object", "id"):
        assert read.environment == "env_1"
    else:
        assert isinstance(read.environment, PromptsEnvironment)
        assert read.environment.file == "file_1"
        assert read.environment.grader.type == ("string_check" if given == "spec" else "python")


async def test_the_fields_of_all_methods_are_keywords(kind: Client) -> None:
    shared = {"project": "proj_2", "name": "n", "priority": "high", "added_tokens": ("<t>",), "merge_checkpoint": True}
    classes = {"adapter": LoraAdapter(rank=4), "resources": Resources(accelerators=2)}
    for method, own in (
        ("sft", {"training_file": "file_1"}),
        ("dpo", {"training_file": "file_1"}),
        ("rl", {"environment": "env_1"}),
    ):
        _, read = await sent(kind, method=method, from_checkpoint="ckpt_1", **shared, **classes, **own)
        assert (read.method, read.project, read.priority, read.resources.accelerators) == (method, "proj_2", "high", 2)
        assert (read.adapter, read.added_tokens, read.merge_checkpoint) == (LoraAdapter(rank=4), ("<t>",), True)


async def test_a_wrong_combination_is_refused_by_the_server_and_names_the_field(kind: Client) -> None:
    refused = error_json("unknown_field", "training_file: not a field of rl jobs.", param="training_file")
    client = mocked(kind, lambda request: httpx.Response(400, json=refused))
    with pytest.raises(BadRequestError, match="not a field of rl jobs") as caught:
        await value(client.jobs.create(method="rl", model="m", environment=GYM, training_file="file_1"))
    assert caught.value.param == "training_file"


def rollout_json(step: int, number: int, **changes: Any) -> dict[str, Any]:
    place = {"step": step, "group": number // 2, "sample": number % 2, "prompt": 17}
    told = {"text": "4", "tokens": [52, 2], "log_probs": [-0.5, -0.25], "versions": [3, 3], "reward": 1.0}
    ids = {"id": f"roll_{step}_{number}", "job": "job_1"}
    return {"object": "rollout", **ids, **place, **told, "finish": "stop", **changes}


async def test_rollouts_of_a_step_are_read_to_the_end(kind: Client) -> None:
    lost = rollout_json(1, 2, reward=None, failure={"code": "timeout", "message": "Too long."})
    first = page_json([rollout_json(1, n) for n in (0, 1)], has_more=True, last_id="roll_1_1")
    record = Recorder(first, page_json([lost]))
    found = mocked(kind, record).jobs.rollouts("job_1", step=1)
    assert record.requests == [], "nothing is sent before the first is asked for"
    rollouts = await items(found)
    assert [one.id for one in rollouts] == ["roll_1_0", "roll_1_1", "roll_1_2"]
    assert (rollouts[0].tokens, rollouts[0].log_probs, rollouts[0].versions) == ((52, 2), (-0.5, -0.25), (3, 3))
    assert rollouts[2].reward is None, "no reward is not 0"
    assert rollouts[2].failure.code == "timeout"
    assert {request.url.path for request in record.requests} == {"/v1/jobs/job_1/rollouts"}
    query = {"step": "1", "kind": "train", "limit": "100"}
    assert record.queries == [query, {**query, "after": "roll_1_1"}]


async def test_rollouts_of_all_steps_of_evaluations_and_of_both(kind: Client) -> None:
    record = Recorder(page_json([]))
    client = mocked(kind, record)
    job = Job.model_validate(job_json())
    assert await items(client.jobs.rollouts(job)) == []
    await items(client.jobs.rollouts(job, 0, kind="eval", limit=7))
    await items(client.jobs.rollouts(job, kind=None))
    assert record.queries == [
        {"kind": "train", "limit": "100"},
        {"step": "0", "kind": "eval", "limit": "7"},
        {"limit": "100"},
    ]


async def test_a_job_has_its_rollouts(kind: Client) -> None:
    record = Recorder(job_json(method="rl"), page_json([rollout_json(1, 0)]))
    job = await value(mocked(kind, record).jobs.retrieve("job_1"))
    assert [one.id for one in await items(job.rollouts(step=1))] == ["roll_1_0"]
    assert record.queries[1]["step"] == "1"
