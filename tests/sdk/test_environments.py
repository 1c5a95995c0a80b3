"""Which request each call about environments is, and what is made of the answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from finery import (
    BadRequestError,
    EnvironmentRunFailedError,
    FineryError,
    InternalServerError,
    InvalidArgumentError,
    WaitTimeoutError,
    graders,
)
from finery.types.environments import (
    Environment,
    EnvironmentRun,
    EnvironmentRunCreate,
    PromptsEnvironment,
    ReasoningGymEnvironment,
    SampleAnswer,
)
from finery.types.files import File

from .support import NOW, Client, Time, error_json, file_json, items, mocked, page_json, value

GYM = {"type": "reasoning_gym", "task": "chain_sum"}
CHECK = {"type": "string_check", "operation": "eq", "reference": "{{ item.answer }}"}


def environment_json(**changes: Any) -> dict[str, Any]:
    environment = {"id": "env_1", "project": "proj_1", "type": "reasoning_gym", "spec": GYM, "created_at": NOW}
    return {"object": "environment", **environment, **changes}


def run_json(status: str = "ready", **changes: Any) -> dict[str, Any]:
    run = {"id": "erun_1", "environment": "env_1", "status": status, "created_at": NOW}
    graded = [{"prompt": 0, "output_text": "4", "reward": 1.0}] if status == "ready" else []
    return {"object": "environment.run", **run, "answers": graded, **changes}


class Server:
    """Answers with one document after the other, the last one for ever."""

    def __init__(self, *documents: Any) -> None:
        self.documents = list(documents)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        document = self.documents.pop(0) if len(self.documents) > 1 else self.documents[0]
        return document if isinstance(document, httpx.Response) else httpx.Response(200, json=document)

    @property
    def sent(self) -> list[str]:
        return [f"{request.method} {request.url.path}" for request in self.requests]

    def body(self, place: int = 0) -> Any:
        return json.loads(self.requests[place].content)


async def test_an_environment_is_kept_from_fields_or_from_a_spec(kind: Client) -> None:
    server = Server(environment_json())
    create = mocked(kind, server).environments.create
    assert (await value(create(**GYM, size=50, name="sums", project="proj_2"))).id == "env_1"
    await value(create(GYM, name="sums", project="proj_2", idempotency_key="mine"))
    await value(create(ReasoningGymEnvironment(type="reasoning_gym", task="chain_sum", config={"max_terms": 3})))
    assert server.sent == ["POST /v1/environments"] * 3
    named = {"name": "sums", "project": "proj_2"}
    assert server.body(0) == {**named, "spec": {**GYM, "size": 50}}
    assert server.body(1) == {**named, "spec": GYM}
    assert server.body(2)["spec"]["config"] == {"max_terms": 3}
    assert set(server.body(2)) == {"spec"}, "what is not given is the server's to choose"
    keys = [request.headers["idempotency-key"] for request in server.requests]
    assert (keys[1], len(set(keys))) == ("mine", 3)


async def test_a_file_stands_for_its_id_and_a_grader_is_a_class_or_plain(kind: Client, tmp_path: Any) -> None:
    server = Server(environment_json())
    create = mocked(kind, server).environments.create
    file = File.model_validate(file_json(format="prompts"))
    (tmp_path / "reward.py").write_text("def grade(sample, item):\n    return 1.0\n")
    await value(create(type="prompts", file=file, grader=graders.python(tmp_path / "reward.py", timeout_seconds=2)))
    await value(create({"type": "prompts", "file": file, "grader": CHECK}))
    sent = [PromptsEnvironment.model_validate_json(json.dumps(server.body(n)["spec"])) for n in (0, 1)]
    assert [one.file for one in sent] == ["file_1", "file_1"]
    assert sent[0].grader.model_dump() == {
        "type": "python",
        "name": "python",
        "source": "def grade(sample, item):\n    return 1.0\n",
        "timeout_seconds": 2.0,
    }
    assert server.body(1)["spec"]["grader"] == CHECK


async def test_a_spec_and_fields_or_neither_is_wrong_usage(kind: Client) -> None:
    server = Server(environment_json())
    create = mocked(kind, server).environments.create
    with pytest.raises(TypeError, match="found both: size"):
        await value(create(GYM, size=3))
    with pytest.raises(TypeError, match="found neither"):
        await value(create(name="sums"))
    assert server.requests == []


async def test_the_server_says_which_field_is_wrong(kind: Client) -> None:
    refused = error_json("invalid_value", "spec.task: expected a task.", param="spec.task")
    with pytest.raises(BadRequestError) as caught:
        await value(mocked(kind, Server(httpx.Response(400, json=refused))).environments.create(type="reasoning_gym"))
    assert (caught.value.param, caught.value.code) == ("spec.task", "invalid_value")


async def test_environments_are_listed_page_by_page_fetched_and_deleted(kind: Client) -> None:
    server = Server(
        page_json([environment_json()], has_more=True, last_id="env_1"),
        page_json([environment_json(id="env_2")]),
        environment_json(),
        environment_json(),
        httpx.Response(204),
    )
    environments = mocked(kind, server).environments
    assert [one.id for one in await items(environments.list(project="proj_1", limit=1))] == ["env_1", "env_2"]
    queries = [dict(request.url.params) for request in server.requests]
    assert queries == [{"project": "proj_1", "limit": "1"}, {"project": "proj_1", "limit": "1", "after": "env_1"}]
    found = await value(environments.retrieve("env_1"))
    assert await value(environments.get(found)) == found
    assert await value(environments.delete(found)) is None
    assert server.sent[2:] == ["GET /v1/environments/env_1"] * 2 + ["DELETE /v1/environments/env_1"]


async def test_an_environment_has_the_calls_of_its_client(kind: Client) -> None:
    server = Server(environment_json(), run_json(), httpx.Response(204))
    found = await value(mocked(kind, server).environments.retrieve("env_1"))
    assert (await value(found.run(["4"], prompts=1))).answers[0].reward == 1.0
    assert server.body(1) == {"answers": [{"output_text": "4"}], "prompts": 1}
    assert await value(found.delete()) is None
    assert server.sent[1:] == ["POST /v1/environments/env_1/runs", "DELETE /v1/environments/env_1"]
    with pytest.raises(RuntimeError, match=r"client\.environments\.retrieve"):
        Environment.model_validate(environment_json()).run()


async def test_a_run_is_asked_for_once_and_looked_at_ever_less_often(kind: Client) -> None:
    time, server = Time(), Server(*[run_json("pending")] * 8, run_json())
    environment = Environment.model_validate(environment_json())
    found = await value(mocked(kind, server, time).environments.run(environment, ["4"]))
    assert found == EnvironmentRun.model_validate(run_json())
    assert server.sent == ["POST /v1/environments/env_1/runs", *["GET /v1/environments/env_1/runs/erun_1"] * 8]
    assert server.requests[0].headers["idempotency-key"]
    assert time.slept[:3] == pytest.approx([0.2, 0.3, 0.45])
    assert time.slept == sorted(time.slept)


ANSWERS = ["4", (3, "5"), {"output_text": "6", "prompt": 1}, SampleAnswer(output_text="7", prompt=2)]
GRADED = [("4", 0), ("5", 3), ("6", 1), ("7", 2)]


@pytest.mark.parametrize(
    ("answers", "sent"),
    [
        (None, []),
        ([], []),
        ("4", [("4", 0)]),
        (ANSWERS, GRADED),
        (tuple(ANSWERS), GRADED),
        ([[3, "5"]], [("5", 3)]),
        ((3, "5"), [("5", 3)]),
        (SampleAnswer(output_text="7", prompt=2), [("7", 2)]),
        ({"output_text": "6"}, [("6", 0)]),
    ],
)
async def test_answers_are_given_in_every_way(kind: Client, answers: Any, sent: list[tuple[str, int]]) -> None:
    server = Server(run_json())
    await value(mocked(kind, server).environments.run("env_1", answers, prompts=2))
    asked = EnvironmentRunCreate.model_validate_json(server.requests[0].content)
    assert [(one.output_text, one.prompt) for one in asked.answers] == sent
    assert asked.prompts == 2


@pytest.mark.parametrize("answers", [[7], [3, 5], [("3", "5")], [None]])
async def test_what_is_no_answer_is_refused_before_anything_is_sent(kind: Client, answers: Any) -> None:
    server = Server(run_json())
    with pytest.raises(InvalidArgumentError, match=r'expected an answer as a text, a pair such as \(3, "text"\)'):
        await value(mocked(kind, server).environments.run("env_1", answers))
    assert server.requests == []


async def test_a_run_that_fails_raises_why(kind: Client) -> None:
    error = {"message": "No sandbox can be had.", "type": "job_error", "code": "sandbox_unavailable"}
    server = Server(run_json("pending"), run_json("failed", error=error))
    said = r"Run erun_1 of env_1 failed \(sandbox_unavailable\): No sandbox can be had\."
    with pytest.raises(EnvironmentRunFailedError, match=said) as caught:
        await value(mocked(kind, server).environments.run("env_1"))
    assert isinstance(caught.value, FineryError)
    assert caught.value.run.status == "failed"


async def test_a_run_that_does_not_come_is_given_up_at_the_timeout(kind: Client) -> None:
    time = Time()
    with pytest.raises(WaitTimeoutError, match="Run erun_1 of env_1 was not ready within 10 s"):
        await value(mocked(kind, Server(run_json("pending")), time).environments.run("env_1", timeout=10))
    assert time.now == pytest.approx(10)


async def test_a_server_that_is_away_for_a_look_is_asked_again(kind: Client) -> None:
    away = httpx.Response(503, json=error_json("away"))
    server = Server(run_json("pending"), away, run_json())
    assert (await value(mocked(kind, server).environments.run("env_1"))).status == "ready"
    with pytest.raises(InternalServerError):
        await value(mocked(kind, Server(run_json("pending"), away)).environments.run("env_1"))
