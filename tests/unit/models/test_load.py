"""Every way a checkpoint can fail to load: a clear error with the right exit code, and nothing half done."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from foretoken import LLM, SamplingParams
from foretoken.cli.main import main
from foretoken.core.errors import ConfigError, ForetokenError, MismatchError, ModelError, UnsupportedArchitecture
from foretoken.models import language_model
from foretoken.models.load import load
from foretoken.native import team
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.mark.parametrize(("small", "threads"), [(1 << 26, 1), (1, 2)])
def test_a_model_is_tried_on_one_thread_of_torch_and_a_large_one_is_packed_by_all(
    saved: Path, monkeypatch: pytest.MonkeyPatch, small: int, threads: int
) -> None:
    monkeypatch.setattr(language_model, "_SMALL", small)
    seen = set()
    for module, name in [
        (language_model.probe, "check"),
        (language_model.trial, "check_positions"),
        (language_model.native_trial, "adopt"),
        (language_model, "Sample"),
    ]:
        tried = getattr(module, name)

        def watched(*given: Any, tried: Callable[..., Any] = tried, name: str = name, **options: Any) -> Any:
            seen.add((name, torch.get_num_threads(), team.current().threads))
            return tried(*given, **options)

        monkeypatch.setattr(module, name, watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        load(saved)
        tried_by = ("check", "check_positions", "adopt", *(("Sample",) if small == 1 else ()))
        assert seen == {(name, 1, threads) for name in tried_by}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def edit_config(folder: Path, name: str = "config.json", **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def assert_refused(kind: type[ForetokenError], name: Any, *words: str, **options: Any) -> str:
    """The message of the refusal; the library's logging and progress bars are left as they were."""
    log, bars = logging.getLogger("transformers").level, transformers.utils.logging.is_progress_bar_enabled()
    with pytest.raises(kind) as caught:
        load(name, **options)
    message = str(caught.value)
    for word in words:
        assert word in message
    assert "\n" not in message
    assert caught.value.exit_code == (2 if kind is ConfigError else 1)
    assert logging.getLogger("transformers").level == log
    assert transformers.utils.logging.is_progress_bar_enabled() == bars
    return message


# ------------------------------------------------------------------ what works


def test_a_saved_folder_loads(saved: Path) -> None:
    model = load(saved, device="cpu")
    assert (model.vocab_size, model.num_layers, model.max_length) == (VOCAB_SIZE, 3, 128)
    assert model.dtype == torch.float32
    assert model.end_ids == {2}
    assert model.tokenizer.decode(model.tokenizer("a b")["input_ids"]) == "a b"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dtype_is_honoured(saved: Path, dtype: str) -> None:
    assert load(saved, dtype=dtype, device="cpu").dtype == getattr(torch, dtype)


def test_the_checkpoints_own_dtype_is_the_default(tmp_path: Path) -> None:
    assert load(save_model("gpt2", tmp_path, dtype=torch.bfloat16), device="cpu").dtype == torch.bfloat16


def test_a_shorter_context_may_be_requested(saved: Path) -> None:
    assert load(saved, device="cpu", max_length=64).max_length == 64


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def test_every_end_token_of_the_generation_config_counts(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load(folder, device="cpu").end_ids == {2, 7}


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_an_end_token_that_only_the_tokenizer_names_counts(
    folder: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    if where == "config.json":
        (folder / "generation_config.json").unlink()
    edit_json(folder / where, eos_token_id=7)
    assert load(folder, device="cpu").end_ids == {2, 7}
    assert "texts end at '</s>' (2) too, which its tokenizer names" in caplog.text
    caplog.clear()
    edit_json(folder / where, eos_token_id=[2, 7])
    assert load(folder, device="cpu").end_ids == {2, 7}
    assert not [record for record in caplog.records if record.name != "foretoken.phases"]


def test_an_end_token_of_the_tokenizer_beyond_the_vocabulary_is_none(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", eos_token="<beyond>")
    assert load(folder, device="cpu").end_ids == {2}


@pytest.mark.parametrize("end", ["2", [2.0], True, {"id": 2}, [[2]]], ids=str)
def test_end_tokens_that_are_no_numbers_are_refused(folder: Path, end: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    assert_refused(ModelError, folder, "eos_token_id", "generation_config.json", device="cpu")


@pytest.mark.parametrize(
    ("end", "kept", "words"),
    [
        ([2, VOCAB_SIZE], {2}, f"eos_token_id={VOCAB_SIZE} is beyond its vocabulary of {VOCAB_SIZE}: texts end at [2]"),
        ([-1, 10**9], {2}, "it ends no text"),
    ],
)
def test_end_tokens_beyond_the_vocabulary_are_named(
    folder: Path, caplog: pytest.LogCaptureFixture, end: list[int], kept: set[int], words: str
) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    assert load(folder, device="cpu").end_ids == kept
    assert words in caplog.text


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", '{"eos_token_id": 2}'.encode("utf-16")], ids=repr)
def test_a_generation_config_that_cannot_be_read_is_not_taken_for_none(folder: Path, content: bytes) -> None:
    (folder / "generation_config.json").write_bytes(content)
    assert_refused(ModelError, folder, "generation_config.json cannot be read", device="cpu")


@pytest.mark.parametrize("settings", [{"pad_token_id": "x"}, {"max_new_tokens": {}}, {"suppress_tokens": 9}], ids=str)
def test_a_setting_of_a_generation_config_that_is_no_value_is_named(folder: Path, settings: dict[str, Any]) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **settings}))
    (name,) = settings
    message = assert_refused(ModelError, folder, "generation_config.json cannot be read", device="cpu")
    assert f"{name}={settings[name]!r}" in message


def test_a_generation_config_that_leads_nowhere(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").symlink_to("nowhere")
    assert_refused(ModelError, folder, "it is no file, or leads to none", device="cpu")


# ------------------------------------------------------------------ names


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "~/nowhere-at-all", "a/b/c"])
def test_a_missing_folder(name: str) -> None:
    assert_refused(ModelError, name, name, "does not exist")


