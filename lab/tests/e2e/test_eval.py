"""``foretoken eval`` as a person runs it: figures, saved outputs, a comparison, and mistakes told in one line."""

from __future__ import annotations

import json

import pytest

from foretoken.cli.main import main
from helpers.tiny_models import save_model

FIELDS = {
    "model", "method", "task", "num_examples", "accuracy", "interval", "categories", "nll", "truncated", "refused",
    "failed", "mean_tokens", "tokens_per_step", "tokens_per_second", "distortion", "kl", "flops_per_token", "promise",
    "seconds", "provenance",
}  # fmt: skip


MODEL = ("--model", "zoo:draft", "--dtype", "float32", "--threads", "1")


@pytest.fixture
def evaluated(tmp_path, monkeypatch, capsys):
    """Run a command line in an empty folder without data; returns its exit code, output and error output."""
    monkeypatch.delenv("FORETOKEN_DATA", raising=False)
    monkeypatch.chdir(tmp_path)

    def evaluated(*arguments, model=MODEL):
        code = main(["eval", *model, *arguments])
        written = capsys.readouterr()
        return code, written.out, written.err

    return evaluated


def test_figures_saved_outputs_and_a_comparison(tmp_path, evaluated):
    done, out, err = evaluated("--task", "profiles,code", "--limit", "4", "--json", "--save-outputs", "plain.jsonl")
    assert done == 0, err
    assert "Traceback" not in err
    profiles, code = (json.loads(line) for line in out.splitlines())
    assert FIELDS | {"f1"} == set(profiles)
    assert FIELDS | {"parses", "defines"} == set(code)
    assert profiles["num_examples"] == 4
    assert profiles["method"] == {"method": "none"}
    assert profiles["promise"] == "same text"
    assert profiles["nll"] > 0
    assert profiles["provenance"]["command"].startswith("foretoken eval --model zoo:draft")
    assert profiles["provenance"]["max_tokens"] == 32
    saved = [json.loads(line) for line in (tmp_path / "plain.jsonl").read_text().splitlines()]
    assert [line["task"] for line in saved] == ["profiles"] * 4 + ["code"] * 4
    assert sum(line["scores"]["correct"] for line in saved[:4]) / 4 == profiles["accuracy"]

    done, out, err = evaluated(
        "--task", "profiles", "--limit", "4", "--method", "ngram", "--against-outputs", "plain.jsonl"
    )
    assert done == 0, err
    assert "zoo:draft, ngram, float32" in out
    assert "accuracy +0.0 points against the other run" in out
    assert "Traceback" not in err


def test_texts_are_read_with_tasks_and_alone(tmp_path, evaluated):
    (tmp_path / "story.txt").write_text("Once upon a time there was a small dog. " * 60)
    (tmp_path / "noise.txt").write_text("zq xv 9% qqk jj wvw !! pz " * 60)
    texts = ("--text", "story.txt", "--text", "noise.txt", "--text-tokens", "600")
    done, out, err = evaluated("--task", "code", "--limit", "2", *texts, "--json")
    assert done == 0, err
    code, story, noise = (json.loads(line) for line in out.splitlines())
    assert code["task"] == "code"
    assert (story["text"], story["num_tokens"], noise["text"]) == ("story.txt", 598, "noise.txt")  # of two windows
    assert story["interval"][0] < story["nats"] < noise["nats"]
    done, out, err = evaluated(*texts[:2])
    assert done == 0, err
    assert "story.txt: " in out
    assert " nats a token (95 %: " in out
    done, _, err = evaluated("--text", "nowhere.txt")
    assert done == 2
    assert err.splitlines() == ["error: --text nowhere.txt: no such file"]


ERROR_FIELDS = {
    "model", "dtype", "kv_cache_dtype", "reference", "native", "text", "num_tokens", "mean_kl", "median_kl", "p99_kl",
    "same_best", "perplexity", "reference_perplexity", "perplexity_change", "provenance",
}  # fmt: skip


