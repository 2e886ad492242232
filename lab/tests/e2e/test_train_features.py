"""``foretoken train features`` from the command line, and the page that documents it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from foretoken.cli.main import main
from foretoken_lab.features.store import FeatureStore
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model

PAGE = Path(__file__).resolve().parents[3] / "docs" / "features.md"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORETOKEN_DATA", raising=False)
    with (tmp_path / "my.jsonl").open("w") as file:
        for number in range(300):
            file.write(json.dumps({"prompt": f"What is {number} + 1?", "response": f"It is {number + 1}."}) + "\n")


def features(arguments: str) -> int:
    return main(["train", "features", *shlex.split(arguments)])


def test_text_becomes_features_of_the_target(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        f"--target {target} --corpus my.jsonl --out out --depths 0,-1,final --top-logits 3 --tokens 150 --block 32 "
        "--state-dtype float32 --json"
    )
    assert features(command) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert (summary["tokens"], summary["new"], summary["sequences"], summary["full"]) == (160, 160, 5, False)
    # three states of 64 in float32, three ids with logits, the logsumexp, token and position
    assert "804 bytes a token: 150 tokens take 0.1 MB" in captured.err
    store = FeatureStore(Path("out"))
    store.check_target(target)
    tokens_BT = torch.stack([sequence.tokens_N for sequence in store.sequences()])
    said = AutoTokenizer.from_pretrained(target).decode(tokens_BT[0])
    assert re.match(r"What is \d+ \+ 1\?\nIt is \d+\.</s>", said)  # in the target's own form
    with torch.inference_mode():
        states = AutoModelForCausalLM.from_pretrained(target)(input_ids=tokens_BT, output_hidden_states=True)
    [batch] = store.batches(1000)
    assert set(batch.hidden) == {0, 3, "final"}
    torch.testing.assert_close(batch.hidden["final"], states.hidden_states[-1].flatten(0, 1))

    before = Path("out/shard-00000.safetensors").read_bytes()
    assert features(command.replace("150", "320")) == 0
    assert json.loads(capsys.readouterr().out)["new"] == 160
    assert Path("out/shard-00000.safetensors").read_bytes() == before


def test_the_bound_is_reported_and_held(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert features(f"--target {target} --corpus my.jsonl --out out --block 16 --max-gb 0.00005") == 0
    said = capsys.readouterr().err
    assert "the limit allows about" in said
    assert "stopped because --max-gb 5e-05 is reached" in said
    held = sum(path.stat().st_size for path in Path("out").iterdir() if path.is_file())
    assert 30_000 < held <= 50_000


def test_the_page_works_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    [command] = re.findall(r"^```bash\nforetoken (.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert main(shlex.split(command.replace("\\\n", ""))) == 0
    assert "1,740 bytes a token" in capsys.readouterr().err
    [reading] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict = {}
    exec(compile(reading, str(PAGE), "exec"), names)
    assert names["x_ND"].shape == names["y_ND"].shape == (len(names["batch"]), 384)
    assert names["p_NK"].shape == (len(names["batch"]), 32)
    assert 0 < names["p_NK"].sum(-1).max() <= 1.001


BAD = [
    ("--corpus my.jsonl --depths four", 2, "--depths four: 'four' is no depth"),
    ("--corpus my.jsonl --depths 9", 2, "depth 9 does not exist: the target has 3 layers"),
    ("--corpus my.jsonl --depths ''", 2, "nothing to keep: name --depths"),
    ("--corpus my.jsonl --out my.jsonl/features", 2, "my.jsonl is a file; name a folder to make"),
    ("--corpus my.jsonl --top-logits -1", 2, "--top-logits -1: give a number"),
    ("--corpus my.jsonl --top-logits 900", 2, "the target has 101 tokens"),
    ("--corpus my.jsonl --state-dtype bf16", 2, "did you mean 'bfloat16'"),
    ("--corpus my.jsonl --max-gb 0", 2, "--max-gb 0.0: must be more than 0"),
    ("--corpus my.jsonl --max-gb 1e-6", 2, "not one sequence fits"),
    ("--corpus my.jsonl --block 512", 2, "--block 512: the target takes at most 128 tokens"),
    ("--corpus my.jsonl --tokens 0", 2, "--tokens"),
    ("--corpus my.jsonl --device gpu", 2, "device='gpu' is unknown"),
    ("--corpus my.jsonl --corpus my.jsonl=2", 2, "two files are called 'my'"),
    ("--corpus nowhere.jsonl", 2, "--corpus nowhere.jsonl: no such file"),
    ("--corpus my.jsonl=none", 2, "the share after '='"),
    ("", 2, "--data DIR, or set FORETOKEN_DATA"),
    ("--data nowhere", 2, "--data nowhere: there is no such folder"),
    ("--corpus my.jsonl --out my.jsonl", 2, "--corpus is this file, and would be lost"),
    ("--corpus my.jsonl --depths 77", 2, "(--depths): depth 77 does not exist"),
    ("--corpus my.jsonl --top-logits 99999", 2, "(--top-logits): the target has"),
    ("--corpus my.jsonl --target zoo:bse", 2, "did you mean 'base'"),
    ("--corpus my.jsonl --target ./nowhere", 1, "model './nowhere' does not exist"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), BAD)
def test_a_mistake_is_one_line(
    target: Path, capsys: pytest.CaptureFixture[str], arguments: str, code: int, message: str
) -> None:
    block = "" if "--block" in arguments else "--block 16"
    own = "" if "--target" in arguments else f"--target {target}"
    out = "" if "--out" in arguments else "--out out"
    assert features(f"{own} {out} {block} {arguments}") == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert "internal" not in error


def test_another_target_is_refused(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rest = "--corpus my.jsonl --out out --block 16 --tokens 32"
    assert features(f"--target {target} {rest}") == 0
    assert features(f"--target {target} {rest} --seed 3 --state-dtype float32") == 1
    assert (
        'another run (dtype (--state-dtype): "bfloat16" there, "float32" now; data.seed (--seed): 0'
        in capsys.readouterr().err
    )
    other = save_model("llama", tmp_path / "other", seed=1)
    assert features(f"--target {other} {rest}") == 1
    assert "holds features of another run (target:" in capsys.readouterr().err