def test_a_folder_without_config(tmp_path: Path) -> None:
    assert_refused(ModelError, tmp_path, str(tmp_path), "without config.json")


def test_a_file_is_not_a_checkpoint(saved: Path) -> None:
    assert_refused(ModelError, saved / "model.safetensors", "is a file: point to the folder")


def test_a_hub_id_that_cannot_be_reached() -> None:
    assert_refused(
        ModelError,
        "nobody/no-such-model",
        "'nobody/no-such-model'",
        "neither a folder nor on this machine",
        "check the name",
    )


def test_an_unknown_bundled_model() -> None:
    assert_refused(ConfigError, "zoo:bsae", "did you mean 'base'?")


# ------------------------------------------------------------------ options


@pytest.mark.parametrize("dtype", ["float8", "bf16", "int3", ""])
def test_an_unknown_dtype(saved: Path, dtype: str) -> None:
    assert_refused(ConfigError, saved, f"dtype={dtype!r} is unknown", dtype=dtype)


@pytest.mark.parametrize("device", ["tpu", "nvidia", "meta", "cuda:99", ""])
def test_an_unusable_device(saved: Path, device: str) -> None:
    assert_refused(ConfigError, saved, f"device='{device}'", device=device)


@pytest.mark.parametrize("length", [129, 10**9, 1, 0, -5])
def test_an_impossible_context(saved: Path, length: int) -> None:
    assert_refused(ConfigError, saved, f"max_model_len={length}", max_length=length, device="cpu")


def test_a_checkpoint_with_a_context_too_short_for_a_token(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1}))
    assert_refused(ModelError, folder, "its config allows 1 positions", device="cpu")


def test_a_rotary_table_that_switches_limits_the_context(tmp_path: Path) -> None:
    """Beyond 32 positions longrope turns the whole batch to other frequencies, cached keys included."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 32,
    }
    save_model("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=32)
    assert load(tmp_path, device="cpu").max_length == 32
    assert load(tmp_path, device="cpu", max_length=20).max_length == 20
    assert_refused(ConfigError, tmp_path, "max_model_len=33", "longrope", max_length=33, device="cpu")


# ------------------------------------------------------------------ damaged files


def drop_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def wrong_shape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name] = weights[name][:-3].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])

    return damage


def fill(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "weights cannot be loaded"),
    "weights cut in half": (cut("model.safetensors", 0.5), "may be incomplete or damaged"),
    "weights cut in the header": (cut("model.safetensors", 0.001), "may be incomplete or damaged"),
    "empty weights": (cut("model.safetensors", 0), "may be incomplete or damaged"),
    "weights of noise": (fill("model.safetensors", bytes(range(256)) * 9), "may be incomplete or damaged"),
    "one weight missing": (drop_weight, "'model.layers.1.mlp.up_proj.weight'"),
    "one weight of another shape": (wrong_shape, "model.layers.0.self_attn.k_proj.weight"),
    "config cut": (cut("config.json", 0.5), "config cannot be read"),
    "empty config": (cut("config.json", 0), "config cannot be read"),
    "config of noise": (fill("config.json", b"\x80\x81"), "config cannot be read"),
    "config is a list": (fill("config.json", b"[1, 2]"), "config cannot be read"),
    "config is a number": (fill("config.json", b"7"), "config cannot be read"),
    "config names no model": (fill("config.json", b"{}"), "config cannot be read"),
    "config of an unknown model": (fill("config.json", b'{"model_type": "warp9"}'), "warp9"),
    "no tokenizer": (
        lambda folder: [path.unlink() for path in folder.glob("token*")] and None,
        "tokenizer cannot be loaded",
    ),
    "tokenizer of no length": (
        lambda folder: edit_config(folder, "tokenizer_config.json", model_max_length="long"),
        "model_max_length='long' in tokenizer_config.json",
    ),
    "tokenizer cut": (cut("tokenizer.json", 0.5), "tokenizer cannot be loaded"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint(folder: Path, damage: str) -> None:
    act, word = DAMAGE[damage]
    act(folder)
    message = assert_refused(ModelError, folder, f"model '{folder}'", device="cpu")
    assert word in message


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "wide"},
        {"num_hidden_layers": -1},
        {"num_attention_heads": 0},
        {"num_attention_heads": 5},
        {"hidden_size": 128},
        {"vocab_size": 7},
        {"num_hidden_layers": 5},
        {"num_hidden_layers": 10**8},
        {"hidden_act": "magic"},
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}},
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_its_weights(folder: Path, changes: dict[str, Any]) -> None:
    edit_config(folder, **changes)
    assert_refused(ModelError, folder, f"model '{folder}'", device="cpu")


# ------------------------------------------------------------------ code that comes with a checkpoint


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with classes next to its weights; a read from the terminal fails."""

    def ask(*_: Any) -> str:
        raise AssertionError("the terminal was read")

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder.parent / "modules"))
    (folder / "own.py").write_text(CODE)
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit_config(folder, model_type="own", architectures=["OwnForCausalLM"], auto_map=classes)
    return folder


