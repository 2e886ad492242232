"""A server with adapters: the model's name of a request selects one, and each answer is that of the merged model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.lora.request import LoRARequest
from foretoken.serve.loop import EngineLoop
from foretoken.serve.service import Service
from helpers.serving import served
from helpers.tiny_models import save_model

PROMPT = [1, 20, 30, 40, 20, 30, 40]


def adapter(folder: Path, width: int, *, seed: int) -> Path:
    torch.manual_seed(seed)
    key = "base_model.model.model.layers.1.self_attn.{}_proj.lora_{}.weight"
    weights = {key.format("o", "A"): torch.randn(4, width), key.format("o", "B"): torch.randn(width, 4)}
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 4}')
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, Path, Path]:
    root = tmp_path_factory.mktemp("adapters")
    llm = LLM(str(save_model("llama", root / "base")), speculative_config={"method": "suffix"}, device="cpu")
    return llm, adapter(root / "one", llm.target.width, seed=1), adapter(root / "two", llm.target.width, seed=2)


def tokens(llm: LLM, folder: Path | None) -> list[int]:
    asked = None if folder is None else LoRARequest(folder.name, 1, str(folder))
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=8, ignore_eos=True), lora_request=asked)
    return output.token_ids


def body(model: str | None) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}


def test_the_model_of_a_request_selects_an_adapter(made: tuple[LLM, Path, Path]) -> None:
    llm, one, two = made
    with served(llm, names=("base", "b-*"), adapters={"one": str(one)}, adapters_change=True) as server:
        expected = {name: tokens(llm, folder) for name, folder in (("base", None), ("one", one), ("two", two))}
        assert expected["base"] != expected["one"] != expected["two"]
        text = {name: llm.tokenizer.decode(ids) for name, ids in expected.items()}
        for name, own in (("base", "base"), ("one", "one"), ("base:one", "one"), (None, "base"), ("b-2", "base")):
            status, found, _ = server.send("/v1/completions", body(name))
            assert status == 200, found
            assert found["choices"][0]["text"] == text[own]
            assert found["model"] == (name or "base")
        cards = {each["id"]: each for each in server.get("/v1/models")[1]["data"]}
        assert [cards["base"]["parent"], cards["one"]["parent"], cards["one"]["root"]] == [None, "base", str(one)]
        assert server.get("/v1/models/base:one")[1]["parent"] == "base"
        status, found, _ = server.send("/v1/completions", body("base:two"))
        assert (status, found["error"]["code"]) == (404, "model_not_found")
        assert "use 'base', 'one'" in found["error"]["message"]

        for name, folder, words in (("two", "/nowhere", "there is no"), ("one", str(two), "served already")):
            status, found, _ = server.send("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
            assert status == 400
            assert words in found["error"]["message"]
        assert server.send("/v1/load_lora_adapter", {"lora_name": "two", "lora_path": str(two)})[0] == 200
        assert server.send("/v1/completions", body("two"))[1]["choices"][0]["text"] == text["two"]
        assert server.send("/v1/unload_lora_adapter", {"lora_name": "two"})[0] == 200
        assert server.send("/v1/completions", body("two"))[0] == 404
        assert server.send("/v1/unload_lora_adapter", {"lora_name": "two"})[0] == 404


def test_clients_change_no_adapters_unless_they_may(made: tuple[LLM, Path, Path]) -> None:
    llm, one, _ = made
    with served(llm) as server:
        assert server.send("/v1/load_lora_adapter", {"lora_name": "one", "lora_path": str(one)})[0] == 404


def test_an_adapter_that_cannot_be_served_is_refused_before_the_server_starts(made: tuple[LLM, Path, Path]) -> None:
    llm, one, _ = made
    loop = EngineLoop(llm)
    with pytest.raises(ForetokenError, match="adapter 'base' has a name that is served already"):
        Service(loop, "base", adapters={"base": str(one)})
    with pytest.raises(ForetokenError, match=r"adapter 'x': there is no .*adapter_config\.json"):
        Service(loop, "base", adapters={"x": str(one.parent)})
    early = llm.with_method({"method": "del"})
    with pytest.raises(ConfigError, match="method 'del' drafts with the target's own layers"):
        Service(EngineLoop(early), "base", adapters={"one": str(one)})


def test_a_draft_model_has_the_adapter_that_belongs_to_it(made: tuple[LLM, Path, Path], tmp_path: Path) -> None:
    """The draft is a copy of the base, so with the same adapter it foretells every token, and without it hardly any."""
    llm, one, two = made
    drafts = llm.with_method({"method": "draft_model", "model": llm.target.source, "num_speculative_tokens": 3})
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    (inside := tmp_path / "inside").mkdir()
    shutil.copytree(two, inside, dirs_exist_ok=True)
    shutil.copytree(two, inside / "draft")
    asked = [
        LoRARequest("one", 1, str(one)),
        LoRARequest("one, too", 2, str(one), draft_lora=str(one)),
        LoRARequest("two", 3, str(inside)),
        None,
    ]
    outputs = drafts.generate([PROMPT] * 4, params, lora_request=asked)
    bare = [None if each is None else replace(each, draft_lora="") for each in asked]
    plain = llm.with_method(None).generate([PROMPT] * 4, params, lora_request=bare)
    assert [each.token_ids for each in outputs] == [each.token_ids for each in plain]
    shares = [each.metrics.num_accepted_tokens / each.metrics.num_draft_tokens for each in outputs]
    assert shares[0] < 0.5
    assert shares[1:] == [1.0, 1.0, 1.0]
    assert drafts.generate([PROMPT], params, lora_request=asked[1])[0].metrics.num_accepted_tokens > 20
    with pytest.raises(ConfigError, match=r"draft_lora=.*: method 'suffix' has no draft model: leave it out"):
        llm.generate([PROMPT], params, lora_request=asked[1])
