"""The commands as a person runs them, with the bundled models; as processes where pipes and Ctrl-C matter."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from foretoken.cli.main import main
from helpers import warm

FORETOKEN = [sys.executable, "-m", "foretoken"]
ENDINGS = {"--out": "json", "--csv": "csv", "--markdown": "md", "--report": "html"}
GENERATE = ["generate", "--threads", "1"]


@pytest.fixture
def printed(capsys):
    """Run a command line that must succeed, in this process; returns its standard output."""

    def printed(*arguments):
        code = main([*map(str, arguments)])
        out, err = capsys.readouterr()
        assert code == 0, err
        assert "Traceback" not in err
        return out

    return printed


def test_standard_input_to_text():
    command, question = [*FORETOKEN, *GENERATE, "--max-tokens", "8"], "Maria has 24 apples. How many has she?\n"
    done = warm.run(command, text=question)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "tokens per step" in done.stderr
    own = ("loading", "checking", "packing", "auto:")  # the first three on a busy machine
    said = [line for line in done.stderr.splitlines() if not line.startswith(own)]
    assert len(said) == 1  # nothing that the libraries say on their own


def test_a_file_of_prompts_gives_the_same_tokens_as_plain_decoding(tmp_path, printed):
    suite = tmp_path / "p.jsonl"
    suite.write_text(
        '{"prompt": "Maria has 24 apples. How many has she?", "prompt_logprobs": 1}\n'
        '{"turns": ["I need a bus to Fresno.", "More."]}\n'
    )
    rows = {}
    for method in ("none", "draft_model"):
        options = ["--prompts", suite, "--method", method, "--dtype", "float32", "--max-tokens", 24, "--json"]
        rows[method] = [json.loads(line) for line in printed(*GENERATE, *options).splitlines()]
    for plain, drafted in zip(rows["none"], rows["draft_model"], strict=True):
        assert drafted["token_ids"] == plain["token_ids"]
        assert drafted["promise"] == "same text"
        assert plain["tokens_per_step"] == 1.0
        assert drafted["num_tokens"] == len(drafted["token_ids"])
        assert drafted["distortion"] == 0.0
    assert rows["none"][1]["prompt"] == "I need a bus to Fresno."
    assert {len(entry["top"]) for entry in rows["none"][0]["prompt_logprobs"]} == {1}
    assert "prompt_logprobs" not in rows["none"][1]
    assert max(row["tokens_per_step"] for row in rows["draft_model"]) > 1.0


def test_a_grown_model_says_what_its_original_says_with_the_same_draft(printed):
    rows = []
    for model in ("zoo:base", "grown:base:30m"):
        options = ["--model", model, "--method", "draft_model", "--dtype", "float32", "--max-tokens", 24, "--json"]
        options += ["--set", "num_speculative_tokens=4"]  # the adaptive length depends on what a step costs
        rows.append(json.loads(printed(*GENERATE, *options, "Maria has 24 apples and buys 3. How many has she?")))
    base, grown = rows
    assert grown["token_ids"] == base["token_ids"]
    assert grown["acceptance_by_position"] == base["acceptance_by_position"]


def test_ctrl_c_flushes_the_output():
    command = [*FORETOKEN, *GENERATE, "--max-tokens", "3000", "--ignore-eos", "--raw", "Once upon a time"]
    with warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        first = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert len(first) == 20
    assert (first + rest).endswith("\n")
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err


@pytest.mark.parametrize("what", ["generate x --max-tokens 400 --ignore-eos --threads 1", "methods"])
def test_a_closed_pipe_is_quiet(what):
    reader = [sys.executable, "-c", "import sys; sys.stdin.buffer.read(1)"]
    with warm.Popen([*FORETOKEN, *what.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        subprocess.run(reader, stdin=process.stdout, check=True)
        process.stdout.close()
        err = process.stderr.read().decode()
        process.wait(timeout=120)
    assert process.returncode == 0, err
    assert "Error" not in err
    assert "Traceback" not in err


def test_bench_writes_results_and_report(tmp_path, printed):
    suite = tmp_path / "p.jsonl"
    suite.write_text(
        '{"turns": ["Maria has 24 apples. How many has she?"], "category": "maths"}\n'
        '{"turns": ["I need a bus to Fresno."], "category": "chat"}\n'
    )
    drafting = "draft_model+num_speculative_tokens=3"  # an adaptive one may draft nothing in so short a run
    methods = ["--methods", f"ngram,{drafting}"]
    options = ["--suite", suite, "--max-tokens", 12, "--repeats", 2, "--threads", 1, *methods]
    files = {name: tmp_path / f"out.{ending}" for name, ending in ENDINGS.items()}
    out = printed("bench", *options, *[part for pair in files.items() for part in pair])
    assert "speed-up by category" in out
    written = json.loads((tmp_path / "out.json").read_text())
    assert [result["method"] for result in written["results"]] == ["none", "ngram", drafting]
    for result in written["results"]:
        assert result["speedup"] > 0
        assert result["spread"]["speedup"][0] <= result["speedup"] <= result["spread"]["speedup"][1]
        assert set(result["by_category"]) == {"maths", "chat"}
        assert result["failures"] == 0
        assert result["equal_outputs"] == 1.0
        waits = result["latency"]
        assert 0 < waits["first_token_seconds"]["p50"] <= waits["first_token_seconds"]["p99"]
        assert waits["answer_seconds"]["p99"] <= result["spread"]["seconds"][1]
        assert result["memory"]["cache_bytes"] > 0
    facts = written["provenance"]
    assert facts["command"].startswith("foretoken bench --suite")
    assert (facts["threads"], facts["dtype"]) == (1, "bfloat16")
    written_by = {answer["method"]: answer["pieces"] for answer in written["samples"][0]["answers"]}
    assert not any(piece["drafted"] for piece in written_by["none"])
    assert any(piece["drafted"] for piece in written_by[drafting])
    assert {"".join(piece["text"] for piece in pieces) for pieces in written_by.values()} == {
        "".join(piece["text"] for piece in written_by["none"])
    }
    assert (tmp_path / "out.html").read_text().count("<svg") == 2 * 5
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 1 + 3 * 3
    assert "| ngram |" in (tmp_path / "out.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.html", "out.json", "out.md", "p.jsonl"]


def test_bench_over_a_grid_of_batches_and_lengths(printed):
    options = ["--limit", 1, "--repeats", 1, "--threads", 1, "--max-tokens", 4]
    options += ["--methods", "ngram", "--json"]
    results = json.loads(printed("bench", *options, "--batch-size", "1,2", "--prompt-tokens", "64,160"))["results"]
    assert [(each["prompt_tokens"], each["batch_size"], each["method"]) for each in results] == [
        (length, size, name) for length in (64, 160) for size in (1, 2) for name in ("none", "ngram")
    ]
    assert all(each["failures"] == 0 for each in results)
    assert results[0]["first_token_seconds"] < results[4]["first_token_seconds"]
