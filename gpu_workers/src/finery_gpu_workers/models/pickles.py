"""Files that may run code when they are loaded are refused, wherever they come from."""

from __future__ import annotations

from collections.abc import Iterable

from finery_gpu_workers.errors import WorkerError

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy")
"""Formats whose loading may run code; a folder with one of them is refused."""


def refuse_pickles(files: Iterable[str], where: str) -> None:
    for name in sorted(files):
        if name.endswith(PICKLES):
            raise WorkerError(
                "unsafe_checkpoint_file",
                f"{where}: `{name}` may run code when it is loaded and is refused; "
                "keep only .safetensors weights in the folder",
            )
