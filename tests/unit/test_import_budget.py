"""What must not be imported before it is needed: modules are counted here, not seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "scipy", "matplotlib", "pydantic", "fastapi", "rich.progress", "httpx")
LIGHT = [
    "import foretoken",
    "from foretoken import LLM, SamplingParams",
    "from foretoken import LLM; SamplingParams = __import__('foretoken').SamplingParams(max_tokens=3)",
]
COMMANDS = ["--version", "generate --help", "serve --help", "methods", "zoo list"]
MISTAKES = ["generate x --method ngrm", "generate x --temperature -1"]


def imported(code: str) -> set[str]:
    """The heavy modules that are there afterwards."""
    look = f"{code}\nimport sys\nprint('|', *(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("|")[2].split())


@pytest.mark.parametrize("code", LIGHT)
def test_the_library_imports_what_computes_when_a_model_is_loaded(code):
    assert imported(code) == set()


def test_an_option_that_is_wrong_is_said_before_anything_is_imported():
    assert imported("from foretoken import LLM\ntry: LLM('zoo:base', max_seqs=2)\nexcept ValueError: pass") == set()


@pytest.mark.parametrize("command", [*COMMANDS, *MISTAKES])
def test_commands_that_compute_nothing_import_nothing_that_computes(command):
    code = f"from foretoken.cli.main import main\nmain({command.split()!r})"
    assert imported(code) & {"torch", "transformers", "scipy", "matplotlib", "fastapi"} == set()


def test_a_model_is_loaded_without_what_serves_draws_or_trains():
    code = "from foretoken import LLM\nLLM('zoo:draft', device='cpu', threads=1)"
    assert imported(code) & {"matplotlib", "fastapi", "pydantic", "rich.progress"} == set()


COMPILER = ("torch._dynamo", "torch.distributed.tensor")


def test_a_command_loads_a_model_without_the_compiler_which_is_there_afterwards():
    code = f"""
import sys
from foretoken.cli.options import load_model
from foretoken import SamplingParams
llm = load_model("zoo:draft", {{"method": "none"}}, verbose=False, device="cpu", threads=1)
print(llm.generate("Once", SamplingParams(max_tokens=2))[0].token_ids)
print([name for name in {COMPILER!r} if name in sys.modules])
import torch, gc
print(gc.isenabled(), torch.distributed.is_available(), torch._dynamo.optimize.__module__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    tokens, left_out, after = done.stdout.splitlines()
    assert tokens.count(",") == 1
    assert left_out == "[]"
    assert after == "True True torch._dynamo.eval_frame"
