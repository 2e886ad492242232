from __future__ import annotations

import atexit
import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from foretoken import zoo
from foretoken.core.errors import UnsupportedArchitecture
from foretoken_lab.peers.gguf import export, interleave_heads

gguf = pytest.importorskip("gguf", reason="needs the package gguf (extra 'bench')")


@pytest.fixture(scope="module")
def draft():
    folder = zoo.path("draft")
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def tiny(**changes):
    settings = {
        "vocab_size": 8200,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))


def test_interleaving_pairs_what_the_library_pairs_by_halves():
    rows = torch.arange(8).view(8, 1)  # two heads of width 4
    assert interleave_heads(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_the_chat_template_goes_along(draft, tmp_path):
    model, tokenizer = draft
    reader = gguf.GGUFReader(export(model, tokenizer, tmp_path / "draft.gguf"))
    assert reader.fields["tokenizer.chat_template"].contents() == tokenizer.chat_template
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = None
    reader = gguf.GGUFReader(export(model, tokenizer, tmp_path / "bare.gguf"))
    assert "tokenizer.chat_template" not in reader.fields


def test_weights_are_written_bit_for_bit(draft, tmp_path):
    model, tokenizer = draft
    reader = gguf.GGUFReader(export(model, tokenizer, tmp_path / "draft.gguf"))
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert "output.weight" not in found  # tied
    embedding = found["token_embd.weight"]
    assert embedding.tensor_type == gguf.GGMLQuantizationType.BF16
    weight = model.model.embed_tokens.weight.detach()
    assert (embedding.data == weight.view(torch.uint8).numpy()).all()
    query = found["blk.1.attn_q.weight"]
    wanted = interleave_heads(model.model.layers[1].self_attn.q_proj.weight.detach(), model.config.num_attention_heads)
    assert (query.data == wanted.contiguous().view(torch.uint8).numpy()).all()
    norm = found["blk.0.attn_norm.weight"]
    assert norm.tensor_type == gguf.GGMLQuantizationType.F32
    assert len(found) == 2 + 9 * model.config.num_hidden_layers


def test_untied_head_and_padded_vocabulary(draft, tmp_path):
    _, tokenizer = draft
    reader = gguf.GGUFReader(export(tiny(), tokenizer, tmp_path / "tiny.gguf"))
    assert "output.weight" in {tensor.name for tensor in reader.tensors}
    tokens = reader.fields["tokenizer.ggml.tokens"]
    assert len(tokens.data) == 8200
    assert bytes(tokens.parts[tokens.data[-1]]).decode() == "[PAD8199]"


def test_yarn_is_described(draft, tmp_path):
    _, tokenizer = draft
    yarn = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 16}
    fields = gguf.GGUFReader(export(tiny(rope_parameters=yarn), tokenizer, tmp_path / "yarn.gguf")).fields
    assert fields["llama.rope.scaling.type"].contents() == "yarn"
    assert fields["llama.rope.scaling.factor"].contents() == 8.0
    assert fields["llama.rope.scaling.original_context_length"].contents() == 16
    assert fields["llama.rope.freq_base"].contents() == 500.0
    with pytest.raises(UnsupportedArchitecture, match="rope type 'yarn'"):
        export(tiny(rope_parameters={**yarn, "beta_fast": 16.0}), tokenizer, tmp_path / "other.gguf")


def test_other_layouts_are_refused_with_the_reason(draft, tmp_path):
    _, tokenizer = draft
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    qwen = Qwen2ForCausalLM(Qwen2Config(vocab_size=8192, num_key_value_heads=2, **small))
    with pytest.raises(UnsupportedArchitecture, match="qwen2"):
        export(qwen, tokenizer, tmp_path / "a.gguf")
    with pytest.raises(UnsupportedArchitecture, match="biases"):
        export(tiny(attention_bias=True), tokenizer, tmp_path / "b.gguf")


def test_llama_cpp_reads_it_and_agrees(draft, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python (extra 'bench')")
    atexit.register(llama_cpp._utils.outnull_file.close)  # it leaves them open, which the interpreter reports at exit
    atexit.register(llama_cpp._utils.errnull_file.close)
    _, tokenizer = draft
    torch.manual_seed(0)
    model = tiny(dtype=torch.float32).eval()
    path = export(model, tokenizer, tmp_path / "tiny.gguf")
    ids = [1, 3, 300, 4000, 17, 5, 8000, 42]
    llama = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, n_threads=1, verbose=False)
    try:
        llama.eval(ids)
        theirs = torch.from_numpy(llama.scores[: len(ids)].copy())
    finally:
        llama.close()
    with torch.inference_mode():
        ours = model(torch.tensor([ids])).logits[0]
    # llama.cpp keeps keys and values in float16
    torch.testing.assert_close(theirs, ours, atol=2e-3, rtol=0)
    assert theirs.std() > 0.05
