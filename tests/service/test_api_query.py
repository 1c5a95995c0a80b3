from __future__ import annotations

import pytest

from finery_testing.api import Api


@pytest.mark.parametrize(
    ("path", "wrong", "known"),
    [
        ("/v1/usage?jobs=job_1&group_by=sku", "jobs", "one of the query parameters end, group_by, job, start"),
        ("/v1/checkpoints?limit=1&afer=ckpt_1", "afer", "one of the query parameters after, job, limit"),
        ("/v1/jobs/job_1?verbose=1", "verbose", "no query parameters"),
        ("/v1/jobs/job_1/events?Limit=1", "Limit", "one of the query parameters after, limit"),
    ],
)
async def test_a_query_parameter_with_a_typo_is_refused_by_name(api: Api, path: str, wrong: str, known: str) -> None:
    answer = await (await api.tenant()).get(path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unknown_parameter", wrong)
    assert error["message"] == f"Expected {known}, found '{wrong}'."


async def test_known_query_parameters_pass_and_probes_ignore_the_rest(api: Api) -> None:
    door = await api.tenant()
    assert (await door.get("/v1/usage?group_by=sku&group_by=day")).status_code == 200
    assert (await door.get("/v1/jobs?limit=1")).status_code == 200
    assert (await door.get("/livez?probe=1")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/jobs?limit=1&limit=2", "/v1/usage?job=job_1&group_by=sku&job=job_2"])
async def test_a_parameter_that_is_no_list_is_refused_if_it_is_given_twice(api: Api, path: str) -> None:
    answer = await (await api.tenant()).get(path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "repeated_parameter")
    assert error["param"] == path.partition("?")[2].partition("=")[0]


async def test_a_list_that_never_ends_is_refused_not_sent_to_the_database(api: Api) -> None:
    door = await api.tenant()
    assert (await door.get("/v1/jobs?" + "&".join(["state=queued"] * 100))).status_code == 200
    for value in ("queued", "wrong"):
        answer = await door.get("/v1/jobs?" + "&".join([f"state={value}"] * 3000))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_parameters")


async def test_many_wrong_values_are_told_by_the_first_of_them(api: Api) -> None:
    answer = await (await api.tenant()).get("/v1/jobs?" + "&".join(["state=wrong"] * 100))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
    assert len(answer.json()["error"]["details"]) == 20
