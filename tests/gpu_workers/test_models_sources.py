"""What the processes that fetch and convert a base model are given."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from finery.types.models import WheelSource
from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.catalog import resolve

SECRETS = (
    "FINERY_ATTEMPT_TOKEN", "FINERY_DATABASE_URL", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PGPASSWORD",
    "STRIPE_API_KEY", "GOOGLE_APPLICATION_CREDENTIALS",
)  # fmt: skip


def test_no_secret_reaches_the_package_installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "secret")
    needed = {"PIP_INDEX_URL": "http://localhost/simple", "https_proxy": "http://proxy", "SSL_CERT_FILE": "/ca.pem"}
    for name, value in needed.items():
        monkeypatch.setenv(name, value)
    seen: list[dict[str, str]] = []

    def spy(arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        seen.append(options["env"])
        return subprocess.CompletedProcess(arguments, 1, "", "no index")

    monkeypatch.setattr(subprocess, "run", spy)
    with pytest.raises(WorkerError, match="no index"):
        resolve(WheelSource(type="wheel", requirement="some-model==1.0", member="m.gguf"), tmp_path)
    (environment,) = seen
    assert not environment.keys() & set(SECRETS)
    assert environment.items() >= needed.items()
    assert "PATH" in environment
