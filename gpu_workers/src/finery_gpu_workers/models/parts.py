"""What a job's frozen base is made of, besides the model of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Part:
    """A checkpoint below the job's own adapter; parts apply in order."""

    kind: Literal["full", "merge"]
    """`full`: a whole model that replaces all before it; `merge`: an adapter whose product is added to the weights."""
    folder: Path
