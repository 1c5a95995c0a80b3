from __future__ import annotations

from finery_testing.api import Api


async def test_job_is_created_and_read_back(api: Api) -> None:
    door = await api.tenant()
    created = await door.job()
    assert created.status_code == 201, created.text
    job = created.json()
    assert (job["state"], job["reason"], job["intent"]) == ("validating", "waiting_for_validation", "run")
    again = await door.get(f"/v1/jobs/{job['id']}")
    assert again.json() == job
