"""Runs a command for as long as its holder lives: python leash.py COMMAND...

1. The command gets a process group of its own.
2. Standard input is the leash. When it closes, for the holder ended in whatever way, the group is asked to end, and
   killed when it has not done so in time.
3. When the command ends by itself, what is left of its group is killed, and its exit code is ours.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

_PATIENCE = 10.0
"""Seconds between asking and killing."""


def _watch(process: subprocess.Popen) -> None:
    sys.stdin.buffer.read()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_PATIENCE)
        return
    os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_watch, args=(process,), daemon=True).start()
    code = process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
