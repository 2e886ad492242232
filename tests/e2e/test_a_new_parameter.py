"""A sampling parameter is its declaration and its arithmetic: everything else about it follows.

A copy of the package gets one more, ``floor_p``, by an edit of two modules. It is then checked, on the command line
with its help, in files of prompts, over HTTP, among the names that a misspelling is compared with, and in the table of
the documentation, and it changes the draws.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DECLARATION = """    floor_p: Annotated[
        float, Option("Drop tokens below this probability.", least=0, most=1, remedy="use 0 to keep every token")
    ] = 0.0
"""
ARITHMETIC = """    if params.floor_p > 0.0:
        p_MV = torch.softmax(x_MV, dim=-1)
        x_MV.masked_fill_((p_MV < params.floor_p) & (p_MV < p_MV.amax(-1, keepdim=True)), -torch.inf)
"""
EDITS = (  # module, what the new lines stand before, the new lines
    ("options/sampling.py", "    min_p: Annotated[\n", DECLARATION),
    ("core/laws.py", "    if params.min_p > 0.0:\n", ARITHMETIC),
)
TRIED = """
import contextlib, io, json, pathlib
from foretoken import LLM, SamplingParams
from foretoken.cli.main import main
from foretoken.core.errors import ConfigError
from foretoken_lab.option_tables import parameters
from helpers.serving import served

PROMPT = "Once upon a time"


def command(*typed):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(typed))
    return code, out.getvalue(), err.getvalue()


def refused(**given):
    try:
        SamplingParams(**given)
    except ConfigError as error:
        return str(error)


def in_a_file(**record):
    pathlib.Path("prompts.jsonl").write_text(json.dumps({"prompt": "x", **record}))
    return command("generate", "--prompts", "prompts.jsonl")


drawn = {"temperature": 1.5, "seed": 3, "max_tokens": 24}
found = {
    "help": command("generate", "--help"),
    "typed": command("generate", "x", "--floor-p", "2"),
    "refused": [refused(floor_p=2), refused(floor_p=True), refused(floor_p=float("nan")), refused(flor_p=1)],
    "file": [in_a_file(floor_p=2), in_a_file(flor_p=1)],
    "table": parameters(SamplingParams, over_http=True),
}
with LLM("zoo:base", speculative_config=None) as llm, served(llm) as server:
    params = [SamplingParams(max_tokens=24), SamplingParams(**drawn), SamplingParams(**drawn, floor_p=1)]
    found["texts"] = [out.text for out in llm.generate([PROMPT] * 3, params)]
    body = {"model": "zoo:base", "prompt": PROMPT, **drawn}
    answers = [server.send("/v1/completions", body | more)[1] for more in ({}, {"floor_p": 1})]
    found["answers"] = [answer["choices"][0]["text"] for answer in answers]
    found["errors"] = [server.send("/v1/completions", body | wrong)[1] for wrong in ({"floor_p": 2}, {"flor_p": 1})]
    schemas = server.get("/openapi.json")[1]["components"]["schemas"]
    found["field"] = schemas["CompletionRequest"]["properties"]["floor_p"]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process finds that runs with the copy of the package."""
    folder = tmp_path_factory.mktemp("copy")
    package = folder / "foretoken"
    # with __pycache__, so that Python compiles only the edited modules
    shutil.copytree(ROOT / "src" / "foretoken", package, ignore=shutil.ignore_patterns("zoo"))
    (package / "zoo").symlink_to(ROOT / "src" / "foretoken" / "zoo", target_is_directory=True)
    for module, place, lines in EDITS:
        text = (package / module).read_text(encoding="utf-8")
        assert text.count(place) == 1
        (package / module).write_text(text.replace(place, lines + place), encoding="utf-8")
    path = os.pathsep.join([str(folder), str(ROOT / "lab" / "src"), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRIED], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return read


def test_it_is_on_the_command_line_with_its_help(found: dict[str, Any]) -> None:
    code, out, _ = found["help"]
    assert code == 0
    assert "Drop tokens below this probability." in next(line for line in out.splitlines() if "--floor-p" in line)
    code, _, err = found["typed"]
    assert code == 2
    assert "--floor-p 2.0 must be a number in [0, 1]: use 0 to keep every token" in err


def test_it_is_checked_and_compared_with_a_misspelling(found: dict[str, Any]) -> None:
    *wrong, misspelt = found["refused"]
    assert [message.split(" ")[0] for message in wrong] == ["floor_p=2", "floor_p=True", "floor_p=nan"]
    assert all(message.endswith("use 0 to keep every token") for message in wrong)
    assert misspelt.endswith("did you mean 'floor_p'?")


def test_it_may_be_given_in_a_file_of_prompts(found: dict[str, Any]) -> None:
    assert [code for code, _, _ in found["file"]] == [2, 2]
    assert "prompts.jsonl:1: floor_p=2 must be" in found["file"][0][2]
    assert "did you mean 'floor_p'" in found["file"][1][2]


def test_it_changes_the_drawn_tokens(found: dict[str, Any]) -> None:
    """With a floor of 1 only the most probable token is left, which is greedy decoding."""
    greedy, drawn, floored = found["texts"]
    assert greedy == floored != drawn
    assert found["answers"] == [drawn, floored]


def test_it_is_a_field_over_http(found: dict[str, Any]) -> None:
    wrong, misspelt = found["errors"]
    assert wrong["error"]["param"] == "floor_p"
    assert "did you mean 'floor_p'" in misspelt["error"]["message"]
    assert found["field"]["description"] == "Drop tokens below this probability."


def test_it_is_in_the_table_of_the_documentation(found: dict[str, Any]) -> None:
    row = next(line for line in found["table"] if line.startswith("| `floor_p` "))
    assert "`0.0`" in row
    assert "`--floor-p`, HTTP" in row
    assert "Drop tokens below this probability. A number in [0, 1]." in row
