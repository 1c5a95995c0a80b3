"""Environments as tests ask for them."""

from __future__ import annotations

from typing import Any

from finery_testing.api import Door

GYM: dict[str, Any] = {"type": "reasoning_gym", "task": "chain_sum", "size": 20}
CHECK: dict[str, Any] = {"type": "string_check", "operation": "eq", "reference": "{{ item.answer }}"}


async def prompts_file(door: Door, rows: int = 3) -> str:
    """The id of a valid file of the format prompts."""
    answer = await door.upload([{"prompt": f"{n} + 1", "answer": str(n + 1)} for n in range(rows)], "prompts.jsonl")
    assert answer.status_code == 201, answer.text
    assert (answer.json()["status"], answer.json()["format"]) == ("valid", "prompts"), answer.text
    return str(answer.json()["id"])


def prompts(file: str, grader: dict[str, Any] = CHECK, **fields: Any) -> dict[str, Any]:
    return {"type": "prompts", "file": file, "grader": grader, **fields}


async def environment(door: Door, spec: dict[str, Any] = GYM, **fields: Any) -> dict[str, Any]:
    answer = await door.post("/v1/environments", {"spec": spec, **fields})
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def run(door: Door, environment_id: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
    return await door.post(f"/v1/environments/{environment_id}/runs", body, headers=headers)


async def refusal_of(door: Door, spec: Any, **fields: Any) -> tuple[int, str, str | None]:
    answer = await door.post("/v1/environments", {"spec": spec, **fields})
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]
