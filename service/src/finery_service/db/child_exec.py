"""Run a command that dies with its parent, optionally as another user. Started by path, with nothing but the stdlib.

    python -I -S child_exec.py PARENT_PID DEATH_SIGNAL UID GID COMMAND [ARGUMENT …]

UID and GID are -1 to stay who we are. It is a program and not a `preexec_fn` because that one is unsafe with threads;
the death signal is set after setuid, which clears it. The kernel sends it when the parent's *thread* that forked us
ends, so callers spawn from their main thread. Exit status 126: the user or the command cannot be had.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent, death_signal, uid, gid = (int(argument) for argument in arguments[:4])
    command = arguments[4:]
    if uid >= 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os.kill(os.getpid(), signal.SIGKILL)
    os.execv(command[0], command)  # noqa: S606 no shell is wanted


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OSError as error:
        print(f"child_exec: cannot run {sys.argv[5:6]} as uid {sys.argv[3]}: {error}", file=sys.stderr)
        sys.exit(126)
