"""Texts are compared token by token, and the first difference is reported."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foretoken.certify.certify import certify
from foretoken.certify.on_models import greedy_text, same_stream
from foretoken.core.errors import ConfigError
from foretoken.options.model import ModelOptions
from foretoken.options.sampling import SamplingParams
from helpers.table_engine import engine


def test_greedy_text_and_same_stream_report_the_first_difference() -> None:
    assert greedy_text(engine(), engine(), quick=True).passed
    assert same_stream(engine(), engine(), quick=True).passed
    other = same_stream(engine(), engine(salt=1), quick=True)
    assert not other.passed
    assert {"prompt", "position", "plain", "speculative"} <= set(other.details["differences"][0])

    def shortened(prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[list[int]]:
        return [tokens[:5] for tokens in engine()(prompts, params)]

    assert greedy_text(engine(), shortened, quick=True).details["differences"][0]["position"] == 5


def test_a_context_too_short_for_the_texts_is_refused_before_the_work() -> None:
    with pytest.raises(ConfigError, match=r"needs a context of 6\d tokens; 'zoo:draft' has 20 here"):
        certify("ngram", model="zoo:draft", loading=ModelOptions(dtype="float32", max_model_len=20), quick=True)
