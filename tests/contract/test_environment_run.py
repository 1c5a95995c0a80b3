"""A run of an environment from the API's door through a real worker and back, without a pool."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

from finery_service.reconcile import effects, loop
from finery_service.rpc_server import build
from finery_testing import control
from finery_testing.api import running_api
from finery_testing.clock import FakeClock
from finery_testing.pool import ScriptedPool
from finery_testing.reconciling import SETTINGS, lead

pytest_plugins = ("finery_testing.control_fixtures",)
ROWS = [{"prompt": f"{n} + 1", "answer": str(n + 1)} for n in range(3)]
HELD_OUT = [{"prompt": [{"role": "user", "content": "9 + 1"}], "answer": "10"}]
GRADER = {
    "type": "multi",
    "graders": {
        "exact": {"type": "string_check", "operation": "eq", "reference": "{{ item.answer }}"},
        "near": {"type": "text_similarity", "evaluation_metric": "fuzzy_match", "reference": "{{ item.hint }}"},
    },
    "calculate_output": "exact + 0 * near",
}


async def test_answers_are_graded_by_a_real_worker(
    app_engine: AsyncEngine, system_engine: AsyncEngine, pool: ScriptedPool, clock: FakeClock, tmp_path: Path
) -> None:
    from finery_gpu_workers.run import main

    folder = tmp_path / "objects"
    async with running_api(app_engine, system_engine, folder, clock) as api:
        door = await api.tenant()
        rows = [{**row, "hint": row["answer"]} if n else row for n, row in enumerate(ROWS)]
        files = [(await door.upload(content, "p.jsonl")).json()["id"] for content in (rows, HELD_OUT)]
        spec = {"type": "prompts", "file": files[0], "held_out_file": files[1], "grader": GRADER}
        made = (await door.post("/v1/environments", {"spec": spec})).json()
        answers = [{"prompt": 1, "output_text": "2"}, {"prompt": 2, "output_text": "no"}, {"output_text": "1"}]
        asked = await door.post(f"/v1/environments/{made['id']}/runs", {"answers": answers, "prompts": 100})
        assert asked.status_code == 201, asked.text
        context = await lead(system_engine, pool, clock)
        await loop.tick(context)
        [attempt] = await control.attempts(system_engine, asked.json()["id"])
        server, port = build(system_engine, SETTINGS.model_copy(update={"rpc_port": 0}), clock)
        await server.start()
        settings = {"rpc_address": f"127.0.0.1:{port}", "store_url": folder.as_uri(), "device": "cpu"}
        context.settings = SETTINGS.model_copy(update=settings)
        try:
            await asyncio.to_thread(main, effects.launch(context, attempt).environment)
        finally:
            await server.stop(0)
        ready = (await door.get(f"/v1/environments/{made['id']}/runs/{asked.json()['id']}")).json()
    assert (ready["status"], ready["error"], ready["prompt_count"]) == ("ready", None, 4)
    assert [one["item"] for one in ready["prompts"]] == [*rows, *HELD_OUT]
    assert [one["text"] for one in ready["prompts"]] == [*(row["prompt"] for row in ROWS), None]
    assert ready["prompts"][3]["messages"] == HELD_OUT[0]["prompt"]
    assert [one["reward"] for one in ready["answers"]] == [1.0, 0.0, None]
    assert ready["answers"][2]["failure"]["code"] == "missing_field"
    assert ready["answers"][0]["parts"]["exact"] == 1.0
