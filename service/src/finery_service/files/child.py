"""The check of a foreign parquet file, in a process that may be killed: stdin is the file.

Its memory is limited, and it can write no file, before anything is read. The report is JSON on stdout; exit status 3
says that the memory did not suffice.
"""

from __future__ import annotations

import resource
import sys

MEMORY_BYTES = 2 * 2**30
"""Of address space: the libraries alone take 0.3 GiB."""
TOO_LITTLE_MEMORY = 3


def main() -> int:
    _limit()
    from pathlib import Path

    from pydantic import TypeAdapter

    from finery.data.check import Report, check_parquet

    try:
        report = check_parquet(Path("/dev/stdin"))
    except MemoryError:
        return TOO_LITTLE_MEMORY
    sys.stdout.buffer.write(TypeAdapter(Report).dump_json(report))
    return 0


def _limit() -> None:
    if sys.platform == "linux":  # macOS refuses a limit on address space
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


if __name__ == "__main__":
    sys.exit(main())
