"""The server's page in a real browser, where Chromium is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from foretoken.options.sampling import SamplingParams
from helpers.serving import served
from helpers.zoo_llms import base, with_config

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


def test_a_question_is_answered_with_the_drafters_words_coloured(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    question = "Tom has 12 marbles. He buys 30 more. How many marbles does he have now?"
    (wanted,) = base().chat([{"role": "user", "content": question}], SamplingParams(max_tokens=200))
    with served(with_config({"method": "draft_model", "model": "zoo:draft", "num_speculative_tokens": 4})) as running:
        address = f"{running.url}/#say={question.replace(' ', '+')}"
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
        done = subprocess.run(
            [*command, "--virtual-time-budget=20000", "--dump-dom", address],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        accepted = running.loop.totals.accepted_tokens
    answer = re.search(r'<div class="assistant">(.*?)</div>', done.stdout, flags=re.DOTALL)
    assert answer is not None, done.stderr
    assert re.sub("<[^>]*>", "", answer[1]) == wanted.text
    assert answer[1].count('class="drafted"') > 5
    assert f"{accepted} of" in done.stdout
    assert re.search(r'id="per-step">[1-9]\.[0-9]{2}<', done.stdout)
    assert re.search(r'id="most">[0-9]+<', done.stdout)  # not NaN, when two looks at the numbers come at once
    assert 'class="error"' not in done.stdout
