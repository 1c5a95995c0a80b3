"""The command `finery`. It needs the extra `cli`: pip install "finery[cli]"."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 the server refused or the job failed, 2 wrong usage, 130 ctrl-C."""
    try:
        from finery.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        print(
            f'The command needs {error.name}, which is not installed. Run: pip install "finery[cli]"', file=sys.stderr
        )
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # while the imports still run
        raise SystemExit(130) from None
    raise SystemExit(run(arguments))
