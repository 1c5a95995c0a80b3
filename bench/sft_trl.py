"""TRL's side of sft_tokens: runs in bench/.venv, a fresh process for every run, and prints one JSON object.

    bench/.venv/bin/python bench/sft_trl.py JOB.json

JOB.json: {"model": folder, "rows": path, "threads": n, "config": {SFTConfig overrides}, "adapter_in_bf16": bool}.
Rows are tokens with a mask of the assistant's tokens, which TRL turns into labels itself. One epoch over all of them.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer


class Stopwatch(TrainerCallback):  # type: ignore[misc]  # this venv's packages are not where mypy runs
    """CPU and wall seconds of every optimizer step, from its begin to its end."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begun = time.process_time(), time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        cpu, wall = self._begun
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)


class Counting:
    """A collator that notes the real tokens of every batch, and keeps the rows of the first `keep` batches."""

    def __init__(self, collate: Any, keep: int) -> None:
        self.collate = collate
        self.keep = keep
        self.tokens: list[int] = []
        self.first: list[dict[str, Any]] = []

    def __call__(self, examples: list[dict[str, Any]]) -> Any:
        if len(self.tokens) < self.keep:
            self.first += [dict(example) for example in examples]
        self.tokens.append(sum(len(example["input_ids"]) for example in examples))
        return self.collate(examples)


def trainer(job: dict[str, Any], folder: str) -> SFTTrainer:
    rows = json.loads(Path(job["rows"]).read_text())
    data = Dataset.from_dict({"input_ids": [row[0] for row in rows], "assistant_masks": [row[1] for row in rows]})
    settings = {
        "output_dir": folder,
        "num_train_epochs": 1,
        "max_length": 512,
        "train_sampling_strategy": "sequential",  # the batches of the other side
        "learning_rate": 2e-4,
        "bf16": True,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    made = SFTTrainer(
        model=job["model"], args=SFTConfig(**settings | job["config"]), train_dataset=data, peft_config=adapter
    )
    if job.get("adapter_in_bf16"):
        made.model.to(torch.bfloat16)
    return made


def documents(example: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a packed example: the rows in it."""
    found, start = [], 0
    for length in example.get("seq_lengths") or [len(example["input_ids"])]:
        part = slice(start, start + length)
        found.append({"tokens": example["input_ids"][part], "labels": example["labels"][part]})
        start = part.stop
    return found


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        one = trainer(job, folder)
        one.add_callback(watch)
        one.data_collator = Counting(one.data_collator, keep=one.args.gradient_accumulation_steps)
        one.train()
    losses = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
    result = {
        "tokens": sum(one.data_collator.tokens),
        "cpu": sum(watch.cpu),
        "wall": sum(watch.wall),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses": losses,
        "first": [document for example in one.data_collator.first for document in documents(example)],
        "trainable": sum(p.numel() for p in one.model.parameters() if p.requires_grad),
        "dtypes": sorted({str(p.dtype) for p in one.model.parameters()}),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
