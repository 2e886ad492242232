"""What must not be imported before it is needed: modules are counted here, not seconds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection

import pytest

HEAVY = ("torch", "transformers", "numpy", "scipy", "matplotlib", "pydantic", "fastapi", "rich.progress", "httpx")
LIGHT = [
    "import foretoken",
    "from foretoken import LLM, SamplingParams",
    "from foretoken import LLM; SamplingParams = __import__('foretoken').SamplingParams(max_tokens=3)",
]
COMMANDS = ["--version", "generate --help", "serve --help", "methods", "zoo list"]
MISTAKES = ["generate x --method ngrm", "generate x --temperature -1"]


def imported(code: str, names: Collection[str] = HEAVY) -> set[str]:
    """The heavy modules that are there afterwards."""
    look = f"{code}\nimport sys\nprint('|', *(name for name in {list(names)!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("|")[2].split())


@pytest.mark.parametrize("code", LIGHT)
def test_the_library_imports_what_computes_when_a_model_is_loaded(code):
    assert imported(code) == set()


def test_a_wrong_option_is_refused_before_anything_is_imported():
    assert imported("from foretoken import LLM\ntry: LLM('zoo:base', max_seqs=2)\nexcept ValueError: pass") == set()


@pytest.mark.parametrize("command", [*COMMANDS, *MISTAKES])
def test_commands_that_compute_nothing_import_nothing_that_computes(command):
    code = f"from foretoken.cli.main import main\nmain({command.split()!r})"
    assert imported(code) & {"torch", "transformers", "scipy", "matplotlib", "fastapi"} == set()


def test_a_plain_answer_imports_nothing_that_serves_draws_trains_or_compiles():
    code = """
import sys
from foretoken.__main__ import run
sys.argv = ["foretoken", "generate", "x", "--raw", "--model", "zoo:draft", "--device", "cpu", "--max-tokens", "1"]
try:
    run()
except SystemExit as done:
    assert not done.code
"""
    unused = {
        *("accelerate", "faiss", "fastapi", "matplotlib", "pandas", "ray", "scipy.optimize", "sklearn"),
        *("torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
        *("torch.distributed.tensor", "torch.onnx", "transformers.trainer", "triton"),
    }
    assert imported(code, unused) == set()


def test_a_command_does_not_collect_garbage_among_the_libraries_that_it_imports():
    code = """
import atexit, gc, sys
walks = []
def count(phase, info):
    if phase == "start" and info["generation"] == 2 and "torch.nn" in sys.modules:
        walks.append(len(sys.modules))
gc.callbacks.append(count)
atexit.register(lambda: print("|", len(walks), gc.get_freeze_count() > 100_000))  # before main's own: it runs after it
from foretoken.cli.main import main
main(["generate", "x", "--model", "zoo:draft", "--method", "draft_model", "--device", "cpu", "--max-tokens", "1"])
assert gc.isenabled()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rpartition("|")[2].split() == ["0", "True"]


def test_imported_objects_are_old_to_the_collector_and_frozen_ones_stay_frozen():
    code = """
import gc
from foretoken.core.importing import lean_imports
with lean_imports():
    kept = [[] for _ in range(50_000)]
print("|", gc.get_freeze_count(), len(gc.get_objects(generation=2)) > 50_000)
gc.freeze()
frozen = gc.get_freeze_count()
with lean_imports():
    kept += [[] for _ in range(100)]
print("|", gc.get_freeze_count() == frozen)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["|", "0", "True", "|", "True"]


def test_without_an_import_frozen_objects_are_not_counted():
    code = """
import gc
from foretoken import catalog
catalog.find("ngram", "drafter").load()
gc.freeze()
gc.get_freeze_count = lambda: 1 / 0  # it walks over all of it: at every look into the catalogue, tens of milliseconds
catalog.find("ngram", "drafter").load()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
