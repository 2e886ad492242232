"""EAGLE-3 folders of every maker against a reference that is written down apart (helpers/published_eagle.py)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from foretoken import LLM, SamplingParams
from foretoken.core.draft import NO_DRAFT, Sampled
from foretoken.core.errors import ConfigError, ModelError
from foretoken.core.protocols import Budget, Features
from foretoken.drafting.published.folder import method_for
from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.methods.eagle.drafter import EagleDrafter
from foretoken.models.load import load, load_as_is
from helpers.feature_heads import COLUMNS, STEPS, difference, read_text, runner_of, served_logits
from helpers.gguf_files import rewrite
from helpers.gguf_heads import save as save_gguf
from helpers.published_eagle import HEAD_DIM, VOCAB, WIDTH, Folder
from helpers.requests import make_request
from helpers.tiny_models import save_model

LAYERS = 7
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
_RATES, _GAIN = ROPE_INIT_FUNCTIONS["yarn"](
    LlamaConfig(head_dim=HEAD_DIM, rope_parameters={**YARN, "rope_theta": 10000.0}), torch.device("cpu")
)


def speculators(**others: Any) -> dict[str, Any]:
    owner = {"algorithm": "eagle3", "verifier": {"name_or_path": "someone/model", "architectures": []}}
    return {"speculators_model_type": "eagle3", "speculators_config": owner, **others}


def nested(ids: list[int], **others: Any) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, **others}}


SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"]}
FOLDERS = {
    "SafeAILab": Folder(config={"architectures": ["LlamaForCausalLM"]}, own_embedding=True),
    "SafeAILab, pickled": Folder(config={"architectures": ["LlamaForCausalLM"]}, pickled=True),
    "SafeAILab, all tokens": Folder(config={"architectures": ["LlamaForCausalLM"]}, scored=101, maps=("d2t",)),
    "SpecForge": Folder(config=SPECFORGE | nested([1, 3, 5]) | {"norm_output": True}, taps=(2, 4, 6)),
    "SpecForge, boundaries": Folder(config=SPECFORGE | nested([2, 3, 5]), taps=(2, 3, 5)),
    "SpecForge, 3.1": Folder(
        config=SPECFORGE | nested([1, 3, 5]) | {"norm_output": True, "fc_norm": True},
        taps=(2, 4, 6),
        norms="fc_norm",
        normed_output=True,
    ),
    "speculators": Folder(
        block="layers.0",
        taps=(1, 3, 5),
        config=speculators(eagle_aux_hidden_state_layer_ids=[1, 3, 5, 7], norm_before_residual=True),
        nested="transformer_layer_config",
        own_embedding=True,
        normed_residual=True,
        head_norms=True,
    ),
    "speculators, layers, windows, yarn": Folder(
        block="layers.0",
        layers=3,
        windows=(0, 4, 4),
        config=speculators(
            rope_scaling=YARN, layer_types=["full_attention", *["sliding_attention"] * 2], sliding_window=4
        ),
        nested="transformer_layer_config",
        rates=(_RATES.double(), _GAIN),
    ),
    "ModelOpt": Folder(block="layers.0", config={"eagle_config": {"use_last_layernorm": True}}, maps=("d2t",)),
    "ModelOpt, named": Folder(
        block="layers.0",
        config=nested([1, 2, 3], norm_before_fc=True),
        maps=("d2t",),
        own_head=False,
        norms="input_norm",
    ),
    "ModelOpt, final state": Folder(
        block="layers.0", config={"eagle_config": {"use_aux_hidden_state": False}}, taps=("final",), maps=("d2t",)
    ),
    "DeepSpec": Folder(
        block="layers.0",
        taps=(2, 3, 4, 5, 6),
        config={"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 2, 3, 4, 5]},
        scored=101,
        maps=(),
        own_embedding=True,
        head_norms=True,
    ),
    "NeMo": Folder(prefix="model.", block="layers.0", config=nested([1, 2, 3]), own_embedding=True),
}
PARALLEL = {
    "P-EAGLE": Folder(
        layers=2,
        config={"ptd_token_id": 7, **nested([2, 3, 5], norm_before_fc=True)},
        taps=(2, 3, 5),
        norms="input_norm",
        own_embedding=True,
        mask=7,
    ),
    "P-EAGLE of speculators": Folder(
        block="layers.0",
        config=speculators(eagle_aux_hidden_state_layer_ids=[1, 3, 5], mask_token_id=9),
        nested="transformer_layer_config",
        taps=(1, 3, 5),
        layers=2,
        mask=9,
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with two layers more than the highest default tap."""
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128, "num_hidden_layers": LAYERS}
    return save_model("llama", tmp_path_factory.mktemp("tiny"), **sizes)


