"""Adapters next to a base model: each request has its own in one batch, with the text of the merged model."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError, ModelError
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.lora.request import LoRARequest
from foretoken.models.adapters import load_adapter
from foretoken.models.load import load
from helpers.tiny_models import STATE_SPACE, save_model

PROMPT = [1, 20, 30, 40, 20, 30, 40, 20, 30]
LENGTH = 12
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FAMILIES = {
    "llama": ALL,  # the native decoder
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),  # fused projections there
    "gemma3_text": ALL,  # branches with a norm after them
    "starcoder2": ("q_proj", "v_proj", "c_fc", "c_proj"),  # an MLP without a gate
    "gpt_neox": ("query_key_value", "dense"),  # one projection, head by head
    "qwen3_5_text": (*ALL, "in_proj_qkv", "in_proj_z", "out_proj"),  # delta nets, and attention through gates
    "qwen3_next": ("q_proj", "in_proj_qkvz"),  # by groups of heads
    "gemma3n_text": ALL,  # the general path
}


def adapter(base: Path, folder: Path, targets: tuple[str, ...], *, rank: int = 4, seed: int = 0, **config: Any) -> Path:
    """A folder as peft writes it, of random weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base)
    weights = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            outputs, inputs = module.weight.shape
            weights[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs) * 0.1
            weights[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank) * 0.1
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "base_model_name_or_path": str(base), **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merged(base: Path, folder: Path, scale: float) -> Any:
    """The library's model with W + scale B A in the place of each weight, in float32."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    weights = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for key, down in weights.items():
            if ".lora_A." in key:
                name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                model.get_submodule(name).weight += scale * weights[key.replace("lora_A", "lora_B")] @ down
    return model


def theirs(model: Any, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        found = model.generate(torch.tensor([prompt]), max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False)
    return found[0, len(prompt) :].tolist()


def request(folder: Path) -> LoRARequest:
    return LoRARequest(folder.name, 1, str(folder))


def ours(llm: LLM, adapters: list[LoRARequest | None], prompt: list[int] = PROMPT) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt}] * len(adapters)
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    return [each.token_ids for each in llm.generate(prompts, params, lora_request=adapters)]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_merged_weights(family: str, tmp_path: Path) -> None:
    base = save_model(family, tmp_path / "base")
    folder = adapter(base, tmp_path / "one", FAMILIES[family])
    target = load(base, device="cpu", dtype="float32")
    own = load_adapter(target, "one", folder)
    assert (target.native_decoder is None) == (family == "gemma3n_text") == (own.packed is None)
    cache, batch = target.new_cache(2), PackedBatch()
    for corrected in (None, own):  # a neighbour without an adapter in the same forward
        slot = cache.acquire()
        cache.reserve(slot, len(PROMPT))
        batch.add_chunk(slot, 0, PROMPT, wanted=len(PROMPT), adapter=corrected)
    found = target.forward(batch, DensePlan(cache, batch)).logits_MV
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = [model(torch.tensor([PROMPT])).logits[0] for model in (plain, merged(base, folder, 2.0))]
    assert (expected[0] - expected[1]).abs().max() > 0.1
    close = 2e-4 if family in STATE_SPACE else 1e-5  # norms of a text's first states make much of a last bit
    torch.testing.assert_close(found, torch.cat(expected), atol=close, rtol=close)


@cache
def shelf(root: Path) -> tuple[Path, Path, Path]:
    base = save_model("llama", root / "base")
    return base, adapter(base, root / "one", ALL), adapter(base, root / "two", ("q_proj", "down_proj"), rank=20, seed=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return shelf(tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("method", [None, "suffix", "draft_model"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_request_of_a_batch_has_its_own(folders: tuple[Path, Path, Path], method: str | None, dtype: str) -> None:
    """With drafts and neighbours the tokens are those of a request alone, and in float32 those of the merged model."""
    base, one, two = folders
    more = {"model": str(base)} if method == "draft_model" else {}
    config = None if method is None else {"method": method, "num_speculative_tokens": 3, **more}
    llm = LLM(str(base), speculative_config=config, dtype=dtype, device="cpu")
    asked = [None, request(one), request(two), request(one)]
    together = ours(llm, asked)
    plain = LLM.from_target(llm.target)
    assert together == [ours(plain, [each])[0] for each in asked]
    assert together[0] != together[1] != together[2]
    assert together[1] == together[3]
    if dtype == "float32":
        models = [AutoModelForCausalLM.from_pretrained(base).eval(), merged(base, one, 2.0), merged(base, two, 0.4)]
        assert together[:3] == [theirs(model, PROMPT) for model in models]


def test_a_row_has_the_same_bits_whatever_its_neighbours(folders: tuple[Path, Path, Path]) -> None:
    base, one, two = folders
    target = load(base, device="cpu", dtype="bfloat16")
    adapters = [load_adapter(target, each.name, each) for each in (one, two)]

    def logits(corrections: list[Any], wanted: int) -> torch.Tensor:
        cache, batch = target.new_cache(len(corrections)), PackedBatch()
        for corrected in corrections:
            slot = cache.acquire()
            cache.reserve(slot, len(PROMPT))
            batch.add_chunk(slot, 0, PROMPT, wanted=wanted, adapter=corrected)
        return target.forward(batch, DensePlan(cache, batch)).logits_MV.clone()

    alone = [logits([each], len(PROMPT))[-1] for each in (None, *adapters)]
    for wanted in (1, len(PROMPT)):  # rows that are not read are left out of the last layer
        together = logits([None, *adapters], wanted)[wanted - 1 :: wanted]
        assert torch.equal(together, torch.stack(alone))


def test_prefixes_are_not_shared_between_adapters(folders: tuple[Path, Path, Path]) -> None:
    base, one, two = folders
    llm = LLM(str(base), speculative_config=None, device="cpu", enable_prefix_caching=True)
    long = PROMPT * 5
    expected = [ours(LLM.from_target(llm.target), [each], long)[0] for each in (None, request(one), request(two))]
    for each, tokens in zip((None, request(one), request(two)), expected, strict=True):
        for cached in (0, len(long) - 1):
            (output,) = llm.generate(
                [{"prompt_token_ids": long}], SamplingParams(max_tokens=LENGTH, ignore_eos=True), lora_request=each
            )
            assert output.num_cached_tokens == cached
            assert output.token_ids == tokens


def test_scales(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, *_ = folders
    for number, (config, scale) in enumerate(
        [({"use_rslora": True}, 8 / 4**0.5), ({"lora_alpha": 2}, 0.5), ({"alpha_pattern": {"q_proj": 16}}, 4.0)]
    ):
        folder = adapter(base, tmp_path / str(number), ("q_proj",), **config)
        llm = LLM(str(base), speculative_config=None, device="cpu")
        assert ours(llm, [request(folder)]) == [theirs(merged(base, folder, scale), PROMPT)]


def damage(folder: Path, settings: dict[str, Any], weights: dict[str, Any]) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    kept = {**load_file(folder / "adapter_model.safetensors"), **weights}
    save_file(
        {name: each.clone() for name, each in kept.items() if each is not None}, folder / "adapter_model.safetensors"
    )


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
MATRIX = torch.zeros(4, 4)


@pytest.mark.parametrize(
    ("settings", "weights", "words"),
    [
        ({"use_dora": True}, {}, "it has use_dora=True: load it as a model of its own"),
        ({"bias": "all"}, {}, "it has bias='all'"),
        ({"modules_to_save": ["lm_head"]}, {}, r"modules_to_save=\['lm_head'\]"),
        ({"init_lora_weights": "pissa_niter_4"}, {}, "changes the base model's weights"),
        ({"peft_type": "IA3"}, {}, "peft_type='IA3', not LORA"),
        ({}, {"base_model.model.lm_head.lora_A.weight": None}, None),
        ({}, {"base_model.model.model.embed_tokens.lora_embedding_A": MATRIX}, "'base_model.model.model.embed_tokens"),
        ({}, {KEY.format("B"): None}, "has only lora_A"),
        ({}, {KEY.format("A"): MATRIX}, r"matrices of \[4, 4\].* it is an adapter of another model"),
        ({}, {"base_model.model.model.x.lora_A.weight": MATRIX, "base_model.model.model.x.lora_B.weight": MATRIX},
         "has no module 'model.x': it is an adapter of another model"),
        ({}, {"base_model.model.lm_head.lora_A.weight": MATRIX, "base_model.model.lm_head.lora_B.weight": MATRIX},
         "it corrects 'lm_head'"),
    ],
    ids=range(11),
)  # fmt: skip
def test_what_cannot_be_computed_is_refused(
    folders: tuple[Path, Path, Path],
    settings: dict[str, Any],
    weights: dict[str, Any],
    words: str | None,
    tmp_path: Path,
) -> None:
    base, *_ = folders
    folder = adapter(base, tmp_path / "own", ("q_proj",))
    damage(folder, settings, weights)
    llm = LLM(str(base), speculative_config=None, device="cpu")
    if words is None:
        assert ours(llm, [request(folder)])
        return
    with pytest.raises(ModelError, match=f"adapter 'own': .*{words}") as caught:
        ours(llm, [request(folder)])
    assert "\n" not in str(caught.value)


def test_wrong_requests(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, one, _ = folders
    llm = LLM(str(base), speculative_config=None, device="cpu")
    (tmp_path / "adapter_config.json").write_text("{")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"-")
    for given, error, words in (
        ([request(one)] * 2, ConfigError, "2 adapters for 1 prompts"),
        ("one", ConfigError, "must be a LoRARequest, not str"),
        (LoRARequest("x", 1, str(base)), ModelError, "there is no .*adapter_config.json"),
        (LoRARequest("x", 1, str(tmp_path)), ModelError, "cannot be read"),
    ):
        with pytest.raises(error, match=words):
            llm.generate([PROMPT], lora_request=given)
    with pytest.raises(ConfigError, match="lora_path='' must be"):
        LoRARequest("x", 1)
