"""``foretoken batch``: one answer a line, whatever interrupts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.cli.main import main
from helpers import warm

FORETOKEN = [sys.executable, "-m", "foretoken", "batch"]
PLACE = ["--dtype", "float32", "--threads", "1"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1"}
WORDS = ("Once", "The cat", "Two and two", "In 1850", "My name")


def request(number: int, **more: Any) -> dict[str, Any]:
    body = {"model": "zoo:base", "prompt": WORDS[number % 5], "temperature": 0, "max_tokens": 6 + number, **more}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, requests: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in requests))
    return path


def answers(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {each["custom_id"]: each for each in found}
    assert len(by_id) == len(found), "answered twice"
    return by_id


def test_every_request_is_answered_once_also_after_a_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [request(number) for number in range(20)]
    asked[17]["body"]["min_tokenz"] = 1
    asked[4] = {
        "custom_id": "r4",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "zoo:base", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
    }
    file, out = write(tmp_path / "asked.jsonl", asked), tmp_path / "out.jsonl"
    command = [*FORETOKEN, *PLACE, str(file), "--out", str(out), "--max-num-seqs", "1"]
    process = warm.Popen(command, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    while not out.exists() or out.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with out.open("a") as torn:
        torn.write('{"id": "batch_req-9", "custom_id": "r19", "respo')
    before = out.read_bytes().count(b"\n")
    again = ["batch", *PLACE, str(file), "--out", str(out)]
    assert main(again) == 1  # one request has a mistake
    said = capsys.readouterr().err
    assert f"{19 - before} answered now, {before} before, 1 left with an error" in said
    assert "the first: r17: unknown field 'min_tokenz'" in said
    found = answers(out)
    assert set(found) == {f"r{number}" for number in range(20)}
    assert found["r17"]["response"]["status_code"] == 400
    assert "did you mean 'min_tokens'?" in found["r17"]["response"]["body"]["error"]["message"]
    assert found["r4"]["response"]["body"]["object"] == "chat.completion"
    llm = LLM("zoo:base", dtype="float32", threads=1, speculative_config=None)
    for number in (0, 7, 19):
        (wanted,) = llm.generate([WORDS[number % 5]], SamplingParams(max_tokens=6 + number))
        assert found[f"r{number}"]["response"]["body"]["choices"][0]["text"] == wanted.text
    kept = out.read_text().splitlines()
    assert main(again) == 1  # a request with an error is sent again
    assert "0 answered now, 19 before, 1 left with an error" in capsys.readouterr().err
    del asked[17]["body"]["min_tokenz"]
    write(file, asked)
    assert main(again) == 0
    assert "1 answered now, 19 before, 0 left" in capsys.readouterr().err
    assert answers(out)["r17"]["response"]["status_code"] == 200
    assert out.read_text().splitlines()[:-1] == [line for line in kept if '"custom_id": "r17"' not in line]
    assert main(again) == 0
    assert "0 answered now, 20 before, 0 left" in capsys.readouterr().err


def test_a_wrong_model_is_an_error_until_it_is_corrected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    command = ["batch", *PLACE, "--model", "zoo:draft", "--method", "none", str(file), "--out", str(out)]
    for _ in range(2):
        write(file, [request(number, model="gpt-4") for number in range(3)])
        assert main(command) == 1
        said = capsys.readouterr().err
        assert "0 answered now, 0 before, 3 left with an error" in said
        assert "the model 'gpt-4' is not served here: use 'zoo:draft'" in said
        assert len(answers(out)) == 3
    write(file, [request(0, model="zoo:draft"), request(1, model="gpt-4")])  # r2 is no longer in the file
    assert main(command) == 1
    assert {name: each["response"]["status_code"] for name, each in answers(out).items()} == {"r0": 200, "r1": 404}
    assert "1 answered now, 0 before, 1 left with an error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no requests"),
        ("{", "line 1 is not JSON"),
        ("[]", "custom_id"),
        ('{"custom_id": "\\ud800"}', "line 1: custom_id has a lone surrogate"),
        ('\ufeff{"custom_id": "a\u2028b"}', "line 1: 'url' must be one of"),
        (json.dumps(request(1)) + "\n" + json.dumps(request(1)), "line 2: the custom_id 'r1' is used twice"),
        (json.dumps(request(1) | {"url": "/v1/embeddings"}), "'url' must be one of"),
        (json.dumps(request(1) | {"body": 5}), "'body' must be an object"),
    ],
)
def test_mistakes_are_named_before_a_model_is_loaded(
    tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(text)
    assert main(["batch", *PLACE, str(file)]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "asked.answers.jsonl").exists()


def test_answers_of_something_else_are_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write(tmp_path / "asked.jsonl", [request(1)]), tmp_path / "out.jsonl"
    for text, says in (
        ('{"custom_id": "other", "response": {"status_code": 200}}\n', "answers 'other', which"),
        ("a diary\n", "line 1 is not an answer"),
        ('{"custom_id": "r1"}\n', "line 1 is not an answer"),
        ("a diary without an end", "is not an answer of a batch"),
    ):
        out.write_text(text)
        assert main(["batch", *PLACE, str(file), "--out", str(out)]) == 2
        assert says in capsys.readouterr().err
        assert out.read_text() == text


@pytest.mark.parametrize(
    ("out", "says"), [("no/out.jsonl", "there is no folder"), (".", "this is a folder; name a file in it")]
)
def test_a_place_that_cannot_be_written(
    out: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["batch", *PLACE, str(write(tmp_path / "asked.jsonl", [request(1)])), "--out", out]) == 2
    assert says in capsys.readouterr().err


def test_a_full_disk_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "asked.jsonl", [request(1)])
    assert main(["batch", *PLACE, "--model", "zoo:draft", str(file), "--out", "/dev/full"]) == 1
    assert "/dev/full: cannot be written (No space left on device)" in capsys.readouterr().err


@pytest.mark.slow
def test_on_rays_workers(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'foretoken[ray]'")
    pytest.importorskip("pyarrow", reason="Ray Data is not installed: pip install 'foretoken[ray]'")
    file, out = write(tmp_path / "asked.jsonl", [request(number) for number in range(12)]), tmp_path / "out.jsonl"
    command = [*FORETOKEN, *PLACE, str(file), "--out", str(out), "--ray", "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert len(answers(out)) == 12


@pytest.mark.slow
def test_on_a_cluster_of_which_a_node_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'foretoken[ray]'")
    pytest.importorskip("pyarrow", reason="Ray Data is not installed: pip install 'foretoken[ray]'")
    from ray.cluster_utils import Cluster

    asked = [request(number, max_tokens=40 + number % 7, ignore_eos=True) for number in range(160)]
    file, out = write(tmp_path / "asked.jsonl", asked), tmp_path / "out.jsonl"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        other = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        command = [*FORETOKEN, *PLACE, str(file), "--out", str(out), "--ray", "--workers", "2"]
        environment = ENVIRONMENT | {"RAY_ADDRESS": cluster.address}
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        deadline = time.monotonic() + 180
        while not out.exists() or out.read_bytes().count(b"\n") < 32:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert out.read_bytes().count(b"\n") < len(asked)
        cluster.remove_node(other, allow_graceful=False)
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    finally:
        cluster.shutdown()
    found = answers(out)  # each once
    assert set(found) == {each["custom_id"] for each in asked}
    texts = {number: found[f"r{number}"]["response"]["body"]["choices"][0]["text"] for number in range(160)}
    assert all(texts[number] == texts[number + 35] for number in range(125))  # the same prompt and length
