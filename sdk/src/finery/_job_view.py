"""What a job's events add up to, for people who watch it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from finery._visible import one_line
from finery.types.jobs import Event

_SMOOTH = 0.2  # weight of the newest step in the averages that are shown
_PASS = re.compile(r"pass_at_\d+")
_TRACEBACK = "Traceback (most recent call last):"
_NOUNS = {"preference": "pairs", "prompts": "prompts"}


@dataclass
class JobView:
    """State, progress, and the numbers of the newest step; what a method does not have stays None."""

    state: str = "validating"
    message: str | None = None
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    margin: float | None = None
    """DPO: of the rewards of chosen and rejected answers."""
    accuracy: float | None = None
    """DPO: part of the pairs whose chosen answer has the higher reward."""
    reward: float | None = None
    """RL: mean over the rollouts."""
    tokens_per_second: float | None = None
    seconds_per_step: float | None = None
    """Of whole steps, averaged; the newest count most."""
    has_validation: bool = False
    evaluations: int = 0
    held_out_loss: float | None = None
    held_out_reward: float | None = None
    best: float | None = None
    """Lowest held-out loss (RL: highest held-out reward) of a checkpoint so far."""
    cost: Decimal = Decimal(0)
    """US dollars so far."""

    def take(self, event: Event) -> str | None:
        """Take an event in; a sentence if it is news besides progress."""
        data = event.data
        match event.type:
            case "state":
                self.state, self.message = str(data.get("to")), data.get("message")
                said = brief(str(self.message or "")) or (self.line() if not self.step else "")
                return f"{self.state}: {said}" if said else self.state
            case "prepared":
                return self._prepare(data)
            case "metric":
                self._measure(data)
                return None
            case "eval":
                return self._evaluate(data)
            case "checkpoint":
                return self._keep(data)
            case "attempt" if data.get("phase") == "started" and data.get("resumed_from_step"):
                return f"attempt {data.get('number')} goes on from step {data.get('resumed_from_step')}"
            case "rollout" if data.get("kind") == "eval":
                return sample(data)
            case "warning":
                return f"warning: {brief(str(data.get('message', data)))}"
        return None

    def _prepare(self, data: dict[str, Any]) -> str:
        self.total_steps = data.get("total_steps")
        sets = (data.get("statistics") or {}).get("sets") or {}
        self.has_validation = "validation" in sets
        noun = _NOUNS.get(str((sets.get("train") or {}).get("format")), "rows")
        tokens = "" if noun == "prompts" else f", {data.get('trained_tokens')} tokens to learn from"
        lost = {"left out": data.get("dropped_rows"), "truncated": data.get("truncated_rows")}
        more = "".join(f", {count} {what}" for what, count in lost.items() if count)
        return f"prepared {data.get('rows')} {noun}{tokens}{more}"

    def _evaluate(self, data: dict[str, Any]) -> str:
        self.evaluations += 1
        self.held_out_loss, self.held_out_reward = data.get("loss"), data.get("reward", self.held_out_reward)
        when = "before training" if data.get("step") == 0 else f"after step {data.get('step')}"
        return f"{held_out(data)} {when}"

    def _keep(self, data: dict[str, Any]) -> str:
        said = f"checkpoint {data.get('checkpoint')} at step {data.get('step')}"
        loss, reward = data.get("validation_loss"), data.get("validation_reward")
        if loss is not None:
            return f"{said}, held-out loss {self._best(loss, self.best is None or loss < self.best)}"
        if reward is not None:
            return f"{said}, held-out reward {self._best(reward, self.best is None or reward > self.best)}"
        return said

    def _best(self, value: float, better: bool) -> str:
        self.best = value if better else self.best
        return _number(value, ".4f") + (" (best so far)" if better else "")

    def _measure(self, data: dict[str, Any]) -> None:
        self.step = data.get("step", self.step)
        self.total_steps = data.get("total_steps") or self.total_steps
        self.loss, self.reward = data.get("loss"), data.get("reward", self.reward)
        self.margin, self.accuracy = data.get("margin"), data.get("accuracy")
        self.tokens_per_second = _average(self.tokens_per_second, data.get("tokens_per_second"))
        self.seconds_per_step = _average(self.seconds_per_step, data.get("step_seconds"))
        if data.get("cost") is not None:
            self.cost = Decimal(str(data["cost"]))

    @property
    def eta_seconds(self) -> float | None:
        if self.total_steps is None or self.seconds_per_step is None:
            return None
        return max(0, self.total_steps - self.step) * self.seconds_per_step

    def line(self) -> str:
        """Loss, margin or reward, speed, time left, cost; before the first step, what it is doing."""
        if not self.step:
            first = self.state == "running" and self.has_validation and not self.evaluations
            return "evaluating before training" if first else ""
        measured = {
            "reward": (self.reward, ".3f"),
            "held-out": (self.held_out_reward, ".3f"),
            "loss": (self.loss, ".3f"),
            "margin": (self.margin, ".3f"),
            "accuracy": (self.accuracy, ".0%"),
        }
        known = (f"{name} {_number(*of)}" for name, of in measured.items() if of[0] is not None or name == "loss")
        parts = [
            *known,
            f"{_number(self.tokens_per_second, ',.0f')} tok/s",
            f"ETA {_duration(self.eta_seconds)}",
            f"${self.cost:.6f}" if self.cost < 1 else f"${self.cost:,.2f}",
        ]
        return "  ".join(parts)


def brief(message: str) -> str:
    """On one line: of a traceback, what comes before it and the error itself, its last line."""
    first, *more = message.strip().splitlines() or [""]
    return f"{first.removesuffix(_TRACEBACK)}{'' if first.endswith(_TRACEBACK) else ' … '}{more[-1]}" if more else first


def held_out(data: dict[str, Any]) -> str:
    """What an eval event says: `held-out loss 3.4800, accuracy 81%`, `held-out reward 0.5500 (0.4500 to 0.6500)`."""
    if "reward" not in data:
        accuracy = data.get("accuracy")
        more = "" if accuracy is None else f", accuracy {accuracy:.0%}"
        return f"held-out loss {_number(data.get('loss'), '.4f')}{more}"
    low, high = data.get("reward_low"), data.get("reward_high")
    between = "" if low is None or high is None else f" ({low:.4f} to {high:.4f})"
    passed = {name: value for name, value in data.items() if _PASS.fullmatch(name) and value is not None}
    more = "".join(f", pass@{name.removeprefix('pass_at_')} {_number(value, '.0%')}" for name, value in passed.items())
    return f"held-out reward {_number(data['reward'], '.4f')}{between}{more}"


def sample(data: dict[str, Any]) -> str:
    """A rollout event in one line: `reward 1  2 + 2 = → 4`, `no reward: timeout  2 + 2 = → `."""
    failure, reward = data.get("failure"), data.get("reward")
    code = failure.get("code") if isinstance(failure, dict) else failure
    said = f"reward {_number(reward, '.4g')}" if code is None else f"no reward: {one_line(str(code), 20)}"
    return f"{said}  {one_line(str(data.get('prompt')), 60)} → {one_line(str(data.get('text')), 80)}"


def _average(old: float | None, new: float | None) -> float | None:
    if new is None:
        return old
    return new if old is None else old + _SMOOTH * (new - old)


def _number(value: float | None, style: str) -> str:
    """A loss of -1e-9 is shown as 0.000, not as -0.000."""
    return "–" if value is None else format(value, f"z{style}")


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