def test_code_of_a_checkpoint_is_not_run_unasked(with_code: Path) -> None:
    assert_refused(ModelError, with_code, "Python code of its own", "--trust-remote-code", device="cpu")


def test_code_of_a_checkpoint_is_run_when_it_is_trusted(with_code: Path, saved: Path) -> None:
    llm = LLM(with_code, device="cpu", trust_remote_code=True, speculative_config=None)
    assert type(llm.target.model).__name__ == "OwnForCausalLM"
    assert llm.target.trusted
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    (ours,), (plain,) = (
        each.generate([[1, 20, 30]], params) for each in (llm, LLM(saved, device="cpu", speculative_config=None))
    )
    assert ours.token_ids == plain.token_ids


@pytest.mark.parametrize("option", [False, True])
def test_the_command_line_trusts_remote_code_with_its_flag(
    with_code: Path, option: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "x", "--model", str(with_code), "--method", "none", "--max-tokens", "3", "--device", "cpu"]
    code = main([*command, "--trust-remote-code"] if option else command)
    assert code == (0 if option else 1)
    assert ("--trust-remote-code" in capsys.readouterr().err) is not option


# ------------------------------------------------------------------ models that do not generate


def test_an_encoder_decoder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"]}))
    assert_refused(UnsupportedArchitecture, tmp_path, "(t5)", "encoder-decoder")


def test_a_model_without_a_causal_form(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    assert_refused(UnsupportedArchitecture, tmp_path, "(vit)", "not a causal language model")


def test_a_classifier(folder: Path) -> None:
    edit_config(folder, architectures=["LlamaForSequenceClassification"])
    assert_refused(UnsupportedArchitecture, folder, "LlamaForSequenceClassification", "no language head")


# ------------------------------------------------------------------ pairs


def pair_of(target: Path, draft: Path, **options: Any) -> LLM:
    return LLM(
        target,
        speculative_config={"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2, **options},
        device="cpu",
    )


def test_a_draft_with_another_vocabulary(saved: Path, tmp_path: Path) -> None:
    draft = save_model("qwen2", tmp_path)

    def swap(vocab: dict[str, int]) -> None:
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    save_tokenizer(draft, swap)
    with pytest.raises(MismatchError, match="another vocabulary") as caught:
        pair_of(saved, draft, vocabulary="same")
    assert "(101 and 101 entries; 'a' is 71 and 72)" in str(caught.value)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("size", [128, 99], ids=["padded", "cut"])
@pytest.mark.parametrize("wide", ["draft", "target"])
def test_tables_of_other_sizes_are_accepted(saved: Path, tmp_path: Path, size: int, wide: str) -> None:
    """Tables are padded within a family; the text is the target's all the same."""
    other = save_model("gpt2", tmp_path, vocab_size=size)
    target, draft = (saved, other) if wide == "draft" else (other, saved)
    prompt = [5, 6, min(size, VOCAB_SIZE) - 1]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain = LLM(target, device="cpu", speculative_config=None).generate([{"prompt_token_ids": prompt}], params)
    drafted = pair_of(target, draft).generate([{"prompt_token_ids": prompt}], params)
    assert drafted[0].outputs[0].error is None
    assert drafted[0].token_ids == plain[0].token_ids


def test_after_a_token_without_a_draft_row_nothing_is_drafted(saved: Path, tmp_path: Path) -> None:
    narrow = save_model("gpt2", tmp_path, vocab_size=99)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5, VOCAB_SIZE - 1, 6]}, {"prompt_token_ids": [5, 6, 7]}]
    plain = LLM(saved, device="cpu", speculative_config=None).generate(prompts, params)
    drafted = pair_of(saved, narrow).generate(prompts, params)
    assert [each.outputs[0].error for each in drafted] == [None, None]
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert drafted[0].metrics.num_draft_tokens == 0


def test_a_family_list_without_doubles() -> None:
    """The families of the golden tests differ from each other."""
    seen = [(family.model_type, repr(family.options)) for family in FAMILIES.values()]
    assert len(set(seen)) == len(seen)
