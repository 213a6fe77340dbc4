"""`make ui`: a port that is taken is said so, and what it starts ends with it."""

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml

from tests.tiny import ROOT, environment

PATIENCE = 120
"""Seconds."""


def free_ports() -> list[int]:
    """Two that differ."""
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in (one, other)]


def start(folder: Path, prefect_port: int, mlflow_port: int) -> "subprocess.Popen[str]":
    ports = {"prefect_port": prefect_port, "mlflow_port": mlflow_port}
    (folder / "params.yaml").write_text(yaml.safe_dump({"ui": ports}))
    env = environment() | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "flows.ui"]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("setting", "place"), [("ui.prefect_port", 0), ("ui.mlflow_port", 1)])
def test_an_occupied_port_is_named_with_its_setting(tmp_path: Path, setting: str, place: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = free_ports()
        ports[place] = taken.getsockname()[1]
        process = start(tmp_path, *ports)
        said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 2
    assert f"Port {ports[place]} of 127.0.0.1 cannot be used" in said
    assert f"set {setting} in params.yaml" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    prefect, mlflow = free_ports()
    process = start(tmp_path, prefect, mlflow)
    try:
        said = [process.stdout.readline() for _ in range(4)]
        assert [line.split()[-1] for line in said[:3]] == [
            f"http://127.0.0.1:{prefect}",
            f"http://127.0.0.1:{mlflow}",
            f"http://127.0.0.1:{prefect}/deployments",
        ]
        assert urllib.request.urlopen(f"http://127.0.0.1:{mlflow}/health").status == 200
        # Ourselves, and each of the three under its keeper.
        deadline = time.monotonic() + PATIENCE
        while len(running_in(tmp_path)) < 7:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert running_in(tmp_path) == []


def running_in(folder: Path) -> list[int]:
    """Processes that work in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder:
                found.append(int(process.name))
        except OSError:
            continue
    return found
