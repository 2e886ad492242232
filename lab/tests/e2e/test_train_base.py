"""``foretoken train base`` as a person runs it: folders that transformers loads alone, stops of every kind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from foretoken.cli.main import main
from foretoken.train import acceptance, distil, mixture, outputs
from foretoken_lab.recipes import diffusion
from helpers import warm
from helpers.disk import disk_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)

# the commands are the real ones, of recipes with small steps
SMALL = {"batch": 4, "micro_batch": 2}
BLOCK = 64
STEP = SMALL["batch"] * BLOCK  # tokens
DRIVER = f"""
import sys
from dataclasses import replace
from foretoken.cli.main import main
if __name__ == "__main__":
    from foretoken_lab.recipes import diffusion as module
    recipe = module.RECIPE
    module.RECIPE = replace(recipe, block={BLOCK}, schedule=replace(recipe.schedule, **{SMALL}))
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def small_recipes(monkeypatch):
    monkeypatch.setattr(outputs, "BATCH", 16)
    monkeypatch.setattr(outputs, "LENGTH", 16)
    monkeypatch.setattr(mixture, "GROW_WRITTEN", 1000)
    monkeypatch.setattr(acceptance, "MAX_TOKENS", 16)
    for module in (diffusion, distil):
        schedule = replace(module.RECIPE.schedule, **SMALL)
        monkeypatch.setattr(module, "RECIPE", replace(module.RECIPE, block=BLOCK, schedule=schedule))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORETOKEN_DATA", raising=False)
    monkeypatch.setenv("FORETOKEN_ZOO", str(tmp_path / "zoo"))
    lines = [
        {"prompt": f"Tom has {n} marbles. He buys {n + 3} more. How many?", "response": f"He has {2 * n + 3}."}
        for n in range(400)
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Tom has 1000 marbles. He buys 1003 more. How many?"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "fields.jsonl").write_text('{"text": "good"}\n{"txt": "bad"}\n')
    (tmp_path / "blank.txt").write_text("\n \n" * 50)
    (tmp_path / "file").write_text("")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    return tmp_path


def base(steps, *more):
    arguments = f"train base -r diffusion --out out --corpus mine.jsonl --tokens {steps * STEP} --threads 1"
    return [*arguments.split(), *more]


def weights(folder):
    return load_file(folder / "model.safetensors")


ALONE = """
import sys
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer
for kind, folder in ((AutoModelForMaskedLM, sys.argv[1]), (AutoModelForCausalLM, sys.argv[2])):
    model, found = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|bos|><|user|>\\nHi<|end|>\\n<|assistant|>\\n", text
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    assert model(input_ids=ids).logits.shape == (1, ids.shape[1], len(tokenizer))
assert "foretoken" not in sys.modules
"""


def test_stopped_killed_and_gone_on_is_the_same_model(folder):
    """SIGTERM, then kill -9, then the same command once more; against a run that nobody touched."""
    steps = 14
    command = base(steps, "--checkpoint-every", "0.05")
    checkpoints = folder / "out" / "run" / "checkpoints"

    def start_and(number):
        before = standing()
        process = warm.Popen(
            [sys.executable, "-c", DRIVER, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        until = time.monotonic() + 60
        while standing() <= before and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        return process.returncode, said

    def standing():
        return max((int(path.name[5:]) for path in checkpoints.glob("step-*") if path.suffix != ".part"), default=0)

    code, said = start_and(signal.SIGTERM)
    assert code == 130, said
    assert f"stopped at step {standing()}; give the same command to go on" in said
    assert "Traceback" not in said
    stopped = standing()
    code, said = start_and(signal.SIGKILL)
    assert code == -signal.SIGKILL, said
    killed = standing()
    assert 0 < stopped < killed < steps  # each went on where the one before had come to, and neither was done
    assert not (folder / "out" / "config.json").exists()

    assert main(command) == 0
    (folder / "out").rename(folder / "resumed")
    assert main(base(steps)) == 0
    resumed, whole = (json.loads((folder / name / "training.json").read_text()) for name in ("resumed", "out"))
    assert resumed["steps"] == whole["steps"] == steps
    assert [[tokens, loss] for tokens, _, loss in resumed["curve"]] == [
        [tokens, loss] for tokens, _, loss in whole["curve"]
    ]
    found, expected = weights(folder / "resumed"), weights(folder / "out")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert whole["seed"] == 0
    assert whole["minutes"] >= 0
    assert whole["provenance"]["versions"]["transformers"]
    assert whole["provenance"]["command"].startswith("foretoken train base -r diffusion --out out")
    [source] = whole["mixture"]
    assert source["name"] == "mine"
    assert len(source["files"][0]["sha256"]) == 64
    assert whole["curve"][-1][2] < whole["curve"][0][2]


def test_transformers_loads_the_folders_alone(folder, capsys):
    assert main(base(1)) == 0
    command = "train draft --target zoo:draft --out my-draft --corpus mine.jsonl --own-words 0 --suite prompts.jsonl"
    assert main([*command.split(), "--tokens", str(STEP), "--threads", "1"]) == 0
    done = subprocess.run([sys.executable, "-c", ALONE, "out", "my-draft"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("size", "where"), [(10_000, "the tokens"), (1_000_000, "a checkpoint"), (13_500_000, "the optimiser's state")]
)
def test_a_full_disk_is_one_line_and_space_is_enough_to_go_on(folder, capsys, size, where):
    with disk_of(size):
        assert main(base(2)) == 1, where
    out, err = capsys.readouterr()
    assert out == ""
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "cannot be written" in line
    assert "free space" in line
    assert "same command" in line
    assert "Traceback" not in err
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["run"]
    assert not list((folder / "out").rglob("step-*"))
    assert main(base(2)) == 0


def test_a_full_disk_after_a_checkpoint_keeps_it(folder, capsys):
    assert main(base(1)) == 0
    before = {path.name: path.read_bytes() for path in (folder / "out").iterdir() if path.is_file()}
    with disk_of(1_000_000):
        assert main(base(2)) == 1
    assert "the last checkpoint, step-00000001, is kept" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (folder / "out").iterdir() if path.is_file()} == before
    assert main(base(2)) == 0
    assert json.loads((folder / "out" / "training.json").read_text())["steps"] == 2


def test_a_corrected_corpus_is_read_by_the_same_command(folder, capsys):
    command = base(1)
    (folder / "mine.jsonl").rename(folder / "good.jsonl")
    (folder / "mine.jsonl").write_text('{"text": "good"}\n{"txt": "bad"}\n')
    assert main(command) == 2
    assert "mine.jsonl:2: no fields of a known document type (found 'txt')" in capsys.readouterr().err
    (folder / "good.jsonl").rename(folder / "mine.jsonl")
    assert main(command) == 0
    assert main(base(1, "--seed", "1")) == 1
    assert "holds a run with another seed; name another --out" in capsys.readouterr().err


BAD = [
    ("base -r hybri --out out", 2, "--recipe hybri: did you mean 'hybrid'?"),
    ("base --out out", 2, "--recipe"),
    ("base -r diffusion --out out", 2, "--data DIR, or set FORETOKEN_DATA"),
    ("base -r diffusion --out out --data nowhere", 2, "--data nowhere: there is no such folder"),
    ("base -r diffusion --out out --data .", 2, ".: has no factbook/qa_train.jsonl.gz"),
    ("base -r diffusion --out out --corpus mine.jsonl --minutes 0", 2, "--minutes 0.0"),
    ("base -r diffusion --out out --corpus mine.jsonl --minutes nan", 2, "--minutes nan"),
    ("base -r diffusion --out out --corpus mine.jsonl --tokens -5", 2, "--tokens -5"),
    ("base -r diffusion --out out --corpus mine.jsonl --checkpoint-every 0", 2, "--checkpoint-every 0.0"),
    ("base -r diffusion --out out --corpus mine.jsonl --threads 0", 2, "--threads"),
    ("base -r diffusion --out out --corpus mine.jsonl --seed -1", 2, "--seed"),
    ("base -r diffusion --out out --corpus mine.jsonl --device gpu", 2, "--device gpu: not available here"),
    ("base -r diffusion --out out --corpus none.jsonl", 2, "--corpus none.jsonl: no such file"),
    ("base -r diffusion --out out --corpus mine.jsonl=0", 2, "the share after '=' must be a positive number"),
    ("base -r diffusion --out file --corpus mine.jsonl", 2, "--out file: this is a file"),
    ("base -r diffusion --out file/out --corpus mine.jsonl", 2, "file is a file; name a folder to make"),
    ("base -r diffusion --out other --corpus mine.jsonl", 2, "--out other: another model lies there"),
    ("base -r diffusion --out . --corpus mine.jsonl", 2, "of no training; name a folder to make"),
    ("base -r diffusion --out out --corpus blank.txt", 2, "corpus 'blank' is empty"),
    ("base -r diffusion --out out --corpus mine.jsonl --start x", 2, "no such option: --start"),
    ("base -r diffusion --out out --corpus mine.jsonl --from ./none", 1, "./none"),
    ("base -r diffusion --out out --corpus mine.jsonl --from zoo:bas", 2, "did you mean 'base'"),
    ("base -r diffusion --out out --corpus mine.jsonl --from zoo:draft", 1, "do not fit the recipe's architecture"),
    ("base -r base --corpus mine.jsonl", 2, "zoo:base is bundled: name a folder for your own with --out"),
    ("draft --target zoo:draft --out out", 2, "--data DIR, or set FORETOKEN_DATA"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), BAD, ids=[arguments for arguments, _, _ in BAD])
def test_a_mistake_is_one_line_and_leaves_nothing(folder, capsys, arguments, code, message):
    before = sorted(path.name for path in folder.iterdir())
    assert main(["train", *arguments.split()]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert err.startswith("error: ")
    assert "internal" not in err
    assert len(err.strip().splitlines()) <= 2
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ("empty.jsonl", "corpus 'empty' is empty: it holds no document to train on"),
        ("fields.jsonl", "fields.jsonl:2: no fields of a known document type (found 'txt'); known: messages; prompt"),
    ],
)
def test_a_corpus_that_cannot_be_used(folder, capsys, corpus, message):
    assert main(["train", "base", "-r", "diffusion", "--out", "out", "--corpus", corpus, "--tokens", "64"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    *estimate, error = err.strip().splitlines()
    assert message in error
    assert "Traceback" not in err
    assert [line for line in estimate if not line.startswith("training ")] == []
    assert not list((folder / "out").glob("*.json"))
