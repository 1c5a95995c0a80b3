"""Everything the client raises on purpose. `except FineryError` catches all of it."""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from pydantic import ValidationError

from finery._visible import lines
from finery.types.environments import EnvironmentRun
from finery.types.errors import ErrorBody, ErrorDetail
from finery.types.jobs import Job
from finery.types.previews import Preview


class FineryError(Exception):
    """Base of all errors of this package."""


class ConfigurationError(FineryError):
    """The client cannot be made: no key, or a base URL that is none."""


class InvalidArgumentError(FineryError, ValueError):
    """What was passed cannot be sent: an empty id, a time without a zone, NaN. Nothing was sent."""


class APIError(FineryError):
    """The server refused a call, or answered what cannot be understood.

    `status`: HTTP status, None if no answer came. `code`: stable and machine-readable. `type`: class of error.
    `param`: the field that is wrong, as in `hyperparameters.learning_rate`. `details`: more, as in the lines of a
    file. `request_id`: quote it when you ask for help.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        type: str | None = None,  # noqa: A002 (the wire's word)
        param: str | None = None,
        details: list[dict[str, Any]] | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.type = type
        self.param = param
        self.details = details
        self.request_id = request_id
        self.retry_after = retry_after
        """Seconds that the server asks to wait, if it does."""
        self.should_retry = should_retry
        """The server's own word on whether to try again, if it gave one."""

    def __str__(self) -> str:
        facts = [
            f"HTTP {self.status}" if self.status is not None else None,
            self.code,
            f"param {self.param}" if self.param else None,
            f"request {self.request_id}" if self.request_id else None,
        ]
        known = ", ".join(fact for fact in facts if fact)
        return f"{self.message} ({known})" if known else self.message


class APIConnectionError(APIError):
    """No answer: refused, cut, or not found. The call may or may not have been carried out."""


class APITimeoutError(APIConnectionError):
    """No answer in time. The call may or may not have been carried out."""


class BadRequestError(APIError):
    """400"""


class AuthenticationError(APIError):
    """401"""


class PermissionDeniedError(APIError):
    """403"""


class NotFoundError(APIError):
    """404; also for what belongs to another tenant."""


class ConflictError(APIError):
    """409"""


class PayloadTooLargeError(APIError):
    """413"""


class UnprocessableEntityError(APIError):
    """422"""


class RateLimitError(APIError):
    """429"""


class InternalServerError(APIError):
    """500 and above."""


class EventGapError(FineryError):
    """A job's history, which is gapless by contract, arrived with a hole in it."""


class DownloadError(FineryError):
    """A file could not be fetched as its checkpoint describes it."""


class WaitTimeoutError(FineryError, TimeoutError):
    """A wait ran into its own `timeout`; what was waited for goes on."""


class JobFailedError(FineryError):
    """The job that was waited for ended otherwise than `succeeded`. It is in `job`."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.job = job

    def __str__(self) -> str:
        job = self.job
        why = job.error.message if job.error else job.message
        code = job.error.code if job.error else job.reason
        return (
            f"Job {job.id} ended {job.state!s}" + (f" ({code})" if code else "") + (f": {lines(why)}" if why else ".")
        )


class PreviewFailedError(FineryError):
    """The preview that was asked for cannot be made. It is in `preview`."""

    def __init__(self, preview: Preview) -> None:
        super().__init__(preview)
        self.preview = preview

    def __str__(self) -> str:
        error = self.preview.error
        said = f" ({error.code}): {lines(error.message)}" if error else "."
        return f"Preview {self.preview.id} of {self.preview.file} with {self.preview.model} failed{said}"


class EnvironmentRunFailedError(FineryError):
    """The environment could not be run, so that nothing was graded. It is in `run`.

    An answer without a reward is no such error: look at its `failure`.
    """

    def __init__(self, run: EnvironmentRun) -> None:
        super().__init__(run)
        self.run = run

    def __str__(self) -> str:
        error = self.run.error
        said = f" ({error.code}): {lines(error.message)}" if error else "."
        return f"Run {self.run.id} of {self.run.environment} failed{said}"


_BY_STATUS: dict[int, type[APIError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    413: PayloadTooLargeError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}


def from_response(status: int, headers: Mapping[str, str], body: bytes) -> APIError:
    """The error for an HTTP answer that is not a success. `headers` are looked up in lower case."""
    kind = _BY_STATUS.get(status, InternalServerError if status >= 500 else APIError)
    try:
        detail = ErrorBody.model_validate_json(body).error
    except ValidationError:
        detail = _foreign(status, headers, body)
    return kind(
        detail.message,
        status=status,
        code=detail.code,
        type=detail.type,
        param=detail.param,
        details=detail.details,
        request_id=headers.get("x-request-id"),
        retry_after=_retry_after(headers),
        should_retry={"true": True, "false": False}.get(headers.get("x-should-retry", "").lower()),
    )


def _foreign(status: int, headers: Mapping[str, str], body: bytes) -> ErrorDetail:
    """What to say when something that is not Finery answered, such as a proxy."""
    text = " ".join(body[:300].decode("utf-8", "replace").split())
    kind = headers.get("content-type", "no content type")
    message = f"Expected Finery's error format with HTTP {status}, found {kind}: {text[:200]!r}. Check the base URL."
    return ErrorDetail(message=message, type="server_error" if status >= 500 else "unknown", code=f"http_{status}")


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds; a date is taken against the answer's own `Date`, so the client's clock does not matter."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        wait = parsedate_to_datetime(value) - parsedate_to_datetime(headers["date"])
    except (ValueError, KeyError, TypeError):
        return None
    return max(0.0, wait.total_seconds())
