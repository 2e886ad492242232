"""A running server, looked at from outside."""

from __future__ import annotations

import pytest

from foretoken.core.errors import RequestError
from foretoken.doctor import server
from foretoken.doctor.finding import Finding
from foretoken.serve.loop import EngineLoop
from helpers.serving import NAME, served
from helpers.zoo_llms import with_config


def look(url: str, key: str | None = None) -> dict[str, Finding]:
    return {each.check: each for each in server.check(url, key)}


def test_a_server_that_answers_is_described_with_its_work() -> None:
    with served(with_config({"method": "suffix"})) as running:
        found = look(f"{running.url}/v1")
        assert found["drafting"].found.startswith("no token yet")
        body = {"model": NAME, "prompt": "one two three one two three one two", "max_tokens": 24, "temperature": 0}
        running.send("/v1/completions", {**body, "ignore_eos": True, "logit_processors": 1})
        found = look(running.url)
    assert all(found[name].status == "ok" for name in ("server", "model", "method", "requests", "memory"))
    assert running.url in found["server"].found
    assert "zoo:base" in found["model"].found
    assert found["method"].found.startswith("suffix, promises the same stream")
    assert found["requests"].found.startswith("1 have ended, 0 with an error")
    assert "tokens a step" in found["drafting"].found
    assert found["fields"].status == "warn"


def test_an_engine_that_died_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(with_config({"method": "suffix"})) as running:
        monkeypatch.setattr(EngineLoop, "accepting", False)
        monkeypatch.setattr(running.loop, "failure", RequestError("no memory"), raising=False)
        (found,) = server.check(running.url, None)
    assert found.status == "fail"
    assert "the engine has died: no memory" in found.found


def test_no_server_another_server_and_no_address_are_failures() -> None:
    for url in ("http://127.0.0.1:9", "127.0.0.1:8000", "nowhere"):
        (found,) = server.check(url, None)
        assert (found.check, found.status) == ("server", "fail")
        assert url in found.found


METRICS = """\
vllm:num_requests_running{model_name="m"} 1.0
vllm:num_requests_waiting{model_name="m"} 7.0
vllm:request_success_total{finished_reason="stop",model_name="m"} 9.0
vllm:request_success_total{finished_reason="error",model_name="m"} 1.0
vllm:request_prefill_time_seconds_sum{model_name="m"} 8.0
vllm:request_prefill_time_seconds_count{model_name="m"} 10.0
vllm:request_inference_time_seconds_sum{model_name="m"} 10.0
vllm:request_inference_time_seconds_count{model_name="m"} 10.0
vllm:kv_cache_usage_perc{model_name="m"} 0.95
vllm:generation_tokens_total{model_name="m"} 100.0
foretoken:speculation_off_steps_total{model_name="m",reason="seeded"} 90.0
foretoken:speculation_off_steps_total{model_name="m",reason="context"} 10.0
"""


def test_each_cause_of_slowness_has_a_remedy() -> None:
    samples = server._Samples(METRICS)
    found = [*server._load(samples), *server._drafting(samples, "auto")]
    warned = {each.check: each for each in found if each.status == "warn"}
    assert warned.keys() == {"requests", "queue", "prompts", "memory", "no draft"}
    assert "90 steps: a seed keeps" in warned["no draft"].found
    assert all(each.remedy for each in warned.values())
    (off,) = server._drafting(samples, "none")
    assert off.status == "warn"
    (idle,) = server._drafting(server._Samples('vllm:generation_tokens_total{model_name="m"} 9.0\n'), "suffix")
    assert "found nothing" in idle.remedy
