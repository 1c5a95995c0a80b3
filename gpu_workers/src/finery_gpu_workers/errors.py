"""What a worker can tell the customer: a stable code and a sentence that says what to do."""

from __future__ import annotations


class WorkerError(Exception):
    """Ends the job; `code` is stable, `message` says what was expected, what was found, where, what to do."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"
