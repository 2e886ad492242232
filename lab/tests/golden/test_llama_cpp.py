"""The bundled base in files of llama.cpp's quantiser, read here and by llama.cpp: the same model up to rounding.

Neither side's activations are the other's (ours are rounded to 8 bits by rows, llama.cpp's by blocks), so logits differ
a little: two distributions of the next token are compared, and which token is best.
"""

from __future__ import annotations

import atexit
import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("gguf", reason="needs the package gguf (extra 'dev')")
llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python (extra 'bench')")

from foretoken import zoo  # noqa: E402
from foretoken.models.gguf.architecture import Architecture  # noqa: E402
from foretoken.models.load import load, load_as_is  # noqa: E402
from foretoken.native import build  # noqa: E402
from foretoken_lab.peers.gguf import export  # noqa: E402

TEXT = (
    "The old man walked down to the river in the morning and looked at the water. He had lived in the village for many "
    "years, and every day he came to the same place. Question: Tom has 12 marbles and buys 30 more. How many marbles "
    "does he have now? Answer: Tom has 42 marbles.\ndef add(a, b):\n    return a + b\n"
)


atexit.register(llama_cpp._utils.outnull_file.close)  # it leaves them open, which the interpreter reports at exit
atexit.register(llama_cpp._utils.errnull_file.close)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = zoo.path("base")
    model = AutoModelForCausalLM.from_pretrained(folder)
    return export(model, AutoTokenizer.from_pretrained(folder), tmp_path_factory.mktemp("gguf") / "base.gguf")


def quantise(source: Path, target: Path, kind: str) -> Path:
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    settings.nthread = 1
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(settings)) == 0
    return target


def theirs(path: Path, ids: list[int]) -> Tensor:
    llama = llama_cpp.Llama(str(path), n_ctx=len(ids), logits_all=True, n_threads=1, verbose=False)
    try:
        llama.eval(ids)
        return torch.from_numpy(llama.scores[: len(ids)].copy())
    finally:
        llama.close()


def ours(path: Path, ids: list[int]) -> Tensor:
    model = load_as_is(path, device="cpu").model
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


def distance(p_logits: Tensor, q_logits: Tensor) -> float:
    """Mean KL divergence of the distributions of the next token, in nats."""
    p, q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K_M", "Q4_K_S"])
def test_a_quantised_file_is_read_as_llama_cpp_reads_it(
    kind: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q4_K_M of rows of 384 is Q4_K, Q6_K, Q5_0 and Q8_0 in one file; Q4_K_S has Q5_K and Q5_1 in it."""
    ids = AutoTokenizer.from_pretrained(zoo.path("base"))(TEXT).input_ids
    path = quantise(base, tmp_path / "x.gguf", kind)
    expected, found = theirs(path, ids), ours(path, ids)
    assert distance(expected, found) < 0.005
    assert (expected.argmax(-1) == found.argmax(-1)).float().mean() > 0.93
    if kind == "Q4_0":  # what four bits cost is far more than what the two readers differ by
        assert distance(expected, ours(base, ids)) > 5 * distance(expected, found)
    # the negative control: rows of queries and keys left as they stand
    monkeypatch.setattr(Architecture, "converted", lambda self, name, stored: stored)
    assert distance(expected, ours(path, ids)) > 0.3


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M", "Q4_K_S"])
def test_the_native_decoder_takes_it(kind: str, base: Path, tmp_path: Path) -> None:
    if build.library() is None:
        pytest.skip("there is no compiled decoder on this machine")
    assert load(quantise(base, tmp_path / "x.gguf", kind), device="cpu").native_decoder is not None
