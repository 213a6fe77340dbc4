"""A command on a leash: it ends with its starter, whatever ends that, and so does all that it started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny import ROOT
from twofold import leash

STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "100"])
aside = pathlib.Path("pids.part")
aside.write_text(f"{os.getpid()} {child.pid}")
aside.rename("pids")
time.sleep(100)
"""

STARTER = """
import os, signal, sys, time
from twofold import leash
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a script ignore it
keeper = leash.start([sys.executable, "-c", sys.argv[1]], 0.3, os.environ)
time.sleep(100)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 20
    while any(map(alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def pids_of(process: "subprocess.Popen[str]") -> list[int]:
    while not Path("pids").exists():
        assert process.poll() is None
        time.sleep(0.05)
    return [int(pid) for pid in Path("pids").read_text().split()]


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_its_starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: signal.Signals) -> None:
    monkeypatch.chdir(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    starter = subprocess.Popen([sys.executable, "-c", STARTER, STUBBORN], env=env)
    pids = pids_of(starter)
    assert all(map(alive, pids))
    starter.send_signal(ending)
    starter.wait()
    assert gone(pids)


def test_stop_waits_until_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    keeper = leash.start([sys.executable, "-c", STUBBORN], 0.3, os.environ)
    pids = pids_of(keeper)
    assert leash.stop(keeper) == 128 + signal.SIGKILL
    assert not any(map(alive, pids))


def test_a_command_that_ends_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = ["sh", "-c", "sleep 100 & echo $!; exit 7"]
    keeper = leash.start(command, 5, os.environ, stdout=subprocess.PIPE)
    pid = int(keeper.stdout.readline())
    assert keeper.wait() == 7
    assert gone([pid])


def test_a_second_signal_does_not_let_the_command_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keeper = leash.start([sys.executable, "-c", STUBBORN], 0.5, os.environ)
    pids = pids_of(keeper)
    keeper.terminate()
    time.sleep(0.2)
    keeper.terminate()
    keeper.wait()
    assert gone(pids)
