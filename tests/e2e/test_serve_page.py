"""The server's page in a real browser, where Chromium is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from foretoken.options.sampling import SamplingParams
from foretoken.serve import app
from helpers.serving import served
from helpers.zoo_llms import base, with_config

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


QUESTION = "Tom has 12 marbles. He buys 30 more. How many marbles does he have now?"
SHOW_BOX = b"<script>setInterval(() => document.title = at('text').value, 50);</script>"
SEND = b"<script>setTimeout(() => at('ask').requestSubmit(), 1000);</script>"  # as a click on the button does
SEND_SHORT = b"<script>setTimeout(() => { at('limit').value = 3; at('ask').requestSubmit(); }, 1000);</script>"
COMPARE = b"""<script>
const waiting = setInterval(() => {  // an answer may take long on a busy machine
  const button = document.querySelector(".note button");
  if (button) { clearInterval(waiting); button.click(); }
}, 500);
</script>"""
AWAY = b"""<script>
const real = window.fetch, away = () => Promise.reject(new TypeError("Failed to fetch"));
setTimeout(() => window.fetch = away, 3000);
setTimeout(() => at('ask').requestSubmit(), 5000);
setTimeout(() => {
  document.body.dataset.away = [at('gone').hidden, at('running').textContent, at('text').value].join("|");
  window.fetch = real;
}, 9000);
setTimeout(() => document.body.dataset.back = [at('gone').hidden, at('running').textContent].join("|"), 15000);
</script>"""


def visited(tmp_path: Path, address: str) -> str:
    """The page as it stands after 60 s of the browser's time."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=60000", "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "</html>" in done.stdout, done.stderr
    return done.stdout


def test_a_link_fills_the_box_and_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_PAGE", app._PAGE.replace(b"</body>", SHOW_BOX + b"</body>"))
    with served(with_config({"method": "suffix"})) as running:
        shown = visited(tmp_path, f"{running.url}/#say=Who+is+there%3F")
        totals = running.loop.totals
    assert "<title>Who is there?</title>" in shown
    assert (totals.tokens, totals.prompt_tokens) == (0, 0)
    assert 'class="user"' not in shown


def test_a_question_is_answered_with_the_drafters_words_coloured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_PAGE", app._PAGE.replace(b"</body>", SEND + COMPARE + b"</body>"))
    (wanted,) = base().chat([{"role": "user", "content": QUESTION}], SamplingParams(max_tokens=200))
    with served(with_config({"method": "draft_model", "model": "zoo:draft", "num_speculative_tokens": 4})) as running:
        shown = visited(tmp_path, f"{running.url}/#say={QUESTION.replace(' ', '+')}")
        accepted = running.loop.totals.accepted_tokens
    answer = re.search(r'<div class="assistant">(.*?)</div>', shown, flags=re.DOTALL)
    assert answer is not None, shown
    unmarked = re.sub('<span class="refused".*?</span>', "", answer[1])
    assert re.sub("<[^>]*>", "", unmarked) == wanted.text
    assert 'title="drafted by draft_model"' in answer[1]
    assert re.search(
        r"plain decoding of the same prompt: [0-9]+ tokens per second; this answer was [0-9.]+ times", shown
    )
    assert answer[1].count('class="drafted"') > 5
    assert f"{accepted} of" in shown
    assert re.search(r'id="per-step">[1-9]\.[0-9]{2}<', shown)
    assert re.search(r'id="most">[0-9]+<', shown)  # not NaN, when two looks at the numbers come at once
    assert 'class="error"' not in shown


def test_a_server_that_is_away_loses_no_text_and_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_PAGE", app._PAGE.replace(b"</body>", AWAY + b"</body>"))
    with served(with_config(None)) as running:
        shown = visited(tmp_path, f"{running.url}/#say=Hello")
    assert 'data-away="false|–|Hello"' in shown
    assert 'data-back="true|0"' in shown
    assert '<div class="error">The server does not answer, so the answer is incomplete. Send it again.</div>' in shown


def test_it_says_why_nothing_was_drafted_and_keeps_to_the_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_PAGE", app._PAGE.replace(b"</body>", SEND_SHORT + b"</body>"))
    with served(with_config({"method": "auto", "drafter": "none"})) as running:
        shown = visited(tmp_path, f"{running.url}/#say=Hello")
        assert running.loop.totals.tokens == 3
    assert re.search("(nothing was drafted:|no draft in) [0-9]+ steps?: ", shown)
