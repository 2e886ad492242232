"""Masked checkpoints: tiny Dream and LLaDA layouts, rows and their slots, tokens that are never drafted, bad files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, Qwen2ForCausalLM

from foretoken.core.errors import ForetokenError, MismatchError, ModelError, UnsupportedArchitecture
from foretoken.methods.diffuspec.masked import MaskedLattices
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from helpers.golden import tokens_of
from helpers.requests import make_request
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import VOCAB_SIZE, save_model
from helpers.zoo_llms import target as zoo_base

MASK = 7
LLADA = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


def rename_for_llada(key: str) -> str:
    whole = {
        "model.embed_tokens.weight": "wte.weight",
        "model.norm.weight": "ln_f.weight",
        "lm_head.weight": "ff_out.weight",
    }
    if key in whole:
        return f"model.transformer.{whole[key]}"
    _, _, number, *name, end = key.split(".")
    return f"model.transformer.blocks.{number}.{LLADA['.'.join(name)]}.{end}"


def copying(folder: Path, *, behind: bool) -> None:
    """Weights by which a row's best token is 10 more than that of its own place, or of the place after it."""
    weights = load_file(folder / "model.safetensors")
    for name, value in weights.items():
        if "o_proj" in name or "down_proj" in name:
            value.zero_()
    table = weights["model.embed_tokens.weight"]
    table.copy_(
        torch.nn.functional.normalize(torch.randn(table.shape, generator=torch.Generator().manual_seed(0)), dim=1)
    )
    weights["model.norm.weight"].fill_(1.0)
    step = 11 if behind else 10  # texts count upwards: the token after is one more
    weights["lm_head.weight"] = table.roll(step, 0).clone()
    save_file(weights, folder / "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and checkpoints of both layouts: random ones and ones that copy."""
    place = tmp_path_factory.mktemp("masked")
    save_model("llama", place / "target", hidden_size=64, head_dim=32, intermediate_size=128)
    for name, kind in (("dream", "qwen2"), ("llada", "llama")):
        save_model(kind, place / name, seed=5)
        shutil.copytree(place / name, place / f"{name}-copies")
        copying(place / f"{name}-copies", behind=name == "dream")
    for name in ("dream", "dream-copies"):
        path = place / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "Dream", "mask_token_id": MASK}))
    for name in ("llada", "llada-copies"):
        path = place / name / "config.json"
        old = json.loads(path.read_text())
        path.write_text(
            json.dumps(
                {
                    "model_type": "llada",
                    "architectures": ["LLaDAModelLM"],
                    "auto_map": {"AutoModelForCausalLM": "modeling_llada.LLaDAModelLM"},
                    "d_model": old["hidden_size"],
                    "n_heads": old["num_attention_heads"],
                    "n_kv_heads": old["num_key_value_heads"],
                    "n_layers": old["num_hidden_layers"],
                    "mlp_hidden_size": old["intermediate_size"],
                    "embedding_size": old["vocab_size"],
                    "vocab_size": old["vocab_size"],
                    "max_sequence_length": old["max_position_embeddings"],
                    "rms_norm_eps": old["rms_norm_eps"],
                    "weight_tying": old.get("tie_word_embeddings", False),
                    "block_type": "llama",
                    "layer_norm_type": "rms",
                    "activation_type": "silu",
                    "rope": True,
                    "mask_token_id": MASK,
                    "eos_token_id": 2,
                }
            )
        )
        weights = load_file(place / name / "model.safetensors")
        save_file({rename_for_llada(key): value for key, value in weights.items()}, place / name / "model.safetensors")
    return place


@pytest.fixture(scope="module")
def target(folder: Path) -> LanguageModel:
    return load(str(folder / "target"), device="cpu")


def context_of(tokens: Sequence[int]) -> Any:
    return make_request(tokens, vocab_size=VOCAB_SIZE)


def logits_of(lattices: MaskedLattices, contexts: Sequence[Any]) -> list[Tensor]:
    found = lattices.lattices(contexts)
    assert all(each is not None for each in found)
    return [each.logits_kC for each in found if each is not None]


@pytest.mark.parametrize("layout", ["dream", "llada"])
def test_the_row_of_a_slot_is_the_one_that_its_layout_says(layout: str, folder: Path, target: LanguageModel) -> None:
    """Each row copies the token at its place (Dream: the next one). The text counts upwards."""
    lattices = MaskedLattices(str(folder / f"{layout}-copies"), target, slots=3, top=1)
    found = lattices.lattices([context_of([20, 21, 22, 23])])[0]
    assert found is not None
    first = found.output.best[0]
    if layout == "dream":  # row P - 1 reads the root, 23: of the next place, 24, it says 34
        assert first == 34
    else:  # row P reads the mask itself
        assert first == MASK + 10
    assert list(found.output.best[1:3]) == [MASK + (11 if layout == "dream" else 10)] * 2


