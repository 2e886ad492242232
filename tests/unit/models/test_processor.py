"""A processor that is slow in bfloat16 is detected, and a warning is logged for models that it would slow down."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken.models import language_model, processor
from foretoken.models.language_model import LanguageModel
from helpers.tiny_models import FAMILIES


@pytest.mark.parametrize("slower", [0.25, 60.0])
def test_the_speed_is_the_ratio_of_the_best_times(slower: float, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1, 1000))  # the first call of each is not counted, the best of the others is

    def seconds(left: torch.Tensor, right: torch.Tensor) -> float:
        return (slower if left.dtype == torch.bfloat16 else 1.0) * (100.0 if next(times) <= 2 else 3.0)

    monkeypatch.setattr(processor, "_seconds", seconds)
    assert processor.bfloat16_speed.__wrapped__() == pytest.approx(1.0 / slower)


@pytest.mark.parametrize(
    ("family", "dtype", "speed", "told"),
    [
        ("deepseek_v2", torch.bfloat16, 1 / 60, True),
        ("deepseek_v2", torch.bfloat16, 0.9, False),
        ("deepseek_v2", torch.float32, 1 / 60, False),
    ],
)
def test_the_general_path_says_where_bfloat16_is_slow(family, dtype, speed, told, monkeypatch, caplog) -> None:
    monkeypatch.setattr(language_model, "bfloat16_speed", lambda: speed)
    torch.manual_seed(0)
    config = AutoConfig.for_model(FAMILIES[family].model_type, **FAMILIES[family].options)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="foretoken")
    LanguageModel(model.eval(), None, name="mine")
    found = [record.message for record in caplog.records if "bfloat16" in record.message]
    assert bool(found) is told
    assert all("60 times" in message and "float32" in message for message in found)
