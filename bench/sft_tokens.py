"""Non-padding tokens per second of SFT, against TRL: SmolLM2-135M, LoRA r 16 on all linear layers, bf16, AdamW.

    make bench ONLY=sft_tokens ARGS="--pairs 3 --threads 2"

Three sides train one epoch over the same rows (whole conversations, at most 512 tokens, loss on the answers), 8 rows to
an update: ours as a worker runs it; TRL as a user would call SFTTrainer, all at its defaults but for what names the
task (bf16, the CPU, LoRA, max_length, rows in order); and TRL tuned (`TUNED`, the fastest of `CANDIDATES`, which
`--tune` measures). Every run is a fresh process, the sides in turn. Time is from the begin of the first step to the end
of the last: loading is in none, the first step's warm-up is in all.

The rows of TRL's first update are scored again by ours, before training, in float32 and in bf16: the losses must agree
to 1 % with what TRL reports, so that equal tokens are scored. The ceiling is what a core's own matmul rate, measured in
the same run, allows for the FLOPs of these rows.

The rows that it gives: sft_tokens and sft_tokens_tuned (CPU-seconds; medians of the ratios of neighbouring runs),
sft_tokens_wall, and sft_memory (peak resident set, ours over TRL's).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import sft_rows
import sides
from rows import Bound, Row

BOUNDS = {
    "sft_tokens": Bound(at_least=3.0),
    "sft_tokens_wall": Bound(at_least=3.0),
    "sft_tokens_tuned": Bound(at_least=2.5),
    "sft_memory": Bound(at_most=0.5),
}
LOSS_TOLERANCE = 0.01

_BF16: dict[str, Any] = {"model_init_kwargs": {"dtype": "bfloat16"}, "gradient_checkpointing": False}
_HALF = {**_BF16, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
_KEEP = sides.KEEP_MEMORY
# Settings of SFTConfig; environment; whether the adapter is bf16 too, without autocast.
CANDIDATES: dict[str, dict[str, Any]] = {
    "defaults": {"config": {}},
    "bf16 base": {"config": _HALF, "environment": _KEEP},
    "all bf16": {"config": {**_HALF, "bf16": False}, "environment": _KEEP, "adapter_in_bf16": True},
    "rows of like length": {
        "config": {**_HALF, "bf16": False, "train_sampling_strategy": "group_by_length"},
        "environment": _KEEP,
        "adapter_in_bf16": True,
    },
    "packed": {
        "config": {**_HALF, "bf16": False, "packing": True},
        "environment": _KEEP,
        "adapter_in_bf16": True,
    },
}
TUNED = "rows of like length"


def run(options: list[str]) -> list[Row]:
    chosen = _options(options)
    model = sft_rows.model()
    with tempfile.TemporaryDirectory(prefix="finery-bench-") as folder:
        path = Path(folder) / "rows.json"
        rows = sft_rows.write(model, path, chosen.rows)
        job = {"model": str(model), "rows": str(path), "threads": chosen.threads}
        if chosen.tune:
            for name in CANDIDATES:
                sides.show(name, _side(job, name), "tokens")
            return []
        names = ("ours", "defaults", TUNED)
        runs = sides.in_turn({name: partial(_side, job, name) for name in names}, chosen.pairs, "tokens")
        for name in ("defaults", TUNED):
            _compare_losses(job, name, runs[name][0])
    _show_ceiling(rows, runs["ours"], model)
    return _results(runs, chosen)


def _options(options: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sft_tokens")
    parser.add_argument("--pairs", type=int, default=3, help="runs of every side")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, default=24, help="conversations, of which a run trains all")
    parser.add_argument("--tune", action="store_true", help="TRL's side alone, every candidate once; writes no row")
    return parser.parse_args(options)


def _side(job: dict[str, Any], name: str) -> dict[str, Any]:
    return sides.ours("sft_ours.py", job) if name == "ours" else sides.trl("sft_trl.py", job, CANDIDATES[name])


def _compare_losses(job: dict[str, Any], name: str, trl: dict[str, Any]) -> None:
    """Raises RuntimeError where TRL's first loss is not that of our model on the very same tokens and labels."""
    ours = sides.ours("sft_ours.py", {"model": job["model"], "threads": job["threads"], "documents": trl["first"]})
    print(f"loss of the first update of {name}: TRL {trl['losses'][0]:.4f}, ours {ours}")
    for dtype, loss in ours.items():
        if abs(loss / trl["losses"][0] - 1) > LOSS_TOLERANCE:
            raise RuntimeError(f"{name}: expected a loss of {trl['losses'][0]}, found {loss} in {dtype}")


def flops_per_token(rows: list[sft_rows.TokensAndMask], config: dict[str, Any], trainable: int) -> float:
    """What LoRA training has to multiply and add at least, all in matmuls.

    Per token 4 × the frozen linear weights (forward, and the gradient of the input; 2 each) and 6 × the adapter's; per
    scored token 4 × the head's; per pair of a query and a key at or before it 12 × the heads' width (two products
    forward, four backward), in every layer.
    """
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    keys = config["num_key_value_heads"] * width
    linear = layers * hidden * (2 * heads * width + 2 * keys + 3 * config["intermediate_size"])
    tokens = sum(len(row) for row, _ in rows)
    scored = sum(sum(mask[1:]) for _, mask in rows)
    pairs = sum(len(row) * (len(row) + 1) // 2 for row, _ in rows)
    head = 4 * hidden * config["vocab_size"] * scored
    total: float = 4 * linear + 6 * trainable + (head + 12 * heads * width * layers * pairs) / tokens
    return total


def _show_ceiling(rows: list[sft_rows.TokensAndMask], ours: list[dict[str, Any]], model: Path) -> None:
    rate = max(one["gemm"] for one in ours)
    config = json.loads((model / "config.json").read_text())
    ceiling = rate / flops_per_token(rows, config, ours[0]["trainable"])
    reached = statistics.median(one["tokens"] / one["cpu"] for one in ours)
    gigaflops = f"{rate / 1e9:.0f} GFLOP per CPU-second"
    print(f"ceiling at {gigaflops}: {ceiling:.0f} tokens per CPU-second; ours reaches {reached / ceiling:.0%} of it")


def _results(runs: dict[str, list[dict[str, Any]]], chosen: argparse.Namespace) -> list[Row]:
    where = f"SmolLM2-135M, {chosen.rows} rows of at most {sft_rows.MAX_LENGTH} tokens, {chosen.threads} thread(s)"

    def row(name: str, other: str, kind: str, unit: str) -> Row:
        def measure(one: dict[str, Any]) -> float:
            return float(one[kind] if kind == "peak" else one["tokens"] / one[kind])

        return sides.row(name, runs, other, measure, unit=unit, note=where, bound=BOUNDS[name])

    return [
        row("sft_tokens", "defaults", "cpu", "non-padding tokens per CPU-second"),
        row("sft_tokens_wall", "defaults", "wall", "non-padding tokens per second"),
        row("sft_tokens_tuned", TUNED, "cpu", "non-padding tokens per CPU-second"),
        row("sft_memory", "defaults", "peak", "bytes of peak resident set"),
    ]