def test_rounding_is_measured_against_float32(tmp_path, evaluated):
    """Two texts and a bundled one; of float32 nothing is left, int4 costs more than int8, and so do keys in codes."""
    (tmp_path / "story.txt").write_text("Once upon a time there was a small dog. " * 60)
    (tmp_path / "chats.jsonl").write_text('{"prompt": "Add 3 and 4.", "response": "The answer is 7."}\n' * 9)
    texts = ("--text", "story.txt", "--text", "chats.jsonl", "--text-tokens", "100")
    errors = {}
    for options in (("float32",), ("int8",), ("int4",), ("float32", "--kv-cache-dtype", "int8")):
        model = ("--model", "zoo:draft", "--threads", "1", "--dtype", *options)
        done, out, err = evaluated("--against", "float32", *texts, "--json", model=model)
        assert done == 0, err
        story, chats = (json.loads(line) for line in out.splitlines())
        assert set(story) == ERROR_FIELDS
        assert (story["text"], chats["text"]) == ("story.txt", "chats.jsonl")
        assert story["num_tokens"] >= 100
        assert (story["reference"], story["dtype"]) == ("float32", options[0])
        assert story["reference_perplexity"] > 1
        assert story["perplexity"] / story["reference_perplexity"] - 1 == pytest.approx(story["perplexity_change"])
        errors[options] = story["mean_kl"]
    plain, int8, int4, keys = errors.values()
    assert plain < 1e-7 < int8 < int4
    assert 10 * plain < keys < int4


def test_rounding_is_shown_as_a_table_over_the_bundled_text(capsys):
    model = ("--model", "zoo:draft", "--dtype", "int8", "--threads", "1")
    assert main(["eval", *model, "--against", "zoo:draft", "--text-tokens", "300"]) == 0
    out, err = capsys.readouterr()
    title, *rows = out.splitlines()
    assert title.strip() == "zoo:draft, int8, against zoo:draft in float32"
    assert "mean KL" in rows[1]
    assert "same best" in rows[1]
    cells = [cell.strip() for cell in rows[3].strip("│").split("│")]
    assert cells[0] == "prose_and_code.txt"
    assert 0 < float(cells[2]) < 0.01
    assert cells[5].endswith("%")
    assert "Traceback" not in err


