"""generation_config.json of a checkpoint: followed without params, reported once, and never half applied."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.engine.intake.checkpoint_defaults import CheckpointDefaults
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model

PROMPT = [1, 20, 30, 40]
GREEDY = {"eos_token_id": 2, "repetition_penalty": 1.7, "suppress_tokens": [29, 56]}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model("llama", tmp_path)


def loaded(folder: Path, settings: dict[str, Any], **options: Any) -> LLM:
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return LLM(folder, device="cpu", speculative_config=None, **options)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.message
        for record in caplog.records
        if record.name.startswith("foretoken") and record.name != "foretoken.phases"
    ]


@pytest.mark.parametrize("left_out", [(), ("repetition_penalty",), ("suppress_tokens",)], ids=str)
def test_greedy_text_without_params_is_the_library_s(folder: Path, left_out: tuple[str, ...]) -> None:
    settings = {name: value for name, value in GREEDY.items() if name not in left_out}
    llm = loaded(folder, settings)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=24)[0, len(PROMPT) :].tolist()
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}])
    assert output.token_ids[: len(expected)] == expected
    streamed = [token for chunk in llm.stream(PROMPT) for token in chunk.token_ids]
    assert streamed == output.token_ids
    (plain,) = llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams())
    assert plain.token_ids[: len(expected)] != expected


def test_settings_of_sampling_become_the_defaults(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = loaded(folder, SAMPLED)
    expected = SamplingParams(**{name: value for name, value in SAMPLED.items() if name != "do_sample"})
    assert llm.default_params == llm.with_method({"method": "ngram"}).default_params == expected
    (line,) = said(caplog)
    assert "asks for temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.05:" in line
    assert "generation_config='none'" in line
    assert "\n" not in line


def test_settings_of_sampling_do_not_count_where_nothing_is_sampled(folder: Path) -> None:
    assert loaded(folder, {**SAMPLED, "do_sample": False}).default_params == SamplingParams(repetition_penalty=1.05)


def test_none_leaves_it_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert loaded(folder, {**SAMPLED, **GREEDY}, generation_config="none").default_params == SamplingParams()
    assert not said(caplog)


def test_without_defaults_nothing_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert loaded(folder, {"eos_token_id": 2, "max_new_tokens": 5, "num_beams": 1}).default_params == SamplingParams()
    assert not said(caplog)


def test_unsupported_defaults_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = loaded(folder, {"num_beams": 4, "stop_strings": ["a"], "suppress_tokens": [5, 6, 7]})
    assert llm.default_params.logit_bias == dict.fromkeys((5, 6, 7), float("-inf"))
    (line,) = said(caplog)
    assert "asks for suppress_tokens=3 tokens and asks for num_beams=4, stop_strings=1 tokens" in line
    assert "not supported" in line


@pytest.mark.parametrize(("config", "temperature"), [(None, 0.0), (SimpleNamespace(do_sample=True), 1.0)])
def test_missing_defaults_are_neutral(config: Any, temperature: float) -> None:
    """Not every model has such a file; to sample without a temperature is to sample at 1."""
    found = CheckpointDefaults.of(config, "m")
    assert found.params == SamplingParams(temperature=temperature)
    assert not found.not_honoured


@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": -1}, {"do_sample": True, "top_p": 7}, {"do_sample": 1.5}], ids=str
)
def test_a_value_out_of_range(folder: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json of model .*generation_config='none'"):
        loaded(folder, settings)


@pytest.mark.parametrize("choice", ["sglang", "Auto", None, True])
def test_an_unknown_choice(folder: Path, choice: Any) -> None:
    with pytest.raises(ConfigError, match="generation_config="):
        LLM(folder, device="cpu", generation_config=choice, speculative_config=None)
