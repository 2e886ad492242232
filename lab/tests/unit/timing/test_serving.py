"""Measuring servers: times, counts and refusals, against one that runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken.cli.main import main
from foretoken.core.errors import ConfigError
from foretoken.options.sampling import SamplingParams
from foretoken_lab.timing.serving import Answer, Endpoint, _read, ask, measure
from helpers.serving import NAME, Served, served
from helpers.zoo_llms import PROMPTS, base, with_config


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(with_config({"method": "suffix"})) as running:
        yield running


def endpoint(server: Served, **more: object) -> Endpoint:
    return Endpoint(label="ours", url=server.url, model=NAME, **more)  # type: ignore[arg-type]


def test_an_answer_is_timed_and_counted(server: Served) -> None:
    (wanted,) = base().chat([{"role": "user", "content": PROMPTS[0]}], SamplingParams(max_tokens=20))
    found = ask(endpoint(server), PROMPTS[0], 20)
    assert found.error is None
    assert found.tokens == len(wanted.token_ids)
    assert 0 < found.first < found.last


def test_a_failure_is_reported_and_not_counted(server: Served) -> None:
    assert "'gpt' is not served here" in str(ask(Endpoint(label="a", url=server.url, model="gpt"), "Hi", 2).error)
    assert ask(Endpoint(label="a", url="http://127.0.0.1:9", model=NAME), "Hi", 2) == Answer(
        error="ConnectionRefusedError: [Errno 111] Connection refused"
    )
    assert "unknown field" in str(ask(endpoint(server, extra={"mirostat": 2}), "Hi", 2).error)
    with pytest.raises(ConfigError, match="does not answer for model 'gpt'"):
        measure([Endpoint(label="a", url=server.url, model="gpt")], ["Hi"], [1], max_tokens=2, repeats=1)


def test_a_line_counts_when_its_end_has_come_however_it_was_cut() -> None:
    told = [{"content": "a"}, {"content": "b"}, {}]
    chunks = [f"data: {json.dumps({'choices': [{'delta': each}]})}\n\n".encode() for each in told]
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 7}}\r\n\r\ndata: [DONE]\n\n'
    pieces = [chunks[0][:9], chunks[0][9:] + chunks[1][:-2], chunks[1][-2:] + chunks[2][:20], chunks[2][20:] + usage]
    moments = [0.5, 1.0, 2.0, 3.0]
    assert _read([*zip(moments, pieces, strict=True)]) == Answer(1.0, 2.0, 7)
    assert _read([(1.0, b"".join([*chunks, usage]))]) == Answer(1.0, 1.0, 7)


def test_all_prompts_are_sent_once_a_round_by_any_client(server: Served) -> None:
    before = server.loop.totals.ended.get("length", 0) + server.loop.totals.ended.get("stop", 0)
    plain = endpoint(server, extra={"speculation": {"enabled": False}})
    results = measure([endpoint(server), plain], PROMPTS[:4], [1, 3], max_tokens=6, repeats=2)
    after = server.loop.totals.ended.get("length", 0) + server.loop.totals.ended.get("stop", 0)
    assert after - before == 2 + 2 * 2 * 2 * 4  # one of each is asked first, whether it answers
    assert [(each["clients"], each["requests"], each["failed"]) for each in results] == [(1, 8, 0)] * 2 + [
        (3, 8, 0)
    ] * 2
    assert len({each["tokens"] for each in results}) == 1
    for each in results:
        assert each["spread"][0] <= each["tokens_per_second"] <= each["spread"][1]
        assert each["first_token_seconds"]["p50"] <= each["first_token_seconds"]["p99"]


def test_the_command(server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    options = ["--clients", "2", "--limit", "1", "--repeats", "1", "--max-tokens", "4", "--out", str(out)]
    assert main(["bench", "serve", "--url", f"ours={server.url}/v1+top_k=5", *options]) == 0
    shown = capsys.readouterr().out
    assert "tokens P50" in shown
    assert any(re.search(r"^ ours +2 +\d+ +– ", line) for line in shown.splitlines())  # one round has no spread
    (found,) = json.loads(out.read_text())["results"]
    assert (found["endpoint"], found["clients"], found["failed"]) == ("ours", 2, 0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--url", "localhost:8000"], "write http://HOST:PORT"),
        (["--url", "http://127.0.0.1:9"], "does not answer"),
        (["--url", "http://127.0.0.1:9", "--url", "http://127.0.0.1:9"], "http://127.0.0.1:9 twice: keep one"),
        (["--url", "http://127.0.0.1:9", "--clients", "0"], "at least one client"),
    ],
)
def test_mistakes(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *options]) == 2
    assert says in capsys.readouterr().err
