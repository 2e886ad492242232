"""``--set executor=...`` as a person types it: the same text, and words where it does not fit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from foretoken.options.sampling import SamplingParams
from helpers.zoo_llms import base, ids

GENERATE = [sys.executable, "-m", "foretoken", "generate", "--threads", "1", "--dtype", "float32"]
PROMPT = "Once upon a time"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GENERATE, *arguments], capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize(
    "settings",
    [
        ("executor=pearl",),
        pytest.param(("executor=auto",), marks=pytest.mark.slow),
        pytest.param(("executor=pearl", "lane=process"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_the_text_is_that_of_plain_decoding(settings: tuple[str, ...]) -> None:
    sets = [word for setting in settings for word in ("--set", setting)]
    done = run(PROMPT, "--raw", "--method", "draft_model", "--max-tokens", "32", "--json", *sets)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (expected,) = base().generate([PROMPT], SamplingParams(max_tokens=32))
    assert found["token_ids"] == ids([expected])[0]
    assert found["num_discarded_tokens"] >= 0
    assert found["num_accepted_tokens"] > 0


def test_methods_that_cannot_draft_ahead_are_reported() -> None:
    refused = run(PROMPT, "--method", "suffix", "--set", "executor=pearl")
    assert refused.returncode == 2
    assert "executor='pearl' does not go with this recipe" in refused.stderr
    assert "Traceback" not in refused.stderr
