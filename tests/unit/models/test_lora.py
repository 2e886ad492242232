"""LoRA folders give the adapted model's text, or are refused; never the base model's."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ModelError
from foretoken.models.fingerprint import fingerprint
from foretoken.models.load import load, load_as_is
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model

PROMPT = [1, 20, 30, 40]
LENGTH = 12
FAMILIES = {
    "llama": ["q_proj", "v_proj", "down_proj", "lm_head"],  # the native decoder
    "olmo2": ["q_proj", "up_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "hunyuan_v1_moe": ["q_proj", "o_proj"],
}


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft", reason="peft is not installed (pip install 'foretoken[lora]')")


def adapter(peft: Any, base: Path, folder: Path, targets: list[str], **options: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)
    peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


def ours(folder: Path) -> list[int]:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    return (
        LLM(str(folder), device="cpu", speculative_config=None)
        .generate([{"prompt_token_ids": PROMPT}], params)[0]
        .token_ids
    )


def theirs(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        found = model.eval().generate(ids, max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False)
    return found[0, len(PROMPT) :].tolist()


def adapted(peft: Any, base: Path, folder: Path) -> Any:
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)


@pytest.mark.filterwarnings("ignore")  # of peft and of its imports
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_gives_the_adapted_models_text(peft: Any, family: str, tmp_path: Path) -> None:
    base = save_model(family, tmp_path / "base")
    folder = adapter(peft, base, tmp_path / "adapter", FAMILIES[family])
    expected = theirs(adapted(peft, base, folder))
    assert expected != ours(base)
    assert ours(folder) == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]}], ids=str
)
def test_adapters_of_other_kinds(peft: Any, options: dict[str, Any], tmp_path: Path) -> None:
    base = save_model("llama", tmp_path / "base")
    folder = adapter(peft, base, tmp_path / "adapter", ["q_proj", "down_proj"], **options)
    assert ours(folder) == theirs(adapted(peft, base, folder))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("targets", "tied", "options"),
    [
        (["embed_tokens", "q_proj"], True, {}),
        (["lm_head", "q_proj"], True, {}),
        (["embed_tokens", "lm_head"], True, {}),
        (["q_proj"], False, {"layer_replication": [[0, 2], [1, 3]]}),  # layer 1 stands in two places
    ],
    ids=str,
)
def test_what_shares_a_weight_keeps_its_own_correction(
    peft: Any, targets: list[str], tied: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    base = save_model("llama", tmp_path / "base", tie_word_embeddings=tied)
    folder = adapter(peft, base, tmp_path / "adapter", targets, **options)
    expected = theirs(adapted(peft, base, folder))
    assert expected != ours(base)
    assert ours(folder) == expected


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_next_to_its_base_model_is_merged(peft: Any, tmp_path: Path) -> None:
    base = save_model("llama", tmp_path / "base")
    folder = adapter(peft, base, tmp_path / "adapter", ["q_proj", "v_proj"])
    expected = theirs(adapted(peft, base, folder))
    shutil.copytree(folder, base, dirs_exist_ok=True)
    assert ours(base) == expected
    assert theirs(load_as_is(base, device="cpu").model) == expected


@pytest.mark.filterwarnings("ignore")
def test_the_adapters_own_tokenizer_and_name_count(peft: Any, tmp_path: Path) -> None:
    base = save_model("llama", tmp_path / "base")
    folder = adapter(peft, base, tmp_path / "adapter", ["q_proj"])
    for path in base.glob("token*"):
        shutil.copy(path, folder)
    model = load(folder, device="cpu")
    assert model.source == str(folder)
    assert model.tokenizer.name_or_path == str(folder)
    assert fingerprint(folder) != fingerprint(base)


def damaged(folder: Path, kind: str) -> None:
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_text())
    if kind == "weights":
        (folder / "adapter_model.safetensors").unlink()
    elif kind == "config":
        path.write_text("{")
    elif kind == "base":
        path.write_text(json.dumps({**settings, "base_model_name_or_path": None}))
    elif kind == "nowhere":
        path.write_text(json.dumps({**settings, "base_model_name_or_path": "/nowhere/at/all"}))
    elif kind == "rank":
        path.write_text(json.dumps({**settings, "r": 8}))
    elif kind == "more":
        path.write_text(json.dumps({**settings, "target_modules": ["q_proj", "k_proj"]}))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("weights", "cannot be merged"),
        ("config", "adapter_config.json cannot be read"),
        ("base", "names no base model"),
        ("nowhere", "/nowhere/at/all"),
        ("rank", "cannot be merged"),
        ("more", "weights are missing from the adapter"),
    ],
)
def test_a_damaged_adapter(peft: Any, kind: str, words: str, tmp_path: Path) -> None:
    base = save_model("llama", tmp_path / "base")
    folder = adapter(peft, base, tmp_path / "adapter", ["q_proj"])
    damaged(folder, kind)
    with pytest.raises(ModelError, match=words) as caught:
        load(folder, device="cpu")
    assert f"model '{folder}'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_a_prompt_is_no_correction(peft: Any, tmp_path: Path) -> None:
    base = save_model("llama", tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "prefix")
    with pytest.raises(ModelError, match="PREFIX_TUNING adapter cannot be merged"):
        load(tmp_path / "prefix", device="cpu")


@pytest.mark.parametrize("beside", [False, True], ids=["apart", "next to its base"])
def test_without_peft_an_adapter_is_refused(beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it only the base model could be loaded, and its text is another one."""
    base = save_model("llama", tmp_path / "base")
    folder = base if beside else tmp_path / "adapter"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base), "peft_type": "LORA"}))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"is a LoRA adapter of .*pip install 'foretoken\[lora\]'"):
        load(folder, device="cpu")