def by_reference(folder: Folder, tiny: Path, tokens: list[int]) -> dict[tuple[int, int], Tensor]:
    model = load_as_is(str(tiny), device="cpu").model
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    streams: dict[Any, Tensor] = {depth: each[0] for depth, each in enumerate(states[:-1])}
    streams["final"] = states[-1][0]
    tables = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    return {
        (column, step): folder.logits(streams, torch.tensor(tokens[: column + 2 + step]), column + 1, *tables)
        for column in COLUMNS
        for step in range(STEPS)
    }


@pytest.mark.parametrize("maker", FOLDERS)
def test_a_folder_computes_what_its_maker_describes(maker: str, tiny: Path, tmp_path: Path) -> None:
    network = Eagle.load(FOLDERS[maker].write(tmp_path / "head"))
    network.check_target(load(str(tiny), device="cpu"))
    text = read_text(network, tiny)
    expected = by_reference(FOLDERS[maker], tiny, text.tokens)
    for way in ("native", "torch"):
        assert difference(served_logits(runner_of(network, tiny, way), text), expected) < 1e-5
    assert difference(text.logits, expected) < 1e-5
    if network.ids_K is not None:
        assert network.ids_K.tolist() == list(FOLDERS[maker].ids)
    network.save(tmp_path / "again")
    assert Eagle.load(tmp_path / "again").config == network.config


