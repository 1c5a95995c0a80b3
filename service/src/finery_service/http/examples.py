"""One example of every resource, for the OpenAPI page. Made of the classes themselves, so that they stay true."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from finery.types.base import Resource
from finery.types.checkpoints import Checkpoint, CheckpointFile
from finery.types.data import DataReport, LengthBin, SetReport, Warning  # noqa: A004 - the word of the field
from finery.types.environments import Environment, EnvironmentRun, GradedAnswer, RewardFailure, ShownPrompt
from finery.types.errors import Problem
from finery.types.files import File
from finery.types.jobs import Event, Job, Progress
from finery.types.methods import LoraAdapter, Resources, SftHyperparameters
from finery.types.models import Model
from finery.types.pages import Deleted
from finery.types.previews import Preview, PreviewRow, PreviewToken
from finery.types.rollouts import Rollout
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

_SET = SetReport(
    format="chat",
    rows=61,
    tokens=48_213,
    trained_tokens=12_480,
    dropped_rows=2,
    dropped={"no_trainable_tokens": 2},
    dropped_lines=(17, 40),
    truncated_rows=1,
    truncated_lines=(9,),
    longest=2210,
    shortest=38,
    lengths=(LengthBin(up_to=64, rows=5), LengthBin(up_to=4096, rows=58)),
    digest=_SHA256,
)
_WARNING = Warning(
    code="reasoning_not_trained",
    message="expected reasoning to be trained, found that the model's template leaves it out of earlier turns",
    param="hyperparameters.train_on",
)
_DATA = DataReport(
    sets={"train": _SET}, warnings=(_WARNING,), template_sha256=_SHA256, tokenizer_sha256=_SHA256, vocab_size=49_152
)
_GRADER = {
    "type": "string_check",
    "name": "string_check",
    "operation": "eq",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
}
_QUESTION: dict[str, Any] = {"role": "user", "content": "6 × 7?"}
_ITEM = {"messages": [_QUESTION], "answer": "42"}
_FAILURE = RewardFailure(code="timeout", message="expected a reward within 10 s, found none", grader="python")
_PREVIEW_ROW = PreviewRow(
    line=1,
    tokens=(PreviewToken(id=808, text="ok", trained=True), PreviewToken(id=2, text="<|im_end|>", trained=True)),
    trained_tokens=2,
)

_RESOURCES: tuple[Resource, ...] = (
    _DATA,
    _SET,
    _WARNING,
    Deleted(object="checkpoint", id=f"ckpt_{TAIL}"),
    Preview(id=f"prev_{TAIL}", file=_FILE, model=_MODEL, status="ready", rows=(_PREVIEW_ROW,), created_at=_AT),
    _FAILURE,
    Environment(
        id=f"env_{TAIL}",
        project=_PROJECT,
        name="support",
        type="prompts",
        spec={"type": "prompts", "file": _FILE, "held_out_file": None, "grader": _GRADER},
        created_at=_AT,
    ),
    EnvironmentRun(
        id=f"erun_{TAIL}",
        environment=f"env_{TAIL}",
        status="ready",
        prompt_count=500,
        prompts=(ShownPrompt(index=0, messages=(_QUESTION,), item=_ITEM),),
        answers=(
            GradedAnswer(prompt=0, output_text="42", reward=1.0, parts={"string_check": 1.0}, seconds=0.01),
            GradedAnswer(prompt=0, output_text="…", failure=_FAILURE, seconds=10.0),
        ),
        created_at=_AT,
    ),
    Rollout(
        id="roll_12_0",
        job=_JOB,
        step=12,
        group=0,
        sample=0,
        prompt=7,
        messages=(_QUESTION,),
        item=_ITEM,
        prompt_tokens=(1, 38, 1704, 2),
        tokens=(36, 34, 2),
        text="42",
        log_probs=(-0.12, -0.04, -0.01),
        versions=(11, 11, 11),
        finish="stop",
        reward=1.0,
        parts={"string_check": 1.0},
        advantage=0.7,
        trained=True,
        seconds={"generate": 0.31, "reward": 0.01},
    ),
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
        data=_DATA,
        best_checkpoint=f"ckpt_{TAIL}",
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
        kind="adapter",
        validation_loss=1.874,
        best=True,
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