def test_a_reference_with_other_tokens_is_refused_before_weights_are_read(folder, capsys):
    assert main(["eval", "--model", "zoo:draft", "--against", "other"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: --against other has another vocabulary than 'zoo:draft'" in err.splitlines()[-1]


def test_a_reference_that_does_not_fit_is_refused_before_weights_are_read(folder, capsys, monkeypatch):
    from foretoken_lab.tasks import reference

    monkeypatch.setattr(reference, "_free_memory", lambda: 10**6)
    assert main(["eval", "--model", "zoo:draft", "--against", "float32"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "--against float32: the reference takes about" in err.splitlines()[-1]


def test_an_interruption_keeps_the_tasks_that_were_done(tmp_path, capsys, monkeypatch):
    from foretoken_lab.tasks import evaluate as module

    real = module.evaluate

    def cut_short(llm, task, *rest, **options):
        if task.name == "json":
            raise KeyboardInterrupt
        return real(llm, task, *rest, **options)

    monkeypatch.setattr(module, "evaluate", cut_short)
    saved = tmp_path / "saved.jsonl"
    code = main(["eval", *MODEL, "--task", "profiles,json,code", "--limit", "2", "--save-outputs", str(saved)])
    assert code == 130
    assert "profiles: f1" in capsys.readouterr().out
    assert len(saved.read_text().splitlines()) == 2


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A place with a few files, no data folder, and an engine that must not be reached."""
    import foretoken

    def refuse(*args, **options):
        raise AssertionError("the model was loaded before the input was checked")

    monkeypatch.setattr(foretoken, "LLM", refuse)
    monkeypatch.delenv("FORETOKEN_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "short.txt").write_text("Once upon a time.")
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9 " * 100)
    save_model("llama", tmp_path / "other")
    (tmp_path / "none.jsonl").write_text('{"task": "qmsum", "id": "1", "scores": {"rouge1": 0.5}}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "no task: name one with --task"),
        ("--task arithmetix", "did you mean 'arithmetic'"),
        ("--task json,", "names with commas"),
        ("--task json,json", "twice"),
        ("--task json --limit 0", "--limit 0: ask at least one example"),
        ("--task json --limit many", "--limit"),
        ("--task squad --limit 500", "has 200 examples"),
        ("--task gsm8k", "--data DIR, or set FORETOKEN_DATA"),
        ("--task gsm8k --data nowhere", "no such folder"),
        ("--task json --data nowhere", "--data nowhere: what --task json asks is generated"),
        ("--task json --text-tokens 50", "--text-tokens is for --text FILE"),
        ("--text .", "--text .: this is a folder, name a file"),
        ("--text other.jsonl --limit 3", "--limit is for tasks"),
        ("--text other.jsonl --save-outputs out.jsonl", "--save-outputs is for tasks"),
        ("--text other.jsonl --against-outputs none.jsonl", "--against-outputs is for tasks"),
        ("--text other.jsonl --method suffix", "--method is for tasks"),
        ("--task json --prompt-tokens 300", "it is for keys, qmsum"),
        ("--task keys --prompt-tokens 0", "--prompt-tokens"),
        ("--task json --max-tokens 0", "max_tokens=0"),
        ("--task json --temperature -1", "temperature=-1.0"),
        ("--task json --method ngrm", "did you mean 'ngram'"),
        ("--task json --method ngram --draft-model zoo:draft", "does not apply to method 'ngram'"),
        ("--task json --set novalue", "key=value"),
        ("--task json --model zoo:bse", "did you mean 'base'"),
        ("--task json --dtype float99", "dtype='float99' is unknown"),
        ("--task json --save-outputs nowhere/out.jsonl", "there is no folder nowhere"),
        ("--task json --against-outputs missing.jsonl", "missing.jsonl: no such file"),
        ("--task json --against-outputs other.jsonl", "needs the field 'task'"),
        ("--task json --against-outputs none.jsonl", "no scored answers"),
        ("--against float32 --task json", "leave one out"),
        ("--against float32 --seed 3", "--seed is for tasks, and a text has none"),
        ("--against float32 --method suffix", "--method is for tasks, and a text has none"),
        ("--against float32 --save-outputs out.jsonl", "--save-outputs is for tasks"),
        ("--against int8", "a reference is not rounded; name float32"),
        ("--against none.jsonl", "--against-outputs FILE.jsonl"),
        ("--against flaot32", "is neither a dtype (float32, bfloat16, float16) nor a model"),
        ("--against=", "--against is empty"),
        ("--against ./nowhere", "--against ./nowhere: there is no such folder or file"),
        ("--against zoo:bse", "did you mean 'base'"),
        ("--against short.txt", "--against short.txt is a file: name the folder"),
        ("--against float32 --text nowhere.txt", "--text nowhere.txt: no such file"),
        ("--against float32 --text short.txt", "--text short.txt: holds 6 tokens; at least 32 are needed"),
        ("--against float32 --text latin.txt", "not UTF-8 text"),
        ("--against float32 --text-tokens 1", "--text-tokens"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_loaded(folder, capsys, arguments, message):
    model = ("--model", "zoo:draft") if arguments.startswith("--against") else ()
    code = main(["eval", *model, *arguments.split()])
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 2


@pytest.mark.parametrize("arguments", ["--list", "--task list"])
def test_the_tasks_are_listed(folder, capsys, arguments):
    assert main(["eval", *arguments.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("arithmetic")
    assert "needs --data" in lines[-1]
    assert main(["eval", *arguments.split(), "--json"]) == 0
    (listed,) = capsys.readouterr().out.splitlines()
    assert [each["name"] for each in json.loads(listed)["tasks"]] == [line.split()[0] for line in lines]
