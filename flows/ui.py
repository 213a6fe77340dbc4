"""All that shows and schedules the runs of this checkout, on loopback: what `make ui` starts.

1. The ports are free, or the settings to change are named.
2. A Prefect server, MLflow and the process that serves the deployments start, each on a leash, each with a log in
   `.work/ui`. They are ready when the servers answer.
3. Ctrl-C, SIGTERM or the end of one of them ends all: first what serves, so that it can tell the server.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tasks import WORK
from twofold import leash
from twofold.errors import TwofoldError
from twofold.settings import Ui, load

PARAMS = Path("params.yaml")
HOST = "127.0.0.1"
LOGS = WORK / "ui"
START = 180.0
"""Seconds that a server gets to answer."""
GRACE = 30.0
"""Seconds that it gets to end; more than a stage gets when its run ends."""


def show() -> None:
    """Start all, and wait until it is to end.

    Raises:
        TwofoldError: a port is taken, or one of them ended.
    """
    ports = load(PARAMS).ui
    check_free("ui.prefect_port", ports.prefect_port)
    check_free("ui.mlflow_port", ports.mlflow_port)
    prefect, mlflow = f"http://{HOST}:{ports.prefect_port}", f"http://{HOST}:{ports.mlflow_port}"
    env = {**os.environ, "PREFECT_API_URL": f"{prefect}/api", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with ExitStack() as stack:
        running = {name: stack.enter_context(_running(name, command, env)) for name, command in _servers(ports).items()}
        _wait_for("prefect", f"{prefect}/api/health", running)
        # What happens in a run is its log; stages set a level of their own.
        serving = {**env, "PREFECT_LOGGING_LEVEL": "INFO"}
        running["deployments"] = stack.enter_context(_running("deployments", ["-m", "flows.serve"], serving))
        _wait_for("mlflow", f"{mlflow}/health", running)
        print(f"Prefect      {prefect}\nMLflow       {mlflow}\nDeployments  {prefect}/deployments", flush=True)
        print(f"Logs are in {LOGS}. Ctrl-C ends all.", flush=True)
        while True:
            _check_alive(running)
            time.sleep(0.5)


def check_free(setting: str, port: int) -> None:
    """Raises `TwofoldError` when another program listens on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise TwofoldError(
                f"Port {port} of {HOST} cannot be used ({error.strerror}). End what listens there, or set {setting} in "
                f"{PARAMS} to another port."
            ) from error


def _servers(ports: Ui) -> dict[str, list[str]]:
    work = WORK.absolute()
    return {
        "prefect": ["-m", "prefect", "server", "start", "--host", HOST, "--port", str(ports.prefect_port)],
        "mlflow": [
            *("-m", "mlflow", "server", "--host", HOST, "--port", str(ports.mlflow_port), "--workers", "1"),
            *("--backend-store-uri", f"sqlite:///{work / 'mlflow.db'}"),
            *("--artifacts-destination", str(work / "mlflow-artifacts")),
        ],
    }


@contextmanager
def _running(name: str, command: Sequence[str], env: dict[str, str]) -> "Iterator[subprocess.Popen[str]]":
    LOGS.mkdir(exist_ok=True)
    with (LOGS / f"{name}.log").open("w") as log:
        keeper = leash.start([sys.executable, *command], GRACE, env, stdout=log, stderr=log)
    try:
        yield keeper
    finally:
        leash.stop(keeper)


def _wait_for(name: str, address: str, running: "dict[str, subprocess.Popen[str]]") -> None:
    deadline = time.monotonic() + START
    while not _answers(address):
        _check_alive(running)
        if time.monotonic() > deadline:
            raise TwofoldError(f"{name} does not answer at {address} after {START:.0f} s. See {LOGS / name}.log.")
        time.sleep(0.2)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def _check_alive(running: "dict[str, subprocess.Popen[str]]") -> None:
    for name, keeper in running.items():
        if keeper.poll() is not None:
            path = LOGS / f"{name}.log"
            end = "\n".join(path.read_text(errors="replace").splitlines()[-5:])
            raise TwofoldError(f"{name} has ended; {path} says why:\n{end}")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # A script's shell has what it starts in the background ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        show()
    except KeyboardInterrupt:
        print("\nEnded.")
    except TwofoldError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