@pytest.mark.parametrize("maker", ["SafeAILab", "speculators"])
def test_an_eagle_2_folder_computes_what_its_maker_describes(maker: str, tiny: Path, tmp_path: Path) -> None:
    """A linear layer over token and final state, a layer without its first norm, and the target's LM head."""
    source = Folder(block="layers.0", taps=("final",)).tensors()
    inner = {name: value for name, value in source.items() if name.startswith("layers.0") and "norm" not in name}
    inner["layers.0.post_attention_layernorm.weight"] = source["layers.0.post_attention_layernorm.weight"]
    w = {k: v[:, :WIDTH] if any(f".{part}_proj" in k for part in "qkv") else v for k, v in inner.items()}
    w["fc.weight"] = torch.randn(WIDTH, 2 * WIDTH, generator=torch.Generator().manual_seed(2)) / WIDTH**0.5
    Folder(block="layers.0", scored=VOCAB).write(tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    config.pop("draft_vocab_size")
    names = {"layers.0.": "transformer.", "fc.": "fusion_fc."} if maker == "speculators" else {}
    if names:
        owner = {"algorithm": "eagle", "verifier": {"name_or_path": "someone/model"}}
        config = {"transformer_layer_config": config, "speculators_model_type": "eagle", "speculators_config": owner}
    stored = {next((n + k[len(o) :] for o, n in names.items() if k.startswith(o)), k): v for k, v in w.items()}
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in stored.items()}, tmp_path / "head" / "model.safetensors")

    text = read_text(Eagle.load(tmp_path / "head"), tiny)
    model = load_as_is(str(tiny), device="cpu").model
    with torch.inference_mode():
        final = model(torch.tensor([text.tokens]), output_hidden_states=True).hidden_states[-1][0]
    table, head = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    angles = torch.arange(len(text.tokens)).double()[:, None] * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = (torch.cat([f(angles)] * 2, -1).float() for f in (torch.cos, torch.sin))

    def heads(x: Tensor, part: str, rotated: bool) -> Tensor:
        y = (x @ w[f"layers.0.self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1)
        turned = torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1)
        y = y * cos[: len(x)] + turned * sin[: len(x)] if rotated else y
        return y if part == "q" else y.repeat_interleave(2, 0)

    def row(tokens: list[int], f: Tensor) -> Tensor:
        x = torch.cat([table[torch.tensor(tokens)], f], -1) @ w["fc.weight"].T
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        scores = (heads(x, "q", True) @ heads(x, "k", True).mT / HEAD_DIM**0.5).masked_fill(later, -torch.inf)
        attended = (scores.softmax(-1) @ heads(x, "v", False)).transpose(0, 1).flatten(1)
        x = x + attended @ w["layers.0.self_attn.o_proj.weight"].T
        y = x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * w["layers.0.post_attention_layernorm.weight"]
        gate, up = (y @ w[f"layers.0.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return (x + (gate.sigmoid() * gate * up) @ w["layers.0.mlp.down_proj.weight"].T)[-1:]

    expected = {}
    for column in COLUMNS:
        f = final[: column + 1]
        for step in range(STEPS):
            out = row(text.tokens[1 : column + 2 + step], f)
            expected[column, step], f = (out @ head.T)[0], torch.cat([f, out])
    assert difference(text.logits, expected) < 1e-5


GGUF_FIELDS = {
    "block_count": 1,
    "context_length": 2048,
    "embedding_length": WIDTH,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "vocab_size": VOCAB,
    "target_hidden_size": WIDTH,
}


@pytest.mark.parametrize(
    ("folder", "fields"),
    [
        (Folder(block="layers.0"), {"extract_layers": [2, 3, 4]}),
        (
            Folder(block="layers.0", taps=(1, 3, 5), own_embedding=True, normed_residual=True, norms="input_norm"),
            {"target_layers": [1, 3, 5], "norm_before_residual": True, "norm_before_fc": True},
        ),
        (Folder(block="layers.0", scored=VOCAB, maps=(), own_head=False), {"target_layers": [2, 3, 4]}),
    ],
    ids=["old key", "options", "no head"],
)
def test_a_gguf_file_computes_what_its_folder_does(
    folder: Folder, fields: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    place = save_gguf(tmp_path / "head.gguf", "eagle3", folder.tensors(), {**GGUF_FIELDS, **fields}, (4, 2))
    assert method_for(place) == "eagle"
    text = read_text(Eagle.load(place), tiny)
    assert difference(text.logits, by_reference(folder, tiny, text.tokens)) < 1e-5


def test_a_gguf_file_drafts_without_a_named_method(tiny: Path, tmp_path: Path) -> None:
    fields = {**GGUF_FIELDS, "target_layers": [2, 3, 4]}
    place = save_gguf(tmp_path / "head.gguf", "eagle3", Folder(block="layers.0").tensors(), fields, (4, 2))
    recipe = {"model": str(place), "num_speculative_tokens": 3, "probe": False}
    llm = LLM(str(tiny), device="cpu", speculative_config=recipe)
    assert llm.recipe.method == "eagle"
    (found,) = llm.generate(["Tom has"], SamplingParams(max_tokens=8, temperature=0))
    assert found.metrics.num_draft_tokens > 3


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.0.ffn_gate_inp.weight", "enc.aux_norm.weight"])
def test_a_gguf_tensor_without_a_place_is_refused(name: str, tmp_path: Path) -> None:
    place = save_gguf(
        tmp_path / "head.gguf",
        "eagle3",
        Folder(block="layers.0").tensors(),
        GGUF_FIELDS | {"target_layers": [2]},
        (4, 2),
    )
    rewrite(place, tmp_path / "more.gguf", tensors={name: torch.ones(4).numpy()})
    with pytest.raises(ModelError, match=f"{name}' has no place in a head of eagle3"):
        Eagle.load(tmp_path / "more.gguf")


@pytest.mark.parametrize("maker", PARALLEL)
def test_p_eagle_drafts_a_chain_in_one_pass(maker: str, tiny: Path, tmp_path: Path) -> None:
    """After a prompt, and after further rows: mask rows leave nothing in the cache."""
    folder = PARALLEL[maker]
    text = read_text(Eagle.load(folder.write(tmp_path / "head")), tiny)
    assert difference(text.logits, by_reference(folder, tiny, text.tokens)) < 1e-5
    target, tokens = load(str(tiny), device="cpu"), text.tokens
    drafter = EagleDrafter(EagleDrafter.Config(head=tmp_path / "head", probe=False), target)
    states = dict(zip(folder.taps, text.states_TF.split(WIDTH, -1), strict=True))
    request, known = make_request(tokens, vocab_size=VOCAB, max_tokens=50, temperature=1.0), 0
    expected = by_reference(folder, tiny, tokens)
    for column in COLUMNS:
        request.tokens[:] = tokens[: column + 2]
        hidden = {depth: each[known : column + 1] for depth, each in states.items()}
        drafter.on_forward([Features(request, known, NO_DRAFT, hidden, ())])
        known = column + 1
        (draft,) = drafter.propose([request], [Budget(STEPS, STEPS)])
        assert isinstance(draft.law, Sampled)
        rows = torch.stack([expected[column, step].softmax(-1) for step in range(STEPS)])
        assert float((draft.law.q_KV - rows).abs().max()) < 1e-5
    with pytest.raises(ConfigError, match="P-EAGLE drafts a chain"):
        EagleDrafter(EagleDrafter.Config(head=tmp_path / "head", probe=False, tree=True), target)


FAULTS = {
    "a tap early": ("SpecForge", {"taps": (1, 3, 5)}),
    "a tap late": ("speculators", {"taps": (2, 4, 6)}),
    "taps swapped": ("SafeAILab", {"taps": (4, 3, 2)}),
    "a normed residual": ("SafeAILab", {"normed_residual": True}),
    "a residual that is not normed": ("speculators", {"normed_residual": False}),
    "a normed output": ("SpecForge", {"normed_output": True}),
    "an output that is not normed": ("SpecForge, 3.1", {"normed_output": False}),
    "the target's embedding": ("NeMo", {"own_embedding": False}),
    "no window": ("speculators, layers, windows, yarn", {"windows": ()}),
    "plain positions": ("speculators, layers, windows, yarn", {"rates": None}),
    "the stream for the final state": ("ModelOpt, final state", {"taps": (6,)}),
    "no mask rows": ("P-EAGLE", {"mask": None}),
    "another mask token": ("P-EAGLE", {"mask": 8}),
    "the map ignored": ("ModelOpt, named", {"ids": tuple(range(40))}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, tiny: Path, tmp_path: Path) -> None:
    maker, wrong = FAULTS[fault]
    right = (FOLDERS | PARALLEL)[maker]
    network = Eagle.load(right.write(tmp_path / "head"))
    text, faulty = read_text(network, tiny), _with_tensors(replace(right, **wrong), right)
    assert difference(text.logits, by_reference(faulty, tiny, text.tokens)) > 1e-3


def _with_tensors(faulty: Folder, right: Folder) -> Folder:
    """The arithmetic of one folder on the weights of another."""
    tensors = right.tensors()
    for name in ("embed_tokens.weight", "model.embed_tokens.weight"):
        if not faulty.own_embedding:
            tensors.pop(name, None)
    if faulty.ids != right.ids:
        tensors["d2t"] = torch.tensor(faulty.ids) - torch.arange(faulty.scored)
    if faulty.taps == (6,):
        tensors["fc.weight"] = torch.eye(64)

    class Faulty(Folder):
        def tensors(self, seed: int = 5) -> dict[str, Tensor]:
            return tensors

    return Faulty(**{name: getattr(faulty, name) for name in Folder.__dataclass_fields__})


def change(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no mask token": ("P-EAGLE", {"ptd_token_id": None}, "there is a mask_hidden, but no mask_token_id"),
    "an id in words": ("SpecForge", nested(["low", 3, 5]), "a list of layers"),
    "five ids for three states": ("SpecForge", nested([1, 2, 3, 4, 5]), "fc.weight is [64, 192], but [64, 320]"),
    "no ids for five states": ("DeepSpec", {"target_layer_ids": None}, "fc.weight reads 5 states"),
    "two values": ("ModelOpt, named", {"norm_before_fc": False}, "norm_before_fc=False, but eagle_config"),
    "another first block": (
        "ModelOpt",
        {"eagle_config": {"next_layer_regular": False}},
        "eagle_config.next_layer_regular=False",
    ),
    "another activation": ("SafeAILab", {"hidden_act": "gelu"}, "(hidden_act='gelu'"),
    "quantised": ("SafeAILab", {"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised"),
    "EAGLE-4": ("SafeAILab", {"efficient_lm_head_config": {"rank": 4}}, "EAGLE-4: its low-rank"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_contradiction_is_refused_by_name(case: str, tmp_path: Path) -> None:
    maker, keys, message = REFUSED[case]
    folder = (FOLDERS | PARALLEL)[maker].write(tmp_path / "head")
    change(folder, **keys)
    with pytest.raises(ModelError) as caught:
        Eagle.load(folder)
    assert message in str(caught.value)


def test_a_pickle_that_would_run_something_is_not_opened(tmp_path: Path) -> None:
    folder = FOLDERS["SafeAILab, pickled"].write(tmp_path / "head")
    marker = tmp_path / "ran"

    class Harmful:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    torch.save({"fc.weight": Harmful()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="holds more than tensors"):
        Eagle.load(folder)
    assert not marker.exists()


@pytest.mark.parametrize("maker", ["SafeAILab, pickled", "DeepSpec", "P-EAGLE"])
def test_a_folder_drafts_without_a_named_method(maker: str, tiny: Path, tmp_path: Path) -> None:
    folder = (FOLDERS | PARALLEL)[maker].write(tmp_path / "head")
    params, prompts = SamplingParams(max_tokens=12, temperature=0), ["abc", "Tom has"]
    plain = LLM(str(tiny), device="cpu", speculative_config=None).generate(prompts, params)
    recipe = {"model": str(folder), "num_speculative_tokens": 3, "probe": False}
    llm = LLM(str(tiny), device="cpu", speculative_config=recipe)
    assert llm.recipe.method == "eagle"
    found = llm.generate(prompts, params)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert sum(each.metrics.num_draft_tokens for each in found) > 3
