"""What may be imported: the public names, at no cost until used, and every module on its own."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys

import pytest

import foretoken
from foretoken import catalog

# not of the plain installation
EXTRAS = ("gguf", "hypothesis", "llama_cpp", "matplotlib", "ot", "pytest", "rouge_score", "scipy", "triton")
# need triton; they are imported only where it is installed
KERNELS = ("foretoken.forward.kernels.block_attention", "foretoken.forward.kernels.tree_scan")
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(foretoken.__path__, "foretoken.")
    if not module.name.endswith("__main__") and module.name not in KERNELS
)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_public_names_are_exactly_these():
    assert foretoken.__all__ == ["LLM", "AsyncLLM", "SamplingParams", "__version__"]
    assert foretoken.LLM.__module__ == "foretoken.engine.llm"
    assert foretoken.SamplingParams.__module__ == "foretoken.options.sampling"
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", foretoken.__version__)
    assert set(foretoken.__all__) <= set(dir(foretoken))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Llm"):
        _ = foretoken.Llm


def test_import_alone_costs_no_torch():
    heavy = run("import foretoken, sys; print(*{'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules))")
    assert heavy == ""


def test_sampling_params_cost_no_torch():
    assert run("from foretoken import SamplingParams; import sys; print('torch' in sys.modules)") == "False"


def test_there_are_modules():
    assert {"foretoken.core.tree", "foretoken.engine.llm", "foretoken.cli.main"} <= set(MODULES)


def test_every_module_imports_without_any_extra():
    code = f"""
import importlib, sys, traceback
sys.modules.update(dict.fromkeys({EXTRAS!r}))  # None: importing it raises ImportError
for name in {MODULES!r}:
    try:
        importlib.import_module(name)
    except Exception:
        print(name, traceback.format_exc(limit=-1))
"""
    assert run(code) == ""


@pytest.mark.parametrize("entry", catalog.entries(), ids=lambda entry: entry.name)
def test_every_catalogue_entry_loads(entry):
    method = entry.load()
    assert method.name == entry.name
    if entry.kind == "verifier":
        assert method.promise in ("same distribution", "same stream", "same text", "approximate")
        assert method.laws
