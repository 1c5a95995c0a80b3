"""How much code in the sandbox may use, and the error where there is no sandbox."""

from __future__ import annotations

from dataclasses import dataclass

from finery_gpu_workers.errors import WorkerError

_MIB = 2**20


class SandboxUnavailable(WorkerError):  # noqa: N818 - the name of a state, as in the job's reason
    """Neither backend works here; the code is not run."""

    def __init__(self, message: str) -> None:
        super().__init__("sandbox_unavailable", message)


@dataclass(frozen=True)
class Limits:
    memory_bytes: int = 1024 * _MIB
    """Of address space for each process, and of resident memory for all of them together (seen every 0.1 s)."""
    processes: int = 32
    """Threads included."""
    open_files: int = 128
    file_bytes: int = 16 * _MIB
    tmp_bytes: int = 64 * _MIB
    """Of all files in the folder for temporary files, which is memory."""
    tmp_files: int = 4096
    reply_bytes: int = 4 * _MIB
    """Of one answer: whoever reads it needs many times as much memory."""

    def __post_init__(self) -> None:
        if bad := [name for name, value in vars(self).items() if value < 1]:
            raise ValueError(f"limits: expected numbers above 0, found {bad[0]} {getattr(self, bad[0])}")
