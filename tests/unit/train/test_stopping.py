"""A run that is stopped while it prepares, also while native code does not come back; and the end of its time."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import warm

PREPARING = """
import hashlib, sys
from pathlib import Path
from foretoken.train import stopping
from foretoken.core.errors import ForetokenError

stopping.GRACE_SECONDS = 0.5
try:
    with stopping.stoppable(Path(sys.argv[1]), {minutes}):
        print("preparing", flush=True)
        {work}
except ForetokenError as error:
    print(f"error: {{error}}", file=sys.stderr)
    sys.exit(error.exit_code)
"""
PYTHON = "import time\n        while True: time.sleep(0.01)"
NATIVE = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)  # minutes, without the interpreter"


def start(folder: Path, work: str, minutes: float | None = None) -> subprocess.Popen[str]:
    script = PREPARING.format(work=work, minutes=minutes)
    process = warm.Popen(
        [sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "preparing\n"
    return process


@pytest.mark.parametrize("work", [PYTHON, NATIVE], ids=["python", "native"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_preparation_at_once_and_reports_kept_work(tmp_path: Path, number: int, work: str) -> None:
    process = start(tmp_path, work)
    began = time.monotonic()
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert time.monotonic() - began < 5
    assert process.returncode == 130
    assert said.strip().splitlines() == ["error: stopped; nothing was trained yet, and nothing is kept"]


@pytest.mark.parametrize("work", [PYTHON, NATIVE], ids=["python", "native"])
def test_the_limit_ends_preparation(tmp_path: Path, work: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "texts.jsonl").write_text("{}", encoding="utf-8")
    process = start(tmp_path, work, minutes=0.02)
    began = time.monotonic()
    _, said = process.communicate(timeout=20)
    assert time.monotonic() - began < 6
    assert process.returncode == 1
    assert "--minutes 0.02 were over before training began: give more; the preparation, in " in said
    assert "is kept; give the same command to go on" in said


def test_a_step_that_hangs_in_native_code_is_saved_without_it(tmp_path: Path) -> None:
    """The weights of the last whole step are written by the thread that the signal wakes."""
    script = f"""
import hashlib, os, signal, sys, threading
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import torch
from pathlib import Path
from foretoken.train import stopping
from unit.train.test_trainer import At, run

stopping.GRACE_SECONDS = 0.5

def hang(loss):
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

run(Path(sys.argv[1]), objective=At(2, hang))
"""
    began = time.monotonic()
    done = warm.run([sys.executable, "-c", script, str(tmp_path)], timeout=90)
    assert "stopped at step 2; give the same command to go on from" in done.stderr, done.stderr
    assert done.returncode == 130
    assert time.monotonic() - began < 60
    assert (tmp_path / "checkpoints" / "step-00000002" / "weights.safetensors").exists()
