"""What DPO and RL jobs tell, for the tests of progress, pictures, trackers and the command."""

from __future__ import annotations

from typing import Any

from finery.types.jobs import Event

from .support import event_json

SPEED = {"tokens_per_second": 100.0, "step_seconds": 2.0}


def _numbered(*events: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [event_json(seq, type_, **data) for seq, (type_, data) in enumerate(events, start=1)]


def _rl_step(step: int, reward: float | None, cost: str) -> tuple[str, dict[str, Any]]:
    told = {"reward": reward, "reward_std": 0.25, "loss": -0.5, "kl": 0.0, "trained_tokens": 24, "cost": cost}
    return "metric", {"step": step, "total_steps": 4, **told, **SPEED}


def _held_out(step: int, reward: float, low: float | None, high: float | None) -> tuple[str, dict[str, Any]]:
    more = {"pass_at_4": 0.5, "pass_at_4_low": 0.25, "pass_at_4_high": 0.75}
    return "eval", {"step": step, "tokens": 64, "reward": reward, "reward_low": low, "reward_high": high, **more}


def _kept(step: int, reward: float) -> tuple[str, dict[str, Any]]:
    return "checkpoint", {"checkpoint": f"ckpt_{step}", "step": step, "final": step == 4, "validation_reward": reward}


PROMPTS = {"train": {"format": "prompts"}, "validation": {"format": "prompts"}}
SAMPLE = {"step": 2, "kind": "train", "place": 17, "prompt": "2 +\n2 = \x1b[31m?", "text": "4"}
RL = _numbered(
    ("prepared", {"rows": 500, "trained_tokens": 0, "total_steps": 4, "statistics": {"sets": PROMPTS}}),
    ("state", {"to": "running"}),
    _held_out(0, 0.25, 0.125, 0.5),
    _rl_step(1, 0.125, "0.000012"),
    _rl_step(2, 0.5, "0.000024"),
    ("rollout", {**SAMPLE, "reward": 1.0, "failure": None}),
    ("rollout", {**SAMPLE, "reward": None, "failure": "timeout"}),
    _held_out(2, 0.75, 0.5, 0.875),
    ("rollout", {**SAMPLE, "kind": "eval", "reward": 0.25, "failure": None}),
    _kept(2, 0.75),
    _rl_step(3, None, "0.000036"),
    _rl_step(4, 0.875, "0.000048"),
    _held_out(4, 0.75, None, None),
    _kept(4, 0.75),
    ("state", {"to": "succeeded"}),
)


def _dpo_step(step: int, loss: float, margin: float, accuracy: float) -> tuple[str, dict[str, Any]]:
    told = {"loss": loss, "margin": margin, "accuracy": accuracy, "kl": 0.5, "chosen_reward": 0.25, "cost": "0.000012"}
    return "metric", {"step": step, "total_steps": 2, "learning_rate": 5e-5, **told, **SPEED}


DPO = _numbered(
    (
        "prepared",
        {
            "rows": 32,
            "trained_tokens": 640,
            "total_steps": 2,
            "dropped_rows": 1,
            "statistics": {"sets": {"train": {"format": "preference"}}},
        },
    ),
    ("state", {"to": "running"}),
    _dpo_step(1, 0.693, 0.0, 0.5),
    _dpo_step(2, 0.5, 0.25, 0.875),
    ("eval", {"step": 2, "loss": 0.625, "tokens": 90, "accuracy": 0.75, "margin": 0.125}),
    ("checkpoint", {"checkpoint": "ckpt_2", "step": 2, "final": True, "validation_loss": 0.625}),
    ("state", {"to": "succeeded"}),
)


def events(history: list[dict[str, Any]]) -> list[Event]:
    return [Event.model_validate(one) for one in history]
