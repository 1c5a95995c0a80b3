"""A database of the first release keeps its data, and the API shows it as before."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg

from finery_service.auth.secrets import digest, new_secret
from finery_service.db import migrate
from finery_service.db.engine import create_engine
from finery_testing.api import running_api
from finery_testing.clock import FakeClock
from finery_testing.postgres import Database

_SPEC = {
    "method": "sft", "model": "smollm2-135m-instruct", "from_checkpoint": None, "training_file": "file_1",
    "validation_file": None, "name": "old", "project": None, "seed": 7, "metadata": {"team": "a"}, "priority": "normal",
    "adapter": {"type": "lora", "rank": 8, "alpha": 16.0, "targets": "all-linear"},
    "hyperparameters": {"epochs": 1, "max_steps": None, "batch_tokens": 8192, "learning_rate": 2e-4,
                        "schedule": "cosine", "train_on": "assistant", "checkpoint_every": 50, "max_length": 2048},
    "resources": {"accelerators": 1, "accelerator_type": None},
    "limits": {"max_cost": None, "max_tokens": None, "max_seconds": None},
}  # fmt: skip
"""As the first release stored it: without what came later."""
_ROWS = """
    insert into tenants values ('ten_1', 'acme', '2026-11-01Z');
    insert into projects values ('ten_1', 'proj_1', 'default', true, '2026-11-01Z');
    insert into files (tenant_id, id, project_id, name, bytes, sha256, object_key, status, format, rows, created_at)
        values ('ten_1', 'file_1', 'proj_1', 'a.jsonl', 9, repeat('0', 64), 'k', 'valid', 'chat', 1, '2026-11-01Z');
    insert into jobs (tenant_id, id, project_id, method, model_id, training_file_id, price_book_id, name, spec,
                      priority, accelerators, state, step, total_steps, usage, created_at, started_at, finished_at)
        select 'ten_1', 'job_1', 'proj_1', 'sft', models.id, 'file_1', 'pb_default', 'old', '{}', 'normal', 1,
               'succeeded', 1, 1, '{"train.sft": 1000000}', '2026-11-01Z', '2026-11-01Z', '2026-11-02Z' from models;
    insert into job_heads values ('ten_1', 'job_1', 1);
    insert into events values ('ten_1', 'job_1', 1, 'state', '{"to": "succeeded"}', '2026-11-02Z');
    insert into attempts (tenant_id, id, job_id, kind, fence, state, lease_expires_at, reason, created_at, ended_at)
        values ('ten_1', 'att_1', 'job_1', 'train', 1, 'ended', '2026-11-02Z', 'completed', '2026-11-01Z',
                '2026-11-02Z');
    insert into checkpoints (tenant_id, id, job_id, project_id, attempt_id, step, final, prefix, files, bytes, manifest,
                             resume_prefix, resume_sha256, created_at)
        values ('ten_1', 'ckpt_1', 'job_1', 'proj_1', 'att_1', 1, true, 'p/', '[]', 0, '{}', 'r/', '', '2026-11-02Z');
    insert into usage_records (tenant_id, project_id, job_id, attempt_id, sku, unit, step, quantity, state, created_at)
        values ('ten_1', 'proj_1', 'job_1', 'att_1', 'train.sft', 'step:1', 1, 1000000, 'billable', '2026-11-02Z');
"""


def _fill(database: Database, secret: str) -> None:
    with psycopg.connect(database.system_dsn) as connection:
        for statement in filter(str.strip, _ROWS.split(";\n")):
            connection.execute(statement)
        connection.execute("update jobs set spec = %s", (json.dumps(_SPEC),))
        connection.execute(
            "insert into api_keys values ('ten_1', 'key_1', 'proj_1', 'k', 'fny_', %s, '2026-11-01Z')",
            (digest(secret),),
        )


async def test_it_is_there_as_before_and_can_be_built_on(empty_database: Database, tmp_path: Path) -> None:
    secret = new_secret("fny")
    migrate.upgrade(empty_database.owner_dsn, "0001")
    _fill(empty_database, secret)
    migrate.upgrade(empty_database.owner_dsn)
    app_engine, system_engine = create_engine(empty_database.app_dsn), create_engine(empty_database.system_dsn)
    async with running_api(app_engine, system_engine, tmp_path, FakeClock()) as api:
        client = api.with_key(secret)
        file, job = (await client.get("/v1/files/file_1")).json(), (await client.get("/v1/jobs/job_1")).json()
        assert (file["encoding"], file["status"]) == ("jsonl", "valid")
        assert (job["metadata"], job["cost"], job["data"], job["added_tokens"]) == ({"team": "a"}, "0.4", None, [])
        [listed] = (await client.get("/v1/jobs")).json()["data"]
        assert listed == job
        [checkpoint] = (await client.get("/v1/checkpoints?job=job_1")).json()["data"]
        assert (checkpoint["kind"], checkpoint["validation_loss"], checkpoint["best"]) == ("adapter", None, False)
        [total] = (await client.get("/v1/usage")).json()["data"]
        assert (total["billable"], total["cost"]) == (1_000_000, "0.4")
        patched = await client.patch("/v1/jobs/job_1", json={"metadata": {"team": "b"}})
        assert patched.json()["metadata"] == {"team": "b"}
        on = await client.post(
            "/v1/jobs", json={"method": "sft", "from_checkpoint": "ckpt_1", "training_file": "file_1"}
        )
        assert (on.status_code, on.json()["adapter"]["rank"]) == (201, 8)
        spec = {"type": "reasoning_gym", "task": "chain_sum"}
        tuned = await client.post("/v1/jobs", json={"method": "rl", "from_checkpoint": "ckpt_1", "environment": spec})
        assert (tuned.status_code, tuned.json()["training_file"]) == (201, None), tuned.text
        assert (await client.post("/v1/environments", json={"spec": spec})).status_code == 201
        [model] = (await client.get("/v1/models")).json()["data"]
        assert (model["prices"]["train.sft"], model["prices"]["rollout.generated"]) == ("0.4", "0.4")
        assert (await client.delete("/v1/checkpoints/ckpt_1")).status_code == 409
        assert (await client.post(f"/v1/jobs/{on.json()['id']}/cancel")).json()["intent"] == "cancel"
    await app_engine.dispose()
    await system_engine.dispose()
