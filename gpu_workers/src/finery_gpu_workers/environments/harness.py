"""Runs inside the sandbox (`python -c`): calls a function on what it is sent. One file, with the standard library only.

JSON lines: the first one on stdin says what to load, every further one is a request; replies go to file descriptor 3.
Each call runs in a fork of the process that has loaded the code, so that none changes what the next one finds. Only
that process holds descriptor 3; of the fork it takes one message, what was printed, and how it ended. After a call it
kills what the call left running and removes the files that it left. Deadlines are its parent's, who kills it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

Call = Callable[[dict[str, Any]], Any]

_PRINTED = 2000
_TRACEBACK = 2000
_MESSAGE = 1 << 24
_REPLIES = 3
_DUMPABLE, _SUBREAPER = 4, 36
_OURS = ('File "<string>"', 'File "<frozen importlib', "/importlib/abc.py")
"""Lines of tracebacks that say nothing of the customer's code."""


class _Source(importlib.abc.InspectLoader):
    """A module from a text; tracebacks show its lines."""

    def __init__(self, text: str) -> None:
        self.text = text

    def get_source(self, fullname: str) -> str:  # noqa: ARG002
        return self.text

    def get_code(self, fullname: str) -> Any:  # noqa: ARG002
        return self.source_to_code(self.text, "grader.py")


def load_python(setup: dict[str, Any]) -> Call:
    import linecache

    source = setup["source"]
    linecache.cache["grader.py"] = (len(source), None, source.splitlines(True), "grader.py")
    loader = _Source(source)
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("grader", loader))
    sys.modules["grader"] = module
    loader.exec_module(module)
    grade = getattr(module, "grade", None)
    if not callable(grade):
        found = "none" if grade is None else type(grade).__name__
        raise _Refused(f"expected a function grade(sample, item) in the source, found {found}")
    return lambda payload: _shown(grade(payload["sample"], payload["item"]))


def load_reasoning_gym(setup: dict[str, Any]) -> Call:
    sys.path.extend(setup["paths"])
    import reasoning_gym  # type: ignore[import-untyped]
    from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped]

    if setup["task"] not in DATASETS:
        import difflib

        near = ", ".join(difflib.get_close_matches(setup["task"], DATASETS, 5)) or "chain_sum or another one"
        raise _Refused(f"expected a task of reasoning_gym such as {near}, found {setup['task']}")

    def made(size: int) -> Any:
        return reasoning_gym.create_dataset(setup["task"], **setup["config"], seed=setup["seed"], size=size)

    made(1)
    pattern = re.compile(setup["pattern"]) if setup["pattern"] is not None else None
    datasets: dict[int, Any] = {}

    def call(payload: dict[str, Any]) -> Any:
        size = payload["size"]
        data = datasets.get(size) or datasets.setdefault(size, made(size))
        if "rows" in payload:
            return [_plain(data[index]) for index in range(*payload["rows"])]
        entry = data[payload["index"]]
        if entry["question"] != payload["question"]:
            raise _Refused("expected the task's question at this index, found another one")
        return _shown(data.score_answer(_answer(payload["output_text"], pattern), entry))

    return call


def _answer(text: str, pattern: re.Pattern[str] | None) -> str | None:
    """The last match's first group, or all of it without one; None where nothing matches."""
    if pattern is None:
        return text.strip()
    last = None
    for match in pattern.finditer(text):
        last = match
    return None if last is None else last.group(1 if pattern.groups else 0)


def _plain(entry: Any) -> Any:
    return json.loads(json.dumps(entry, default=str, skipkeys=True), parse_constant=str)


class _Refused(Exception):  # noqa: N818
    """Said to the customer without a traceback."""


def _shown(value: Any) -> dict[str, Any]:
    """A reward, as JSON can say it without losing what kind of value it was."""
    if isinstance(value, dict):
        return {"dict": [[str(key)[:100], _shown(part)] for key, part in list(value.items())[:65]]}
    if value is None:
        return {"none": True}
    if isinstance(value, (bool, int, float)):
        try:
            return {"number": float(value)}
        except OverflowError:
            return {"other": "an int that is too large for a float"}
    return {"other": f"{type(value).__name__} {repr(value)[:100]}"}


def _text(error: BaseException) -> str:
    """The end of the traceback, from the customer's own lines on, without the folders of this machine."""
    if isinstance(error, _Refused):
        return str(error)
    lines = traceback.format_exception(type(error), error, error.__traceback__.tb_next if error.__traceback__ else None)
    text = "".join([line for line in lines if not any(ours in line for ours in _OURS)] or lines)
    for folder in sorted((folder for folder in sys.path if isinstance(folder, str) and folder), key=len, reverse=True):
        text = text.replace(f'File "{folder}/', 'File "')
    return text[-_TRACEBACK:]


