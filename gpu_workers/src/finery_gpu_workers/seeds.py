"""Everything that makes a run repeatable: derived seeds, the thread count, deterministic kernels."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping
from pathlib import Path


def deterministic(seed: int, *, threads: int | None = None) -> None:
    """Seeds the global generators, asks for deterministic kernels, fixes the thread count (sums depend on it)."""
    import torch  # only what trains pays for loading it

    # Read by cuBLAS when its first handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(threads or torch_threads(os.environ))
    torch.use_deterministic_algorithms(True)
    # Else every new tensor is first filled with NaN, which costs a pass over memory and helps only who reads such.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    random.seed(seed)
    torch.manual_seed(seed)


def torch_threads(environment: Mapping[str, str]) -> int:
    """`FINERY_TORCH_THREADS`, or the physical cores that this process may use."""
    given = environment.get("FINERY_TORCH_THREADS")
    if given is None:
        return physical_cores()
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"FINERY_TORCH_THREADS: expected a whole number of at least 1, found {given!r}")
    return int(given)


def physical_cores() -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    smt = Path("/sys/devices/system/cpu/smt/active")
    two_per_core = smt.exists() and smt.read_text().strip() == "1"
    return max(1, allowed // 2 if two_per_core else allowed)


def derive(seed: int, *parts: str | int) -> int:
    """A seed of its own for each use, as in `derive(seed, "epoch", 3)`: 63 bits, the same on every machine."""
    digest = hashlib.sha256(repr((seed, *parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
