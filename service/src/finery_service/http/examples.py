"""One example of every resource, for the OpenAPI page. Made of the classes themselves, so that they stay true."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from finery.types.base import Resource
from finery.types.checkpoints import Checkpoint, CheckpointFile
from finery.types.errors import Problem
from finery.types.files import File
from finery.types.jobs import Event, Job, Progress
from finery.types.methods import LoraAdapter, Resources, SftHyperparameters
from finery.types.models import Model
from finery.types.tenants import Key, Tenant
from finery.types.usage import UsageRow

_AT = datetime(2026, 12, 1, 9, 30, tzinfo=UTC)
_SHA256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
TAIL = "00d263ah5014n0c2d1c6w39ndv964xyaw7k6"
_JOB, _PROJECT, _TENANT, _FILE = f"job_{TAIL}", f"proj_{TAIL}", f"ten_{TAIL}", f"file_{TAIL}"
_MODEL = "smollm2-135m-instruct"

_PROBLEM = Problem(
    line=7,
    offset=1042,
    path="messages[0].role",
    code="unknown_role",
    message="expected system, user, assistant, found 'human'",
    hint="Rename the role.",
)

_RESOURCES: tuple[Resource, ...] = (
    Tenant(id=_TENANT, name="acme", default_project=_PROJECT, created_at=_AT),
    Key(
        id=f"key_{TAIL}",
        name="laptop",
        tenant=_TENANT,
        project=_PROJECT,
        prefix="fny_rg88nt",
        secret=None,
        created_at=_AT,
    ),
    File(
        id=_FILE,
        project=_PROJECT,
        name="train.jsonl",
        bytes=52_431,
        sha256=_SHA256,
        status="invalid",
        format="chat",
        rows=63,
        errors=(_PROBLEM,),
        error_count=1,
        created_at=_AT,
    ),
    Model(
        id=f"mdl_{TAIL}",
        name=_MODEL,
        max_length=8192,
        parameters=134_515_008,
        prices={"train.sft": "0.4"},
        created_at=_AT,
    ),
    Job(
        id=_JOB,
        project=_PROJECT,
        method="sft",
        model=_MODEL,
        training_file=_FILE,
        seed=0,
        adapter=LoraAdapter().model_dump(mode="json"),
        hyperparameters=SftHyperparameters().model_dump(mode="json"),
        resources=Resources().model_dump(mode="json"),
        priority="normal",
        state="running",
        progress=Progress(step=12, total_steps=200, trained_tokens=48_213),
        usage={"train.sft": 48_213},
        cost=Decimal("0.0192852"),
        attempts=1,
        created_at=_AT,
        started_at=_AT,
    ),
    Event(job=_JOB, seq=17, type="metric", data={"step": 12, "loss": 2.31, "trained_tokens": 4011}, created_at=_AT),
    Checkpoint(
        id=f"ckpt_{TAIL}",
        job=_JOB,
        project=_PROJECT,
        step=50,
        final=False,
        model=_MODEL,
        files=(CheckpointFile(path="adapter_model.safetensors", bytes=9_787_472, sha256=_SHA256),),
        bytes=9_787_472,
        created_at=_AT,
    ),
    UsageRow(sku="train.sft", quantity=48_213, billable=40_960, provisional=7_253, void=0, cost=Decimal("0.0192852")),
)


def examples() -> dict[str, dict[str, Any]]:
    """By the name of the class."""
    return {type(resource).__name__: resource.model_dump(mode="json") for resource in _RESOURCES}
