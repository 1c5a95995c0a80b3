"""TRL's side of grpo_step: runs in bench/.venv, a fresh process for every run, and prints one JSON object.

    bench/.venv/bin/python bench/grpo_trl.py JOB.json

JOB.json: {"model", "rows", "threads", "config": {GRPOConfig overrides}, "adapter_in_bf16": bool}. Time is that of all
steps: generation, rewards, training, optimizer. Its result holds the first step's token ids and advantages.
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
from grpo_task import NEW_TOKENS, PROMPTS_PER_STEP, SAMPLES, reward
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer


class Noting(GRPOTrainer):  # type: ignore[misc]  # this venv's packages are not where mypy runs
    """Keeps what the first step trained."""

    first: dict[str, Any] | None = None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        if self.first is None:
            self.first = {
                "prompts": [_real(*row) for row in zip(found["prompt_ids"], found["prompt_mask"], strict=True)],
                "answers": [_real(*row) for row in zip(found["completion_ids"], found["completion_mask"], strict=True)],
                "advantages": found["advantages"].tolist(),
            }
        return found


def _real(ids: torch.Tensor, mask: torch.Tensor) -> list[int]:
    kept: list[int] = ids[mask.bool()].tolist()
    return kept


def score(completions: list[str], word: list[str], **_: Any) -> list[float]:
    return [reward(one, text) for one, text in zip(word, completions, strict=True)]


def trainer(job: dict[str, Any], folder: str) -> Noting:
    rows = json.loads(Path(job["rows"]).read_text())
    texts = Dataset.from_list([{"prompt": row["prompt"], "word": row["word"]} for row in rows])
    settings = {
        "output_dir": folder,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": PROMPTS_PER_STEP * SAMPLES // 8,
        "num_generations": SAMPLES,
        "max_completion_length": NEW_TOKENS,
        "generation_kwargs": {"min_new_tokens": NEW_TOKENS},  # equal work on both sides
        "shuffle_dataset": False,
        "learning_rate": 1e-4,
        "bf16": True,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    made = Noting(
        model=job["model"],
        args=GRPOConfig(**settings | job["config"]),
        reward_funcs=score,
        train_dataset=texts,
        peft_config=adapter,
    )
    if job.get("adapter_in_bf16"):
        made.model.to(torch.bfloat16)
    return made


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    with tempfile.TemporaryDirectory() as folder:
        one = trainer(job, folder)
        cpu, wall = time.process_time(), time.perf_counter()
        one.train()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    logged = [entry for entry in one.state.log_history if "loss" in entry]
    result = {
        "steps": one.state.global_step,
        "cpu": cpu,
        "wall": wall,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses": [entry["loss"] for entry in logged],
        "grad_norms": [entry["grad_norm"] for entry in logged],
        "rewards": [entry["reward"] for entry in logged],
        "lengths": [entry["completions/mean_length"] for entry in logged],
        "first": one.first,
        "trainable": sum(p.numel() for p in one.model.parameters() if p.requires_grad),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