def _alone(call: Call, request: dict[str, Any]) -> dict[str, Any]:
    """Where there may be no fork: the parent ends this process after one call."""
    before, printed = time.process_time(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            message = {"value": call(request["payload"])}
        except BaseException as error:
            message = {"failed": _text(error)}
    return {**message, "printed": printed.getvalue()[:_PRINTED], "cpu": time.process_time() - before}


def _used() -> float:
    """CPU seconds of the processes of calls, those that are still running apart."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def _child(call: Call, payload: Any, cpu_seconds: int, channel: int, printed: int) -> NoReturn:
    try:
        os.close(_REPLIES)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        for fd in (1, 2):
            os.dup2(printed, fd)
        os.close(printed)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        try:
            message = {"value": call(payload)}
        except BaseException as error:
            message = {"failed": _text(error)}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        _say(message, channel)
    finally:
        os._exit(0)


def _run(call: Call, payload: Any, cpu_seconds: int) -> dict[str, Any]:
    """The child's message, or how it ended without one."""
    ours, channel = os.pipe()
    shown, printed = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(call, payload, cpu_seconds, channel, printed)
    os.close(channel)
    os.close(printed)
    message, text = _collect(pid, ours, shown)
    _, status, used = os.wait4(pid, 0)
    for fd in (ours, shown):
        os.close(fd)
    shows = {"printed": text.decode("utf-8", "replace")[:_PRINTED]}
    try:
        said = json.loads(message)
    except (ValueError, RecursionError):
        said = None
    if isinstance(said, dict) and (given := {name: said[name] for name in ("value", "failed") if name in said}):
        return {**given, **shows}
    return {**_ended(os.waitstatus_to_exitcode(status), sum(used[:2]), cpu_seconds), **shows}


def _ended(code: int, cpu: float, cpu_seconds: int) -> dict[str, Any]:
    """Why there is no message."""
    if code == -signal.SIGKILL and cpu > cpu_seconds - 0.5:
        return {"failed": f"the grader took more than {cpu_seconds} s of CPU"}
    if code == -signal.SIGKILL:
        return {"killed": True}  # by itself, or from outside: worth another try
    how = f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    return {"failed": f"the grader ended its process ({how}) before it returned a reward"}


def _collect(pid: int, ours: int, shown: int) -> tuple[bytes, bytes]:
    """Reads both pipes until the child has ended: others that it started may hold them open for ever."""
    parts, limits = {ours: b"", shown: b""}, {ours: _MESSAGE, shown: 4 * _PRINTED}
    poll, ended = select.poll(), os.pidfd_open(pid)
    for fd in (ours, shown, ended):
        poll.register(fd, select.POLLIN)
        os.set_blocking(fd, False)
    over = False
    while not over:
        ready = {fd for fd, _ in poll.poll()}
        over = ended in ready
        for fd in parts if over else ready - {ended}:
            parts[fd], more = _taken(fd, parts[fd], limits[fd])
            if not more and not over:
                poll.unregister(fd)
    os.close(ended)
    return parts[ours], parts[shown]


def _taken(fd: int, before: bytes, limit: int) -> tuple[bytes, bool]:
    """What is there to be read now, at most one megabyte; what is beyond the limit is dropped. False at the end."""
    for _ in range(16):
        try:
            chunk = os.read(fd, 65536)
        except BlockingIOError:
            break
        if not chunk:
            return before, False
        before += chunk[: max(0, limit - len(before))]
    return before, True


def _clean(sweep: bool) -> bool:
    """Kills what is left of a call: this process alone has this user, or this process table. Removes its files; True
    where one cannot be removed, so that the next call gets another process."""
    if sweep:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0)[0]:
                continue
    folder = os.environ["TMPDIR"]
    try:
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            _remove(os.path.join(folder, name))
    except (OSError, RecursionError):
        return True
    return False


def _remove(path: str) -> None:
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return
    os.chmod(path, 0o700)
    for name in os.listdir(path):
        _remove(os.path.join(path, name))
    os.rmdir(path)


def _say(reply: dict[str, Any], fd: int = _REPLIES) -> None:
    view = memoryview(json.dumps({**reply, "total": time.process_time() + _used()}).encode() + b"\n")
    while view:
        view = view[os.write(fd, view) :]


def main() -> None:
    os.set_inheritable(_REPLIES, False)
    libc = ctypes.CDLL(None)
    libc.prctl(_DUMPABLE, 0, 0, 0, 0)  # a call may not look into this process
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)  # what a call leaves behind is reaped here, and its CPU time counted
    requests = os.fdopen(0, "rb", closefd=False)
    setup = json.loads(requests.readline())
    try:
        call = {"python": load_python, "reasoning_gym": load_reasoning_gym}[setup["kind"]](setup)
    except BaseException as error:
        _say({"failed": _text(error)})
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else every fork prints it again
    _say({"value": {"ready": True}})
    for line in requests:
        request, before = json.loads(line), _used()
        reply = _run(call, request["payload"], request["cpu_seconds"]) if setup["forks"] else _alone(call, request)
        over = _clean(setup["forks"])
        counted = {"cpu": _used() - before} if setup["forks"] else {}
        _say({**reply, **counted, "n": request["n"], "over": over})


main()
