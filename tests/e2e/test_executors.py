"""``--set executor=...`` as a person types it: the same text, and words where it does not fit."""

from __future__ import annotations

import json

import pytest

from foretoken.cli.main import main
from foretoken.options.sampling import SamplingParams
from helpers.zoo_llms import base, ids

PROMPT = "Once upon a time"
GENERATE = ["generate", PROMPT, "--threads", "1", "--dtype", "float32"]


@pytest.mark.parametrize(
    "settings",
    [
        ("executor=pearl",),
        pytest.param(("executor=auto",), marks=pytest.mark.slow),
        pytest.param(("executor=pearl", "lane=process"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_the_text_is_that_of_plain_decoding(settings: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    sets = [word for setting in settings for word in ("--set", setting)]
    assert main([*GENERATE, "--raw", "--method", "draft_model", "--max-tokens", "32", "--json", *sets]) == 0
    found = json.loads(capsys.readouterr().out)
    (expected,) = base().generate([PROMPT], SamplingParams(max_tokens=32))
    assert found["token_ids"] == ids([expected])[0]
    assert found["num_discarded_tokens"] >= 0
    assert found["num_accepted_tokens"] > 0


def test_methods_that_cannot_draft_ahead_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE, "--method", "suffix", "--set", "executor=pearl"]) == 2
    assert "executor='pearl' does not go with this recipe" in capsys.readouterr().err
