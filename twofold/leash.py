"""A command that ends with whoever started it, however that ends.

1. The command runs in a session of its own under a keeper, which holds the reading end of a pipe. Only the starter has
   the other end.
2. When the starter lets go, is signalled or is killed, the pipe closes, and the keeper ends all processes of the
   command: SIGTERM, and SIGKILL after `grace` seconds.
3. When the command ends by itself, what it left behind is ended too. The keeper's exit status is the command's.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

TURN = 0.1
"""Seconds between two looks at whether the command has ended."""


def start(command: Sequence[str], grace: float, env: Mapping[str, str], **output: Any) -> subprocess.Popen[str]:
    """Start a command on a leash; returns its keeper.

    Args:
        grace: seconds that its processes get to end by themselves.
        output: `stdout` and `stderr`, as for `subprocess.Popen`.
    """
    keeper = [sys.executable, "-P", __file__, str(grace), *command]
    return subprocess.Popen(keeper, stdin=subprocess.PIPE, start_new_session=True, env=env, text=True, **output)


def stop(keeper: subprocess.Popen[str]) -> int:
    """End the command, if it has not ended; returns its exit status when nothing of it is left."""
    keeper.stdin.close()
    return keeper.wait()


def keep(grace: float, command: Sequence[str]) -> int:
    """What a keeper does."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while child.poll() is None and not select.select([sys.stdin], [], [], TURN)[0]:
            pass
    finally:
        # Whoever is impatient must not keep the keeper from ending the command.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end(child, grace)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end(child: "subprocess.Popen[bytes]", grace: float) -> None:
    deadline = time.monotonic() + grace
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            # A leader that has ended counts as one of its group until it is waited for.
            child.poll()
            os.killpg(child.pid, 0)
            time.sleep(TURN)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


if __name__ == "__main__":
    sys.exit(keep(float(sys.argv[1]), sys.argv[2:]))
