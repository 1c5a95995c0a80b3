"""Preference pairs per second of DPO, against TRL: SmolLM2-135M, LoRA r 16 on all linear layers, bf16, AdamW.

    make bench ONLY=dpo_pairs ARGS="--pairs 5 --threads 1"

Both sides train one epoch over the same token ids, 8 pairs to an update; the reference's log-probs are part of the time
on both. TRL as a user would call DPOTrainer, all at its defaults but for what names the task, and tuned (`TUNED`: base
in bf16, no activation checkpointing, the reference's log-probs computed once ahead). Every run is a fresh process, the
sides in turn. Before training, the mean log-probs of both sides' answers must agree to 1 % with what TRL reports, and
both losses must be log 2.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import dpo_rows
import sft_rows
import sides
from rows import Bound, Row

BOUNDS = {
    "dpo_pairs": Bound(at_least=3.6),
    "dpo_pairs_tuned": Bound(at_least=2.5),
    "dpo_memory": Bound(at_most=0.5),
}
TUNED = "bf16 base, reference ahead"
CANDIDATES: dict[str, dict[str, Any]] = {
    "defaults": {"config": {}},
    TUNED: {
        "config": {
            "model_init_kwargs": {"dtype": "bfloat16"},
            "gradient_checkpointing": False,
            "bf16": False,
            "precompute_ref_log_probs": True,
        },
        "environment": sides.KEEP_MEMORY,
        "adapter_in_bf16": True,
    },
}
TOLERANCE = 0.01


def run(options: list[str]) -> list[Row]:
    parser = argparse.ArgumentParser(prog="dpo_pairs")
    parser.add_argument("--pairs", type=int, default=3, help="runs of every side")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, default=16, help="preference pairs, of which a run trains all")
    chosen = parser.parse_args(options)
    with tempfile.TemporaryDirectory(prefix="finery-bench-") as folder:
        path = Path(folder) / "pairs.json"
        dpo_rows.write(path, chosen.rows)
        job = {"model": str(sft_rows.model()), "rows": str(path), "threads": chosen.threads}
        runs = sides.in_turn({name: partial(_side, job, name) for name in ("ours", *CANDIDATES)}, chosen.pairs, "pairs")
    for name in CANDIDATES:
        _compare(runs["ours"][0], name, runs[name][0])
    note = f"SmolLM2-135M, {chosen.rows} pairs of at most 512 tokens, {chosen.threads} thread(s)"

    def row(name: str, other: str, kind: str, unit: str) -> Row:
        def measure(one: dict[str, Any]) -> float:
            return float(one[kind] if kind == "peak" else one["pairs"] / one[kind])

        return sides.row(name, runs, other, measure, unit=unit, note=note, bound=BOUNDS[name])

    return [
        row("dpo_pairs", "defaults", "cpu", "pairs per CPU-second, reference included"),
        row("dpo_pairs_tuned", TUNED, "cpu", "pairs per CPU-second, reference included"),
        row("dpo_memory", "defaults", "peak", "bytes of peak resident set"),
    ]


def _side(job: dict[str, Any], name: str) -> dict[str, Any]:
    return sides.ours("dpo_ours.py", job) if name == "ours" else sides.trl("dpo_trl.py", job, CANDIDATES[name])


def _compare(ours: dict[str, Any], name: str, trl: dict[str, Any]) -> None:
    """Raises RuntimeError where the first updates are not of the same pairs, reference and loss."""
    for key in ("chosen_logps", "rejected_logps"):
        print(f"{key} before training: {name} {trl[key][0]:.3f}, ours {ours[key][0]:.3f}")
        if abs(ours[key][0] / trl[key][0] - 1) > TOLERANCE:
            raise RuntimeError(f"{name}: {key}: expected {trl[key][0]}, found {ours[key][0]}")
    for side in (ours, trl):
        if abs(side["losses"][0] - math.log(2)) > TOLERANCE or side["trainable"] != ours["trainable"]:
            raise RuntimeError(f"{name}: expected a first loss of log 2 and as many parameters, found {side}")
