"""`score_model`: a model behind an OpenAI-compatible URL says how good an answer is, with a number.

Only addresses that the operator allows are called, with the operator's key. What the server answered is never shown: it
may hold what other customers sent. One further try within the same deadline where the server was not reached, was busy
or failed.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finery.templates import MissingFieldError, parse, render
from finery.types.environments import ScoreModelGrader
from finery_gpu_workers.environments.http import OverdueError, Post, UnreachableError
from finery_gpu_workers.environments.types import Answer, Grade
from finery_gpu_workers.environments.values import Failed, failure
from finery_gpu_workers.errors import WorkerError

_MAX_BYTES = 2**20
_TRIES = 2
_TOKENS = 2**31
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w])(?!\.\d)")
_KEYS = ("result", "score")


@dataclass
class _Spent:
    input: int = 0
    output: int = 0


class Judge:
    """Raises WorkerError `invalid_environment` where the operator does not allow the address."""

    def __init__(self, spec: ScoreModelGrader, score_models: Mapping[str, str | None]) -> None:
        allowed = {url.rstrip("/"): key for url, key in score_models.items()}
        base = spec.base_url.rstrip("/")
        if base not in allowed:
            known = ", ".join(sorted(allowed)) or "none"
            message = f"base_url: expected one that the operator allows ({known}), found {base}"
            raise WorkerError("invalid_environment", message, param="environment.grader.base_url")
        self.name = spec.name
        self._spec = spec
        self._messages = [(message.role, parse(message.content)) for message in spec.input]
        headers = {"Authorization": f"Bearer {allowed[base]}"} if allowed[base] else {}
        self._post = Post(f"{base}/chat/completions", headers, max_bytes=_MAX_BYTES)

    def start(self) -> None:
        return

    def grade(self, answer: Answer) -> Grade:
        sample, spent = {"output_text": answer.output_text}, _Spent()
        try:
            messages = [
                {"role": role, "content": render(content, answer.item, sample)} for role, content in self._messages
            ]
            reward = self._within(_number(self._asked(messages, spent)))
        except MissingFieldError as error:
            return failure(self.name, "missing_field", str(error))
        except Failed as failed:
            return failure(self.name, failed.code, failed.message, llm_input=spent.input, llm_output=spent.output)
        return Grade(reward=reward, llm_input=spent.input, llm_output=spent.output)

    def _asked(self, messages: list[dict[str, str]], spent: _Spent) -> str:
        """The text of the model's answer. Raises Failed."""
        body = {"model": self._spec.model, "messages": messages, "temperature": 0}
        deadline = time.monotonic() + self._spec.timeout_seconds
        for last in (False,) * (_TRIES - 1) + (True,):
            try:
                status, data = self._post.send(body, deadline)
            except OverdueError:
                raise Failed("timeout", f"no answer within {self._spec.timeout_seconds:g} s") from None
            except UnreachableError as error:
                if last:
                    raise Failed("unreachable", f"the score model's server was not reached: {error}") from None
                continue
            if status == 200:
                return _content(data, spent)
            if last or not (status == 429 or status >= 500):
                code = "unreachable" if status == 429 or status >= 500 else "error"
                raise Failed(code, f"expected status 200 of the score model's server, found {status}")
        raise AssertionError("the last try returns or raises")

    def _within(self, number: float) -> float:
        low, high = self._spec.range
        if not low <= number <= high:
            raise Failed("invalid_reward", f"expected a number from {low:g} to {high:g}, found one outside")
        return number

    def interrupt(self) -> None:
        self._post.interrupt()

    def close(self) -> None:
        return


def _content(data: bytes, spent: _Spent) -> str:
    if len(data) > _MAX_BYTES:
        raise Failed("error", f"expected an answer of at most {_MAX_BYTES} bytes of the score model, found more")
    try:
        answer = json.loads(data)
        usage = answer.get("usage") or {}
        spent.input += _tokens(usage.get("prompt_tokens"))
        spent.output += _tokens(usage.get("completion_tokens"))
        content = answer["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        content = None
    if not isinstance(content, str):
        raise Failed("error", "expected a chat completion of the score model's server, found something else")
    return content


def _tokens(value: Any) -> int:
    return value if type(value) is int and 0 <= value < _TOKENS else 0


def _number(content: str) -> float:
    """The text's only number, or `result` or `score` of a JSON object. Two numbers ("7 of 10") might be misread."""
    try:
        said = json.loads(content)
    except (ValueError, RecursionError):
        said = None
    if isinstance(said, dict):
        found: list[Any] = [said[key] for key in _KEYS if key in said][:1]
    else:
        found = [float(number) for number in _NUMBER.findall(content)]
    if len(found) != 1 or type(found[0]) not in (int, float):
        count = "none" if not found else f"{len(found)}" if len(found) > 1 else "something else"
        raise Failed("invalid_reward", f"expected one number in the score model's answer, found {count}")
    try:
        number = float(found[0])
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Failed("invalid_reward", "expected a finite number in the score model's answer, found another one")
    return number
