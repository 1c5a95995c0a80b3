"""The other side of generate_tokens: runs in bench/.venv, a fresh process for every run, prints one JSON object.

    bench/.venv/bin/python bench/generate_transformers.py JOB.json

JOB.json: {"model", "prompts", "threads", "per_call", "samples", "new_tokens"}.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

PAD = 0


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = [[PAD] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def sample(model: Any, prompts: list[list[int]], job: dict[str, Any], new_tokens: int, **more: Any) -> Any:
    return model.generate(
        **padded(prompts),
        max_new_tokens=new_tokens,
        num_return_sequences=job["samples"],
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=PAD,
        use_cache=True,
        **more,
    )


def mean_log_prob(answers: Any, longest: int) -> float:
    logits = torch.stack(answers.logits, dim=1).float()
    drawn = answers.sequences[:, longest:, None]
    return float(torch.log_softmax(logits, -1).gather(2, drawn).mean())


def main(job: dict[str, Any]) -> dict[str, Any]:
    prompts = json.loads(Path(job["prompts"]).read_text())
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None  # equal work on both sides
    calls = [prompts[start : start + job["per_call"]] for start in range(0, len(prompts), job["per_call"])]
    sample(model, calls[0], job, 4)
    cpu, wall = time.process_time(), time.perf_counter()
    found = [sample(model, call, job, job["new_tokens"]) for call in calls]
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    widths = [max(map(len, call)) for call in calls]
    # Once more, for what it says itself about what it draws.
    told = sample(model, calls[0], job, job["new_tokens"], return_dict_in_generate=True, output_logits=True)
    asked = [prompt for prompt in calls[0] for _ in range(job["samples"])]
    answers = told.sequences[:, widths[0] :].tolist()
    return {
        "tokens": sum(one[:, width:].numel() for one, width in zip(found, widths, strict=True)),
        "cpu": cpu,
        "wall": wall,
        "peak": peak,
        "first": [{"prompt": p, "tokens": a} for p, a in zip(asked, answers, strict=True)],
        "mean_log_prob": mean_log_prob(told, widths[0]),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
