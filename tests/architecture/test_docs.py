"""What the documentation says is true, as far as a machine can tell."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from finery.data.rows import read_row
from finery.types.checkpoints import Checkpoint
from finery.types.environments import Environment, EnvironmentCreate, EnvironmentRun
from finery.types.errors import ErrorBody, Problem
from finery.types.files import File
from finery.types.jobs import Event, Job
from finery.types.methods import JobCreate
from finery.types.models import Model
from finery.types.rollouts import Rollout
from finery.types.usage import UsageRow
from finery_service.settings import Settings

from .sizes import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
RESOURCES: dict[str, type[BaseModel]] = {
    "job": Job,
    "event": Event,
    "file": File,
    "checkpoint": Checkpoint,
    "model": Model,
    "usage": UsageRow,
    "environment": Environment,
    "environment.run": EnvironmentRun,
    "rollout": Rollout,
}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, content) of every fenced block in the language."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(name(page), block) for page in PAGES for block in pattern.findall(page.read_text(encoding="utf-8"))]


def parse_example(example: dict[str, Any]) -> object:
    """The example as the class that it is one of. Raises when it is none, or a wrong one."""
    if "method" in example:
        return TypeAdapter(JobCreate).validate_json(json.dumps(example))
    if "spec" in example:
        return EnvironmentCreate.model_validate_json(json.dumps(example))
    if any(key in example for key in ("messages", "prompt", "text", "input_ids", "chosen")):
        return good_row(example)
    if "error" in example:
        return ErrorBody.model_validate(example)
    return RESOURCES[example["object"]].model_validate(example)


def good_row(value: Any) -> object:
    read = read_row(value)
    assert not isinstance(read, Problem), read
    return read


def documents(block: str) -> list[dict[str, Any]]:
    """The JSON objects of a block, one after the other."""
    decoder, found, rest = json.JSONDecoder(), [], block.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        found.append(value)
        rest = rest[end:].strip()
    return found


def test_there_are_examples_to_check() -> None:
    assert len(blocks("python")) >= 1
    assert len(blocks("json")) >= 3


@pytest.mark.parametrize(("page", "block"), blocks("json"))
def test_every_json_example_is_what_the_service_takes_or_answers(page: str, block: str) -> None:
    for example in documents(block):
        parse_example(example)


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "sft", "model": "m"},
        {"method": "sft", "model": "m", "training_file": "file_0", "epochs": 2},
        {"messages": [{"role": "user", "content": "alone"}]},
        {"error": {"code": "c"}},
        {"object": "nothing"},
        {"spec": {"type": "reasoning_gym"}},
        {"chosen": "a"},
    ],
)
def test_a_wrong_json_example_is_found(wrong: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r".+"):
        parse_example(wrong)


def test_the_full_job_of_the_readme_writes_out_every_default() -> None:
    examples = [one for page, block in blocks("json") if page == "README.md" for one in documents(block)]
    (shown,) = [one for one in examples if "hyperparameters" in one]
    short = {key: shown[key] for key in ("method", "model", "training_file")}
    adapter: TypeAdapter[Any] = TypeAdapter(JobCreate)
    assert adapter.validate_json(json.dumps(short)).model_dump(mode="json") == shown


@pytest.mark.parametrize(("page", "block"), blocks("python"))
def test_every_python_example_compiles(page: str, block: str) -> None:
    compile(block, page, "exec")


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_every_example_script_compiles(script: Path) -> None:
    compile(script.read_text(encoding="utf-8"), script.name, "exec")


def test_the_sample_is_64_conversations_in_the_format_of_uploads() -> None:
    lines = (ROOT / "examples/chat_sample.jsonl").read_bytes().splitlines()
    assert len(lines) == 64
    for line in lines:
        good_row(json.loads(line))
    for sample in ("pairs_sample", "words_sample"):
        for row in (ROOT / f"examples/{sample}.jsonl").read_text(encoding="utf-8").splitlines():
            good_row(json.loads(row))


def test_the_examples_model_is_the_one_of_the_catalogue() -> None:
    """`answer.py` reads it from the same cache entry that the workers made."""
    example = (ROOT / "examples/answer.py").read_text(encoding="utf-8")
    migration = (ROOT / "service/migrations/versions/0001_foundation.sql").read_text(encoding="utf-8")
    source = re.search(r'requirement="([^"]+)", member="([^"]+)"', example)
    assert source is not None
    assert f'"requirement": "{source[1]}", "member": "{source[2]}"' in migration


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_that_a_page_names_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)", page.read_text(encoding="utf-8"), re.MULTILINE))
    rules = re.findall(r"^([a-z][a-z -]*):", makefile, re.MULTILINE)
    assert not named - {target for rule in rules for target in rule.split()}


def settings_table(page: str) -> dict[str, str]:
    """Variable → default, as documented."""
    return dict(re.findall(r"^\| `(FINERY_[A-Z_]+)` \| ([^|]*?) ?\| [^|]+ \|$", page, re.MULTILINE))


def test_the_settings_table_has_every_setting_with_its_default() -> None:
    documented = settings_table((ROOT / "docs/operations.md").read_text(encoding="utf-8"))
    expected = {}
    for field, info in Settings.model_fields.items():
        default = str(info.default).replace(str(Path.home()), "~")
        expected[f"FINERY_{field.upper()}"] = "" if info.default in (None, "") else f"`{default}`"
    assert documented == expected
