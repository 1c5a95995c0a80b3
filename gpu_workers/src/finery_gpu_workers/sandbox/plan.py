"""What the sandbox's keeper is told, as JSON. Standard library only."""

from __future__ import annotations

from typing import Literal, TypedDict


class Plan(TypedDict):
    backend: Literal["bubblewrap", "landlock"]
    uid: int | None
    """To run as; None: as we do."""
    argv: list[str]
    python: str
    read: list[str]
    masked: list[str]
    """Not to be seen, within what may be read."""
    bwrap: str | None
    seccomp: str
    """BPF, hex."""
    limits: dict[str, int]
    """As in `RLIMIT_AS`."""
    memory_bytes: int
    tmp_bytes: int
    tmp_files: int
    lifeline: int
    """Descriptors of the keeper: what is closed when all is to end; where replies go; where the report goes."""
    result: int
    report: int
