"""Jobs that start from checkpoints: what goes on, what is merged, what lies under it."""

from __future__ import annotations

from typing import Any

import pytest

from finery_testing import control, factories
from finery_testing.api import Api, Door, checkpoint

LORA = {"type": "lora", "rank": 4, "alpha": 8.0, "targets": ["q_proj"], "modules_to_save": ["embed_tokens"]}
FULL = {"type": "full"}


async def parent(api: Api, door: Door, **spec: Any) -> str:
    """A checkpoint of a job that ended, made over the API."""
    kind = "full" if spec.get("adapter") == FULL else "adapter"
    answer = await door.job(**spec)
    assert answer.status_code == 201, answer.text
    row = await control.job_row(api.system_engine, answer.json()["id"])
    end = "update jobs set state = 'succeeded', finished_at = created_at where id = :job"
    await control.execute(api.system_engine, end, job=row.id)
    return (await checkpoint(api.system_engine, row, now=api.clock(), kind=kind)).id


async def base(api: Api, job: dict[str, Any]) -> list[tuple[str, str]]:
    row = await control.job_row(api.system_engine, job["id"])
    return [(part["checkpoint"], part["kind"]) for part in row.base]


async def created(door: Door, **fields: Any) -> dict[str, Any]:
    answer = await door.job(**fields)
    assert answer.status_code == 201, answer.text
    job: dict[str, Any] = answer.json()
    return job


async def test_an_adapter_goes_on_and_brings_its_shape_and_tokens(api: Api) -> None:
    door = await api.tenant()
    start = await parent(api, door, adapter=LORA, added_tokens=["<a>"])
    for given in ({}, {"adapter": LORA}, {"added_tokens": ["<a>"]}, {"adapter": LORA, "added_tokens": ["<a>"]}):
        job = await created(door, from_checkpoint=start, **given)
        assert (job["model"], job["from_checkpoint"]) == (factories.MODEL_NAME, start)
        assert (job["adapter"], job["added_tokens"], job["merge_checkpoint"]) == (LORA, ["<a>"], False)
        assert await base(api, job) == []


@pytest.mark.parametrize(
    ("given", "param", "told"),
    [
        ({"adapter": {**LORA, "rank": 8}}, "adapter", "lora of rank 4, alpha 8, q_proj, whole embed_tokens"),
        ({"adapter": {"type": "lora"}}, "adapter", "rank 16, alpha 32, all-linear"),
        ({"added_tokens": ["<b>"]}, "added_tokens", "expected that of the checkpoint, 1 tokens"),
        ({"added_tokens": []}, "added_tokens", "found none"),
    ],
)
async def test_another_shape_needs_a_merge(api: Api, given: dict[str, Any], param: str, told: str) -> None:
    door = await api.tenant()
    start = await parent(api, door, adapter=LORA, added_tokens=["<a>"])
    answer = await door.job(from_checkpoint=start, **given)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "checkpoint_goes_on", param)
    assert "merge_checkpoint" in error["message"]
    assert told in error["message"]


async def test_a_merge_starts_a_new_adapter_on_top(api: Api) -> None:
    door = await api.tenant()
    start = await parent(api, door, adapter=LORA, added_tokens=["<a>"])
    job = await created(door, from_checkpoint=start, merge_checkpoint=True, adapter={"type": "lora", "rank": 2})
    assert (job["adapter"]["rank"], job["added_tokens"], job["merge_checkpoint"]) == (2, [], True)
    assert await base(api, job) == [(start, "merge")]
    untrained = await door.job(from_checkpoint=start, merge_checkpoint=True, added_tokens=["<b>"])
    assert untrained.json()["error"]["param"] == "adapter.modules_to_save"


async def test_training_all_weights_merges_the_adapter_first(api: Api) -> None:
    door = await api.tenant()
    start = await parent(api, door, adapter=LORA)
    job = await created(door, from_checkpoint=start, adapter=FULL)
    assert job["adapter"] == FULL
    assert await base(api, job) == [(start, "merge")]


async def test_a_whole_model_is_the_base_and_has_nothing_to_merge(api: Api) -> None:
    door = await api.tenant()
    start = await parent(api, door, adapter=FULL, added_tokens=["<a>"])
    job = await created(door, from_checkpoint=start)
    assert (job["adapter"]["type"], job["added_tokens"]) == ("lora", []), "its tokenizer has the token already"
    assert await base(api, job) == [(start, "full")]
    answer = await door.job(from_checkpoint=start, merge_checkpoint=True)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "merge_checkpoint", "nothing_to_merge")


