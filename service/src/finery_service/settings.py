"""Settings of all processes, from `FINERY_*` environment variables. Secrets never show in their repr."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from finery.types.urls import base_url

ScoreModels = dict[Annotated[str, AfterValidator(base_url)], SecretStr | None]


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="FINERY_", extra="ignore", hide_input_in_errors=True)

    owner_dsn: SecretStr | None = None
    """PostgreSQL as `finery_owner`; only `migrate` needs it."""
    app_dsn: SecretStr | None = None
    """PostgreSQL as `finery_app`: tenants' requests, under row-level security."""
    system_dsn: SecretStr | None = None
    """PostgreSQL as `finery_system`: operators' requests, worker RPC, reconciler."""
    store_url: str = ""
    """Object store: `file:///path` or `s3://bucket/prefix`."""
    worker_secret: SecretStr | None = None
    """Attempt tokens are derived from it; the RPC server and the reconciler share it."""
    api_host: str = "127.0.0.1"
    api_port: Annotated[int, Field(ge=0, le=65535)] = 8700
    rpc_host: str = "127.0.0.1"
    rpc_port: Annotated[int, Field(ge=0, le=65535)] = 8701
    rpc_address: str = "127.0.0.1:8701"
    """Where workers reach the RPC server."""
    ray_address: str = ""
    """`host:port` of the Ray head's GCS."""
    ray_token: SecretStr | None = None
    """The cluster's RAY_AUTH_TOKEN; only `reconcile` needs it."""
    model_cache: Path = Path.home() / ".cache" / "finery" / "models"
    max_file_bytes: Annotated[int, Field(ge=1)] = 10 * 2**30
    max_body_bytes: Annotated[int, Field(ge=1)] = 2**20
    """Limit of a JSON body."""
    lease_seconds: Annotated[float, Field(gt=0)] = 15.0
    start_seconds: Annotated[float, Field(gt=0)] = 120.0
    """How long an attempt may take from its launch to its first call."""
    grant_steps: Annotated[int, Field(ge=1)] = 8
    """Steps that a worker may start ahead of the last acknowledged one."""
    reconcile_seconds: Annotated[float, Field(gt=0)] = 0.5
    leader_seconds: Annotated[float, Field(gt=0)] = 5.0
    """Lease of the reconciler's leadership: how long after its death another one takes over."""
    grace_seconds: Annotated[float, Field(gt=0)] = 60.0
    """How long a running attempt may take to checkpoint and finish once it is told to stop."""
    prepare_attempts: Annotated[int, Field(ge=1)] = 2
    """Prepare attempts at once."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    """Where workers train."""
    torch_threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of a worker; None: its physical cores."""
    score_models: ScoreModels = {}
    """Model servers that graders of the type score_model may use: JSON, `{base URL: API key or null}`. Workers reach
    them; customers never see a key."""
    heartbeat_seconds: Annotated[float, Field(gt=0)] = 10.0
    """Between comments on an idle event stream."""


def required(value: SecretStr | None, name: str) -> str:
    """The secret's text, or an error that says which variable is missing."""
    if value is None or not value.get_secret_value():
        raise SystemExit(f"{name} is not set: expected a PostgreSQL URL or secret in the environment")
    return value.get_secret_value()
