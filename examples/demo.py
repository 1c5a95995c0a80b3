"""The chain SFT → DPO → RL, each from the last one's checkpoint, against the whole system on this machine: `make demo`.

It trains a LoRA adapter for SmolLM2-135M-Instruct through the SDK, and exits with 0 only if everything adds up:
histories, steps, tokens, costs, checkpoints, what was learned, and a clean shutdown. With METHOD only that one, from
the base model.
"""

from __future__ import annotations

import argparse
import sys
import time
from decimal import Decimal
from pathlib import Path

import demo_dpo
import demo_rl
import demo_sft
from show import MODEL, Finished, console, home, running, say

HERE = Path(__file__).resolve().parent
PARTS = {"sft": (demo_sft.run, 40), "dpo": (demo_dpo.run, 24), "rl": (demo_rl.run, 20)}
"""What runs a part, and its steps."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", nargs="*", choices=[*PARTS, []], help="in this order; all without one")
    parser.add_argument("--out", type=Path, default=HERE.parent / "out/demo", help="folder for everything")
    parser.add_argument("--steps", type=int, help="of every job, instead of its own number")
    options = parser.parse_args()
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    say("Starting", "finery-service up: PostgreSQL, Ray, API, worker RPC, reconciler")
    wrong: list[str] = []
    done: list[Finished] = []
    with running(home(out)) as stack, stack.client() as client:
        for method in options.method or PARTS:
            run, steps = PARTS[method]
            start = {"from_checkpoint": done[-1].checkpoint.id} if done else {"model": MODEL}
            console.rule(f"{method.upper()}, from {done[-1].checkpoint.id if done else MODEL}")
            finished, found = run(client, start, out, options.steps or steps)
            done.append(finished)
            wrong += found
    seconds = time.monotonic() - began
    for line in wrong:
        console.print(f"[bold red]Wrong:[/] {line}", soft_wrap=True)
    if not wrong:
        cost = sum((one.job.cost for one in done), Decimal(0))
        say("Done", f"everything adds up; {cost:f} USD; shut down cleanly after {seconds:.0f} s; see {out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