def test_two_way_attention_is_that_of_the_library(folder: Path, target: LanguageModel) -> None:
    """The Dream layout against Qwen2 run with a mask of zeros: every row sees every other one."""
    tokens = tokens_of(2, 9, VOCAB_SIZE)
    lattices = MaskedLattices(str(folder / "dream"), target, slots=3, top=1)
    (found,) = logits_of(lattices, [context_of(tokens)])
    checkpoint = lattices._checkpoint.model
    library = Qwen2ForCausalLM(checkpoint.config.__class__(**checkpoint.config.to_diff_dict())).eval()
    library.load_state_dict(load_file(folder / "dream" / "model.safetensors"), strict=False)
    library.set_attn_implementation("eager")
    with torch.no_grad():
        mask = torch.zeros(1, 1, 12, 12)
        expected = library(torch.tensor([[*tokens, MASK, MASK, MASK]]), attention_mask=mask).logits[0, 8:11]
    keep = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    keep[MASK] = False
    torch.testing.assert_close(found[:, keep], expected[:, keep], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["dream", "llada"])
def test_alone_or_packed_in_any_order_the_lattices_are_the_same(
    layout: str, folder: Path, target: LanguageModel
) -> None:
    lattices = MaskedLattices(str(folder / layout), target, slots=4, top=2)
    contexts = [context_of(tokens_of(length, length, VOCAB_SIZE)) for length in (5, 17, 2)]
    together = logits_of(lattices, contexts)
    for found, expected in zip(logits_of(lattices, contexts[::-1]), together[::-1], strict=True):
        assert found.equal(expected)
    for context, expected in zip(contexts, together, strict=True):
        assert logits_of(lattices, [context])[0].equal(expected)


@pytest.mark.parametrize("layout", ["dream", "llada"])
def test_neither_mask_nor_padding_is_drafted_and_long_texts_are_cut(
    layout: str, folder: Path, target: LanguageModel
) -> None:
    lattices = MaskedLattices(str(folder / layout), target, slots=4, top=VOCAB_SIZE)
    long = tokens_of(1, 150, VOCAB_SIZE)  # it has 128 positions
    (found,) = logits_of(lattices, [context_of(long)])
    (cut,) = logits_of(lattices, [context_of(long[-124:])])
    assert found.equal(cut)
    used = set(target.tokenizer.get_vocab().values()) - {MASK}
    for row in found:
        assert set(row.isfinite().nonzero()[:, 0].tolist()) == used
    short = MaskedLattices(str(folder / layout), target, slots=4, top=1, context=10)
    assert logits_of(short, [context_of(long)])[0].equal(logits_of(short, [context_of(long[-6:])])[0])


def test_the_bundled_model_reads_its_training_text() -> None:
    target = zoo_base()
    lattices = MaskedLattices("zoo:diffusion", target, slots=8, top=5)
    long = [tokens_of(1, 400, 8000), tokens_of(2, 30, 8000)]
    contexts = [make_request(each, vocab_size=target.vocab_size) for each in long]
    cut = make_request(long[0][-184:], vocab_size=target.vocab_size)
    found = logits_of(lattices, contexts)
    assert found[0].equal(logits_of(lattices, [cut])[0])
    mask = AutoTokenizer.from_pretrained(target.source).mask_token_id
    assert all((each[:, mask] == -torch.inf).all() for each in found)


def edited(folder: Path, out: Path, **changes: Any) -> str:
    shutil.copytree(folder, out)
    path = out / "config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    return str(out)


@pytest.mark.parametrize(
    ("layout", "changes", "error", "what"),
    [
        ("llada", {"mask_token_id": None}, ModelError, "mask_token_id"),
        ("llada", {"alibi": True}, ModelError, "alibi=True is not known"),
        ("llada", {"layer_norm_type": "low_precision"}, ModelError, "layer_norm_type='low_precision'"),
        ("llada", {"n_layers": 4}, ModelError, "model.layers.3.input_layernorm.weight is missing"),
        ("llada", {"mlp_hidden_size": 64}, ModelError, "is described"),
        ("dream", {"num_hidden_layers": 2, "layer_types": None}, ModelError, "nothing is described"),
        ("dream", {"num_hidden_layers": 2}, ModelError, "do not fit the Dream layout"),
        ("dream", {"model_type": "qwen2"}, UnsupportedArchitecture, "no masked diffusion model"),
        ("dream", {"model_type": None}, ModelError, "config cannot be read"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_layout_is_refused(
    layout: str,
    changes: dict[str, Any],
    error: type[ForetokenError],
    what: str,
    folder: Path,
    target: LanguageModel,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=what):
        MaskedLattices(edited(folder / layout, tmp_path / "it", **changes), target, slots=4, top=1)


@pytest.mark.parametrize("name", ["nobody/no-such-model", "x", "\udcff"])
def test_a_name_that_is_nothing_is_refused_at_once(name: str, target: LanguageModel) -> None:
    with pytest.raises(ModelError, match="check the name"):
        MaskedLattices(name, target, slots=4, top=1)


def test_damaged_weights_and_another_tokenizer_are_refused(folder: Path, target: LanguageModel, tmp_path: Path) -> None:
    damaged = edited(folder / "dream", tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="do not fit the Dream layout"):
        MaskedLattices(damaged, target, slots=4, top=1)
    with pytest.raises(MismatchError, match="another vocabulary"):
        MaskedLattices("zoo:diffusion", target, slots=4, top=1)
    with pytest.raises(ModelError, match="leaves no text before slots=4 masks: give fewer slots, or a larger context"):
        MaskedLattices(str(folder / "dream"), target, slots=4, top=1, context=5)
