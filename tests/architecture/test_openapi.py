"""The OpenAPI page is complete, true to itself, and the one in docs/."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from pydantic import TypeAdapter

from finery.types.environments import EnvironmentCreate, EnvironmentRunCreate
from finery.types.errors import ErrorBody
from finery.types.methods import JobCreate, JobUpdate
from finery.types.models import ModelCreate
from finery.types.previews import PreviewCreate
from finery.types.tenants import KeyCreate, TenantCreate
from finery_service import openapi_file

from .sizes import ROOT

SNAPSHOT = ROOT / "docs" / "openapi.json"
_ONE = (JobUpdate, ModelCreate, PreviewCreate, EnvironmentCreate, EnvironmentRunCreate, KeyCreate, TenantCreate)
BODIES: dict[tuple[str, ...], TypeAdapter[Any]] = {
    **{(kind.__name__,): TypeAdapter(kind) for kind in _ONE},
    ("SftJobCreate", "DpoJobCreate", "RlJobCreate"): TypeAdapter(JobCreate),
}
"""By the names of their schemas."""
NO_KEY = {"/livez", "/readyz", "/metrics"}


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(openapi_file.page())
    return found


def operations(page: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in page["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_the_page_in_docs_is_the_one_that_is_served() -> None:
    command = "python -m finery_service.openapi_file docs/openapi.json"
    assert SNAPSHOT.read_text(encoding="utf-8") == openapi_file.page(), f"the API has changed: run {command}"


def test_everything_has_a_name_and_a_sentence(page: dict[str, Any]) -> None:
    for path, method, operation in operations(page):
        where = f"{method} {path}"
        assert operation["summary"], where
        assert operation.get("description"), where
        for parameter in operation.get("parameters", []):
            assert parameter.get("description"), f"{where}: {parameter['name']}"
        for status, response in operation["responses"].items():
            assert response["description"], f"{where}: {status}"


def test_hyperparameters_and_fields_that_need_words_have_them(page: dict[str, Any]) -> None:
    schemas = page["components"]["schemas"]
    words = schemas["SftHyperparameters"]["properties"]["batch_tokens"]["description"]
    assert words.startswith("Tokens per optimizer update, padding not counted. Rows are never split over two updates,")
    assert schemas["DpoHyperparameters"]["properties"]["warmup_ratio"]["description"], "inherited ones, too"
    assert schemas["SftJobCreate"]["properties"]["merge_checkpoint"]["description"]
    assert schemas["Checkpoint"]["properties"]["best"]["description"]


def test_every_reference_leads_somewhere_and_every_schema_is_one(page: dict[str, Any]) -> None:
    schemas = page["components"]["schemas"]
    references = set(re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', json.dumps(page)))
    assert references <= set(schemas)
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_error_has_a_valid_example_of_its_own_status(page: dict[str, Any]) -> None:
    for path, method, operation in operations(page):
        for status, response in operation["responses"].items():
            where = f"{method} {path}: {status}"
            assert "x-request-id" in response["headers"], where
            if int(status) < 400:
                continue
            content = response["content"]["application/json"]
            error = ErrorBody.model_validate(content["example"], strict=True).error
            assert set(content["example"]["error"]) == {"message", "type", "code", "param"}, where
            assert (error.type == "server_error") == (int(status) >= 500), where
            assert error.code == response["description"], where
            assert content["schema"] == {"$ref": "#/components/schemas/ErrorBody"}, where


def test_routes_of_tenants_and_operators_tell_what_every_one_of_them_may_answer(page: dict[str, Any]) -> None:
    for path, method, operation in operations(page):
        where = f"{method} {path}"
        if path in NO_KEY:
            assert "security" not in operation, where
            continue
        assert operation["security"] == [{"key": []}], where
        assert {"400", "401", "500", "503"} <= set(operation["responses"]), where
        assert ("403" in operation["responses"]) != (method == "get" and path.startswith("/v1/models")), where
        assert ("{" in path) <= ("404" in operation["responses"]), where
        body = operation.get("requestBody")
        assert (body is None) or {"413", "415"} <= set(operation["responses"]), where
        once = "Idempotency-Key" in [parameter["name"] for parameter in operation.get("parameters", [])]
        assert once == (method == "post" and body is not None), where
        assert once == ("422" in operation["responses"]), f"{where}: we answer 400"


def test_every_example_is_valid_against_its_schema(page: dict[str, Any]) -> None:
    checked = []
    for where, schema, example in examples(page):
        validator = jsonschema.Draft202012Validator({**schema, "components": page["components"]})
        problems = [f"{problem.json_path}: {problem.message}" for problem in validator.iter_errors(example)]
        assert not problems, (where, problems)
        checked.append(where)
    named = "Job File Model Checkpoint Event UsageRow Tenant Key Preview Page_Job_ Environment EnvironmentRun Rollout"
    for name in [*named.split(), "Page_Environment_", "Page_Rollout_"]:
        assert name in checked


def examples(page: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """(where, schema, example) of schemas, parameters, requests and answers."""
    for name, schema in page["components"]["schemas"].items():
        if "example" in schema:
            yield name, schema, schema["example"]
    for path, method, operation in operations(page):
        where = f"{method} {path}"
        for parameter in operation.get("parameters", []):
            for example in parameter["schema"].get("examples", []):
                yield f"{where} {parameter['name']}", parameter["schema"], example
        answers = [response.get("content", {}) for response in operation["responses"].values()]
        for content in (*answers, operation.get("requestBody", {}).get("content", {})):
            for kind in content.values():
                if "example" in kind:
                    yield where, kind["schema"], kind["example"]
                for example in kind.get("examples", {}).values():
                    yield where, kind["schema"], example["value"]


def test_every_json_body_has_an_example_that_the_server_itself_takes(page: dict[str, Any]) -> None:
    seen = set()
    for path, method, operation in operations(page):
        content = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if content is None:
            continue
        schemas = content["schema"].get("oneOf", [content["schema"]])
        names = tuple(schema["$ref"].rpartition("/")[2] for schema in schemas)
        assert content["examples"], f"{method} {path}"
        for example in content["examples"].values():
            BODIES[names].validate_json(json.dumps(example["value"]))
        seen.add(names)
    assert seen == set(BODIES)
