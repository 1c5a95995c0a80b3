"""The second part of the demo: of two answers in a real conversation, the true one becomes the likelier."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import data
from show import Finished, bill, console, discrepancies, finish, say

from finery import Finery
from finery.plot import loss_curve

TRAIN_PAIRS, HELD_OUT_PAIRS = 200, 48
HYPERPARAMETERS = {"beta": 0.1, "batch_tokens": 2048, "max_length": 512, "learning_rate": 3e-4, "checkpoint_every": 20}


def pairs(rows: list[data.Row]) -> list[dict[str, Any]]:
    """The last turn of each row as the chosen answer; that of the row after it as the rejected one."""
    return [
        {
            "messages": row["messages"][:-1],
            "chosen": row["messages"][-1]["content"],
            "rejected": other["messages"][-1]["content"],
        }
        for row, other in itertools.pairwise(rows)
        if row["messages"][-1] != other["messages"][-1]
    ]


def write(path: Path, content: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content), encoding="utf-8")
    return path


def run(client: Finery, start: dict[str, Any], out: Path, steps: int) -> tuple[Finished, list[str]]:
    """The finished job, and what does not add up."""
    training, held_out = data.split(data.fetch(), TRAIN_PAIRS, HELD_OUT_PAIRS)
    paths = write(out / "pairs.jsonl", pairs(training)), write(out / "held-out-pairs.jsonl", pairs(held_out))
    files = [client.files.upload(path) for path in paths]
    say("Uploaded", ", ".join(f"{file.name}: {file.rows} pairs, {file.status}" for file in files))
    job = client.jobs.create(
        method="dpo",
        training_file=files[0],
        validation_file=files[1],
        name="demo-dpo",
        hyperparameters=HYPERPARAMETERS | {"max_steps": steps},
        **start,
    )
    finished = finish(client, job, out)
    say("Loss curve", str(loss_curve(finished.events, out / "dpo.png")))
    first, last = finished.of("eval")[0], finished.of("eval")[-1]
    for name in ("loss", "accuracy", "margin"):
        say(f"Held-out {name}"[:13], f"{name}: {first[name]:.3f} before, {last[name]:.3f} after")
    console.print(bill(client, finished))
    return finished, discrepancies(finished, learned(finished))


def learned(finished: Finished) -> dict[str, bool]:
    first, last = finished.of("eval")[0], finished.of("eval")[-1]
    return {
        "before the first step policy and reference are one: accuracy one half": first["accuracy"] == 0.5,
        "the held-out loss fell": last["loss"] < first["loss"],
        "the true answers became the likelier ones": last["accuracy"] > 0.5,
    }
