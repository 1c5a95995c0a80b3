"""Scratch space of many workers on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_COME_AND_GO = """
from finery_gpu_workers.scratch import scratch_folder
for _ in range(200):
    with scratch_folder() as folder:
        (folder / "x").touch()
"""


def test_workers_that_begin_and_end_at_once_do_not_trip_over_each_other(tmp_path: Path) -> None:
    """One sweeps while another removes its folder."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    workers = [subprocess.Popen([sys.executable, "-c", _COME_AND_GO], env=environment) for _ in range(4)]
    assert [worker.wait() for worker in workers] == [0, 0, 0, 0]
    (root,) = tmp_path.iterdir()
    assert list(root.iterdir()) == []
