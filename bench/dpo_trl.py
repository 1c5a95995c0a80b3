"""TRL's side of dpo_pairs: runs in bench/.venv, a fresh process for every run, and prints one JSON object.

    bench/.venv/bin/python bench/dpo_trl.py JOB.json

JOB.json: {"model", "rows", "threads", "config": {DPOConfig overrides}, "adapter_in_bf16": bool}. One epoch over all
pairs. Time is from the making of the trainer's reference log-probs (where it makes them first) to the last step's end.
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
from trl import DPOConfig, DPOTrainer


class Timed(DPOTrainer):  # type: ignore[misc]  # this venv's packages are not where mypy runs
    """Adds up what the reference costs where it is computed ahead of the steps."""

    ahead = (0.0, 0.0)

    def _precompute_ref_logps(self, *arguments: Any, **named: Any) -> Any:
        cpu, wall = time.process_time(), time.perf_counter()
        found = super()._precompute_ref_logps(*arguments, **named)
        self.ahead = time.process_time() - cpu, time.perf_counter() - wall
        return found


def trainer(job: dict[str, Any], folder: str) -> Timed:
    rows = json.loads(Path(job["rows"]).read_text())
    texts = Dataset.from_list([{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in rows])
    settings = {
        "output_dir": folder,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 8,
        "max_length": 512,
        "learning_rate": 5e-5,
        "bf16": True,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
    }
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    made = Timed(
        model=job["model"], args=DPOConfig(**settings | job["config"]), train_dataset=texts, peft_config=adapter
    )
    if job.get("adapter_in_bf16"):
        made.model.to(torch.bfloat16)
    kept = [list(made.train_dataset[key]) for key in ("prompt_ids", "chosen_ids", "rejected_ids")]
    if kept != [[row[key] for row in rows] for key in ("prompt_ids", "chosen_ids", "rejected_ids")]:
        raise ValueError("expected TRL to train the token ids that the other side trains, found others")
    return made


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    with tempfile.TemporaryDirectory() as folder:
        one = trainer(job, folder)
        cpu, wall = time.process_time(), time.perf_counter()
        one.train()
        cpu, wall = time.process_time() - cpu + one.ahead[0], time.perf_counter() - wall + one.ahead[1]
    logged = [entry for entry in one.state.log_history if "loss" in entry]
    result = {
        "pairs": len(one.train_dataset),
        "cpu": cpu,
        "wall": wall,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses": [entry["loss"] for entry in logged],
        "chosen_logps": [entry["logps/chosen"] for entry in logged],
        "rejected_logps": [entry["logps/rejected"] for entry in logged],
        "trainable": sum(p.numel() for p in one.model.parameters() if p.requires_grad),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
