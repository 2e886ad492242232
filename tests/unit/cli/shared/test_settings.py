"""How methods and their options are spelled on the command line."""

from __future__ import annotations

import pytest
import torch

from foretoken import zoo
from foretoken.cli.learn.training import found_device
from foretoken.cli.shared.settings import parse_settings, speculative_config
from foretoken.core.errors import ConfigError


def test_settings_are_json_scalars_or_strings():
    texts = ["a=4", "b=0.5", "c=true", "d=null", "e=zoo:draft", "f=", "g=x=y", 'h="4"']
    assert parse_settings(texts) == {
        "a": 4,
        "b": 0.5,
        "c": True,
        "d": None,
        "e": "zoo:draft",
        "f": "",
        "g": "x=y",
        "h": "4",
    }
    with pytest.raises(ConfigError, match="key=value"):
        parse_settings(["novalue"])
    with pytest.raises(ConfigError, match="twice"):
        parse_settings(["a=1", "a=2"])


def test_the_draft_model_of_a_method():
    assert speculative_config("draft_model", {}, target="zoo:base")["model"] == "zoo:draft"
    assert speculative_config("draft_model", {}, target="grown:base:100m")["model"] == "zoo:draft"
    assert speculative_config("draft_model", {}, target="./m", draft_model="./d")["model"] == "./d"
    for target in ("./m", "zoo:moe", "grown:./base:100m", "base"):
        with pytest.raises(ConfigError, match="add --draft-model"):
            speculative_config("draft_model", {}, target=target)
    with pytest.raises(ConfigError, match="does not apply to method 'ngram'"):
        speculative_config("ngram", {}, target="./m", draft_model="./d")
    with pytest.raises(ConfigError, match=r"does not apply to method 'draft_model'.*eagle is for method 'eagle'"):
        speculative_config("draft_model", {}, target="./m", draft_model=str(zoo.path("base") / "eagle"))
    with pytest.raises(ConfigError, match="contradicts"):
        speculative_config("draft_model", {"model": "a"}, target="./m", draft_model="b")


def test_a_device_to_train_on():
    assert found_device("cpu") == "cpu"
    assert found_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match=r"^--device gpu"):
        found_device("gpu")
