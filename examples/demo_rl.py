"""The third part of the demo: reinforcement learning with a customer's reward file, in the sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table
from show import Finished, bill, console, discrepancies, finish, say

from finery import Finery, graders
from finery.plot import reward_curve
from finery.types.rollouts import Rollout

HERE = Path(__file__).resolve().parent
SYSTEM = "You answer with a JSON object and nothing else."
WORDS = (HERE / "words.txt").read_text().split()
HELD_OUT, PROMPTS, SAMPLES = 24, 4, 8
HYPERPARAMETERS = {
    "algorithm": "grpo",
    "prompts_per_step": PROMPTS,
    "samples_per_prompt": SAMPLES,
    "max_new_tokens": 32,
    "learning_rate": 3e-4,
    "checkpoint_every": 10,
    "eval_prompts": HELD_OUT,
    "eval_samples": 4,
}


def prompts() -> list[dict[str, Any]]:
    """The last of them are held out."""
    wish = 'Answer with exactly {{"word": X}} where X is the word {} in double quotes.'
    return [
        {
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": wish.format(word)}],
            "word": word,
        }
        for word in WORDS
    ]


def run(client: Finery, start: dict[str, Any], out: Path, steps: int) -> tuple[Finished, list[str]]:
    """The finished job, and what does not add up."""
    path = out / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in prompts()), encoding="utf-8")
    file = client.files.upload(path)
    grader = graders.python(HERE / "word_reward.py")
    environment = client.environments.create(type="prompts", file=file, grader=grader, name="words")
    say("Environment", f"{environment.id}: {file.rows} prompts, of which {HELD_OUT} are never trained on")
    look = client.environments.run(environment, [f'{{"word": "{WORDS[0]}"}}', f'The word is "{WORDS[0]}".', "No."])
    console.print(str(look), highlight=False, markup=False)
    job = client.jobs.create(
        method="rl",
        environment=environment,
        name="demo-rl",
        hyperparameters=HYPERPARAMETERS | {"steps": steps},
        **start,
    )
    finished = finish(client, job, out)
    say("Reward curve", str(reward_curve(finished.events, out / "reward.png")))
    first, last = finished.of("eval")[0], finished.of("eval")[-1]
    for when, one in (("before", first), ("after", last)):
        spread = f"{one['reward']:.3f}, 95 % between {one['reward_low']:.3f} and {one['reward_high']:.3f}"
        say("Held-out", f"reward {when}: {spread}; pass@1 {one['pass_at_1']:.2f}, pass@4 {one['pass_at_4']:.2f}")
    console.print(samples(client, finished))
    console.print(bill(client, finished))
    rollouts = list(client.jobs.rollouts(job, step=steps))
    return finished, discrepancies(finished, learned(finished) | kept(rollouts))


def learned(finished: Finished) -> dict[str, bool]:
    """Of sampled answers; the greedy one may be right from the start."""
    first, last = finished.of("eval")[0], finished.of("eval")[-1]
    return {"more held-out answers pass than chance explains": last["pass_at_1_low"] > first["pass_at_1_high"]}


def kept(rollouts: list[Rollout]) -> dict[str, bool]:
    """Of one step."""
    return {
        "every rollout of the last step is kept": len(rollouts) == PROMPTS * SAMPLES,
        "every rollout has a reward or a failure": all((one.reward is None) == bool(one.failure) for one in rollouts),
    }


def samples(client: Finery, finished: Finished) -> Table:
    table = Table("step", "word", "answer", "reward", title="Sample rollouts")
    for step in sorted({1, finished.job.progress.step // 2, finished.job.progress.step}):
        for one in list(client.jobs.rollouts(finished.job, step=step))[::8]:
            reward = "-" if one.reward is None else f"{one.reward:.2f}"
            table.add_row(str(step), one.item["word"], escape(repr(one.text)[:70]), reward)
    return table