async def test_chains_grow_by_one_part_a_merge_and_a_whole_model_ends_them(api: Api) -> None:
    door = await api.tenant()
    first = await parent(api, door, adapter=LORA)
    second = await parent(api, door, from_checkpoint=first, merge_checkpoint=True)
    third = await parent(api, door, from_checkpoint=second)
    goes_on = await created(door, from_checkpoint=third)
    assert await base(api, goes_on) == [(first, "merge")]
    merged = await created(door, from_checkpoint=third, merge_checkpoint=True)
    assert await base(api, merged) == [(first, "merge"), (third, "merge")]
    whole = await parent(api, door, from_checkpoint=third, adapter=FULL)
    assert await base(api, await created(door, from_checkpoint=whole)) == [(whole, "full")]


async def learns(api: Api, door: Door, method: str) -> dict[str, Any]:
    """What a job of the method learns from."""
    if method == "rl":
        return {"method": "rl", "environment": {"type": "reasoning_gym", "task": "chain_sum"}}
    format_ = {"sft": "chat", "dpo": "preference"}[method]
    file = await factories.file(api.system_engine, door.tenant, now=api.clock(), format=format_)
    return {"method": method, "training_file": file.id}


@pytest.mark.parametrize("method", ["sft", "dpo", "rl"])
@pytest.mark.parametrize("of", ["sft", "dpo", "rl"])
async def test_a_job_of_any_method_starts_from_a_checkpoint_of_any_other(api: Api, of: str, method: str) -> None:
    door = await api.tenant()
    source, fields = await learns(api, door, of), await learns(api, door, method)
    start = await parent(api, door, adapter=LORA, added_tokens=["<a>"], **source)
    goes_on = await created(door, from_checkpoint=start, **fields)
    assert (goes_on["method"], goes_on["adapter"], goes_on["added_tokens"]) == (method, LORA, ["<a>"])
    assert await base(api, goes_on) == []
    merged = await created(door, from_checkpoint=start, merge_checkpoint=True, **fields)
    assert (merged["adapter"]["rank"], await base(api, merged)) == (16, [(start, "merge")])
    whole = await created(door, from_checkpoint=start, adapter=FULL, **fields)
    assert (whole["adapter"], await base(api, whole)) == (FULL, [(start, "merge")])
    of_whole = await parent(api, door, adapter=FULL, **source)
    assert await base(api, await created(door, from_checkpoint=of_whole, **fields)) == [(of_whole, "full")]


async def test_sft_then_dpo_then_rl_each_from_the_last_checkpoint(api: Api) -> None:
    door = await api.tenant()
    first = await parent(api, door, adapter=LORA, **await learns(api, door, "sft"))
    second = await parent(api, door, from_checkpoint=first, **await learns(api, door, "dpo"))
    third = await created(door, from_checkpoint=second, **await learns(api, door, "rl"))
    assert (third["adapter"], third["from_checkpoint"], await base(api, third)) == (LORA, second, [])
    on_top = await created(door, from_checkpoint=second, merge_checkpoint=True, **await learns(api, door, "rl"))
    assert await base(api, on_top) == [(second, "merge")]


async def test_foreign_deleted_and_unknown_checkpoints_are_told_alike(api: Api) -> None:
    door, stranger = await api.tenant(), await api.tenant()
    start = await parent(api, door)
    foreign = await stranger.job(from_checkpoint=start)
    await control.execute(api.system_engine, "update checkpoints set deleted_at = now() where id = :id", id=start)
    deleted = await door.job(from_checkpoint=start)
    for answer in (foreign, deleted, await door.job(from_checkpoint="ckpt_unknown")):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "checkpoint_not_found", "from_checkpoint")


async def test_a_checkpoint_of_another_project_of_the_tenant_can_be_used(api: Api) -> None:
    door = await api.tenant()
    start = await parent(api, door)
    other = f"proj_{door.tenant.id.partition('_')[2]}x"
    project = "insert into projects (tenant_id, id, name, created_at) values (:tenant, :id, 'other', now())"
    await control.execute(api.system_engine, project, tenant=door.tenant.id, id=other)
    assert (await created(door, from_checkpoint=start, project=other))["project"] == other


async def test_a_checkpoint_whose_base_is_gone_is_unusable(api: Api) -> None:
    door = await api.tenant()
    first = await parent(api, door)
    second = await parent(api, door, from_checkpoint=first, merge_checkpoint=True)
    await control.execute(api.system_engine, "update checkpoints set deleted_at = now() where id = :id", id=first)
    answer = await door.job(from_checkpoint=second)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "checkpoint_unusable", "from_checkpoint")
    assert first in error["message"]
