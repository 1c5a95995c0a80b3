"""The rollout engine: as many answers at a time as rows are allowed, each of them as if it were alone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finery_gpu_workers.errors import WorkerError
from finery_gpu_workers.models.decoder import Decoder
from finery_gpu_workers.models.foreign import ForeignModel
from finery_gpu_workers.models.interface import Model
from finery_gpu_workers.rollout.backend import Backend, Prefix
from finery_gpu_workers.rollout.cached import CachedDecoder
from finery_gpu_workers.rollout.drawing import draw
from finery_gpu_workers.rollout.foreign import ForeignBackend
from finery_gpu_workers.rollout.stops import StopTexts, TextOf
from finery_gpu_workers.rollout.types import Completion, Group, Sampling, Spent
from finery_gpu_workers.rollout.uniforms import uniforms


class Engine:
    """Samples from a model that someone else trains: its weights and its adapter are read as they are at each call of
    `generate`, and must not change while that runs. Not thread-safe.
    """

    def __init__(self, model: Model, *, text_of: TextOf, max_rows: int, spent: Spent | None = None) -> None:
        """`text_of`: the text of an answer's tokens, in which stop texts are looked for. `max_rows`: how many rollouts
        are decoded together; more wait until one of them is done.
        """
        if max_rows < 1:
            raise ValueError(f"max_rows: expected at least 1, found {max_rows}")
        self.spent = Spent() if spent is None else spent
        self._model = model
        self._text_of = text_of
        self._max_rows = max_rows

    def generate(self, groups: Iterable[Group], sampling: Sampling, version: int) -> Iterator[Completion]:
        """Yields every rollout when it is done, in no order. Groups are taken when there is room for them.

        Raises WorkerError `row_too_long_for_model` (before anything of that group is computed), `non_finite_logits`;
        ValueError where a group or `sampling` is none.
        """
        _check(sampling)
        backend: Backend[Any] = _backend(self._model)
        waiting = _Waiting(groups, sampling, backend, self.spent)
        rows: list[_Row] = []
        while True:
            while len(rows) < self._max_rows and (fresh := waiting.take(self._max_rows - len(rows), self._text_of)):
                logits = torch.stack([row.prefix.logits for row in fresh])
                self._grow(fresh, logits, sampling, version)
                for row in fresh:
                    if row.done:
                        yield row.completion
                    else:
                        backend.add(row.prefix)
                        rows.append(row)
            if not rows:
                return
            logits = backend.step([row.completion.tokens[-1] for row in rows])
            self._grow(rows, logits, sampling, version)
            for number in reversed([number for number, row in enumerate(rows) if row.done]):
                backend.retire(number)
                row, last = rows[number], rows.pop()
                if number < len(rows):
                    rows[number] = last
                yield row.completion

    def _grow(self, rows: Sequence[_Row], logits: Tensor, sampling: Sampling, version: int) -> None:
        """Every row by the token that its seed draws."""
        seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        positions = np.array([len(row.completion.tokens) for row in rows], dtype=np.int64)
        drawn = draw(logits, sampling, uniforms(seeds, positions))
        for row, token, log_prob in zip(rows, drawn.tokens.tolist(), drawn.log_probs.tolist(), strict=True):
            row.append(token, log_prob, version, sampling)
        self.spent.generated += len(rows)


@dataclass
class _Read:
    """A group whose prompt is read, and which of its rollouts have not begun."""

    group: Group
    prefix: Prefix
    begun: float
    next: int = 0


@dataclass
class _Row:
    completion: Completion
    seed: int
    prefix: Prefix
    begun: float
    stops: StopTexts
    done: bool = False

    def append(self, token: int, log_prob: float, version: int, sampling: Sampling) -> None:
        one = self.completion
        one.tokens.append(token)
        one.log_probs.append(log_prob)
        one.versions.append(version)
        stopped = token in sampling.stop_ids or self.stops.completed_by(one.tokens)
        if stopped or len(one.tokens) == sampling.max_new_tokens:
            one.finish = "stop" if stopped else "length"
            one.seconds = time.monotonic() - self.begun
            self.done = True


class _Waiting:
    """Rollouts that have not begun, in the order of their groups. No prompt is read before there is room for it."""

    def __init__(self, groups: Iterable[Group], sampling: Sampling, backend: Backend[Any], spent: Spent) -> None:
        self._groups = iter(groups)
        self._sampling = sampling
        self._backend = backend
        self._spent = spent
        self._read: deque[_Read] = deque()

    def take(self, room: int, text_of: TextOf) -> list[_Row]:
        """At most `room` rows; none when there are no more."""
        self._read_for(room)
        rows: list[_Row] = []
        while self._read and len(rows) < room:
            one = self._read[0]
            completion = Completion(group=one.group.key, sample=one.next)
            stops = StopTexts(self._sampling.stop_texts, text_of)
            rows.append(_Row(completion, one.group.seeds[one.next], one.prefix, one.begun, stops))
            self._spent.prefill_cached += len(one.group.prompt) if one.next else 0
            one.next += 1
            if one.next == len(one.group.seeds):
                self._read.popleft()
        return rows

    def _read_for(self, room: int) -> None:
        """Prompts for so many rows, together."""
        missing = room - sum(len(one.group.seeds) - one.next for one in self._read)
        groups: list[Group] = []
        while missing > 0 and (group := next(self._groups, None)) is not None:
            _check_group(group, self._sampling.max_new_tokens, self._backend.longest_row)
            if group.seeds:
                groups.append(group)
                missing -= len(group.seeds)
        if groups:
            begun = time.monotonic()
            prefixes = self._backend.read([group.prompt for group in groups])
            self._spent.prefill += sum(len(group.prompt) for group in groups)
            self._read.extend(_Read(*pair, begun) for pair in zip(groups, prefixes, strict=True))


def _backend(model: Model) -> Backend[Any]:
    if isinstance(model, Decoder):
        return CachedDecoder(model)
    if isinstance(model, ForeignModel):
        return ForeignBackend(model)
    raise TypeError(f"expected a model that decodes, found {type(model).__name__}")


def _check(sampling: Sampling) -> None:
    wrong = {
        "max_new_tokens": sampling.max_new_tokens < 1,
        "temperature": not 0.0 <= sampling.temperature < float("inf"),
        "top_p": not 0.0 < sampling.top_p <= 1.0,
        "top_k": sampling.top_k is not None and sampling.top_k < 1,
        "min_p": not 0.0 <= sampling.min_p <= 1.0,
        "stop_texts": "" in sampling.stop_texts,
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(f"{name}: expected a value that samples something, found {getattr(sampling, name)!r}")


def _check_group(group: Group, max_new_tokens: int, longest: int | None) -> None:
    if not group.prompt:
        raise ValueError(f"group {group.key}: expected a prompt of at least 1 token, found none")
    found = len(group.prompt) + max_new_tokens
    if longest is not None and found > longest:
        raise WorkerError(
            "row_too_long_for_model",
            f"expected rows of at most {longest} tokens, which this model sees whole, found a prompt of "
            f"{len(group.prompt)} with up to {max_new_tokens} new ones; lower max_prompt_tokens or max_new_tokens",
        )
