"""Graders in parallel: threads, each with a grader and thereby with processes of its own."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from finery_gpu_workers.environments.graders import Grader
from finery_gpu_workers.environments.types import Answer, Grade

_Order = tuple[Answer, "Future[Grade]"]
_JOIN_SECONDS = 15.0


class Pool:
    """`Rewards` by `workers` graders that `make` makes; `first` is one of them, started already."""

    def __init__(self, first: Grader, make: Callable[[], Grader], workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers: expected at least 1, found {workers}")
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._graders = [first, *(make() for _ in range(workers - 1))]
        self._threads = [
            threading.Thread(target=self._work, args=(grader,), name=f"rewards-{n}", daemon=True)
            for n, grader in enumerate(self._graders)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, answer: Answer) -> Future[Grade]:
        future: Future[Grade] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("these rewards are closed")
            self._orders.put((answer, future))
        return future

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._cancel_waiting()
        for _ in self._threads:
            self._orders.put(None)
        for grader in self._graders:
            grader.interrupt()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    def _cancel_waiting(self) -> None:
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return
            if order is not None:
                order[1].cancel()

    def _work(self, grader: Grader) -> None:
        try:
            while order := self._orders.get():
                self._grade(grader, *order)
        finally:
            grader.close()

    def _grade(self, grader: Grader, answer: Answer, future: Future[Grade]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        started = time.monotonic()
        try:
            grade = grader.grade(answer)
        except BaseException as error:  # a fault of ours, for whoever waits
            future.set_exception(error)
        else:
            future.set_result(dataclasses.replace(grade, seconds=time.monotonic() - started))
