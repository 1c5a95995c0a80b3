"""Finery's Python client.

    from finery import Finery

    client = Finery()  # FINERY_BASE_URL, FINERY_API_KEY
    file = client.files.upload("chats.jsonl")
    job = client.jobs.create(method="sft", model="smollm2-135m-instruct", training_file=file.id)
    job = client.jobs.wait(job.id)

Names load on first use (PEP 562): importing `finery.types` loads no HTTP client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finery import graders
    from finery._runtime import Runtime
    from finery.client import AsyncFinery, Finery
    from finery.errors import (
        APIConnectionError,
        APIError,
        APITimeoutError,
        AuthenticationError,
        BadRequestError,
        ConfigurationError,
        ConflictError,
        DownloadError,
        EnvironmentRunFailedError,
        EventGapError,
        FineryError,
        InternalServerError,
        InvalidArgumentError,
        JobFailedError,
        NotFoundError,
        PayloadTooLargeError,
        PermissionDeniedError,
        PreviewFailedError,
        RateLimitError,
        UnprocessableEntityError,
        WaitTimeoutError,
    )

__all__ = [
    "APIConnectionError",
    "APIError",
    "APITimeoutError",
    "AsyncFinery",
    "AuthenticationError",
    "BadRequestError",
    "ConfigurationError",
    "ConflictError",
    "DownloadError",
    "EnvironmentRunFailedError",
    "EventGapError",
    "Finery",
    "FineryError",
    "InternalServerError",
    "InvalidArgumentError",
    "JobFailedError",
    "NotFoundError",
    "PayloadTooLargeError",
    "PermissionDeniedError",
    "PreviewFailedError",
    "RateLimitError",
    "Runtime",
    "UnprocessableEntityError",
    "WaitTimeoutError",
    "graders",
]

_ELSEWHERE = {"Finery": "finery.client", "AsyncFinery": "finery.client", "Runtime": "finery._runtime"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("finery")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "graders":
        return import_module("finery.graders")
    value = getattr(import_module(_ELSEWHERE.get(name, "finery.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
