"""Several models in one server: loaded by requests, within a bound, and out of memory when others need it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from foretoken.cli.run.several_models import read_models
from foretoken.core.errors import ConfigError
from foretoken.engine.llm import LLM
from foretoken.options.sampling import SamplingParams
from foretoken.serve.model_pool import ModelPool, ModelSettings
from helpers.serving import Served, served_pool

TEXT, QUESTION = "/v1/completions", "The cat sat on the mat. The cat sat on"
OPTIONS = {"dtype": "float32", "max_num_seqs": 4}
NAMES = ("base", "draft")


def settings(name: str, **more: Any) -> ModelSettings:
    return ModelSettings(model=f"zoo:{name}", config={"method": "suffix"}, names=(name,), options=OPTIONS, **more)


@contextmanager
def serving(*models: ModelSettings, **options: Any) -> Iterator[Served]:
    pool = ModelPool(models or map(settings, NAMES), **options)
    with served_pool(pool) as running:
        yield running


@cache
def expected(name: str) -> str:
    with LLM(f"zoo:{name}", speculative_config=None, **OPTIONS) as llm:
        return llm.generate(QUESTION, SamplingParams(max_tokens=12, ignore_eos=True))[0].text


def asked(server: Served, name: str | None, **more: Any) -> tuple[int, Any, Any]:
    body = {"model": name, "prompt": QUESTION, "temperature": 0, "max_tokens": 12, "ignore_eos": True, **more}
    return server.send(TEXT, body)


def text(server: Served, name: str) -> str:
    status, answer, _ = asked(server, name)
    assert status == 200, answer
    assert answer["model"] == name
    return str(answer["choices"][0]["text"])


def states(server: Served) -> dict[str, str]:
    return {each["id"]: each["status"]["value"] for each in server.get("/models")[1]["data"]}


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def two() -> Iterator[Served]:
    """One model fits into memory."""
    with serving(most=1) as running:
        yield running


def test_requests_alternate_between_two_models_while_one_fits(two: Served) -> None:
    """At once: none is lost, and each gets its model's text."""
    with ThreadPoolExecutor(10) as threads:
        names = [NAMES[each % 2] for each in range(10)]
        texts = list(threads.map(lambda name: text(two, name), names))
    assert texts == [expected(name) for name in names]
    assert sorted(states(two).values()) == ["loaded", "sleeping"]


def test_a_running_request_ends_before_its_model_leaves(two: Served) -> None:
    text(two, "base")
    llm = weakref.ref(two.service.llm)
    body = {"model": "base", "prompt": QUESTION, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with two.begun(TEXT, body) as response:
        first = response.readline()
        other = threading.Thread(target=lambda: text(two, "draft"))
        other.start()
        until(lambda: states(two)["draft"] == "loading")
        events = (first + response.read()).decode().count("data: {")
        assert events > 1
    other.join(60)
    assert states(two) == {"base": "sleeping", "draft": "loaded"}
    gc.collect()
    assert llm() is None  # nothing keeps its memory
    assert text(two, "base") == expected("base")


def test_metrics_and_cards_of_a_model_that_left(two: Served) -> None:
    text(two, "draft")
    text(two, "base")
    numbers = two.get("/metrics")[1].split("\n")
    for line in ('model_loaded{model_name="base"} 1.0', 'model_loaded{model_name="draft"} 0.0'):
        assert f"foretoken:{line}" in numbers
    counted = [line for line in numbers if line.startswith('vllm:generation_tokens_total{model_name="draft"}')]
    assert len(counted) == 1
    assert float(counted[0].split()[-1]) >= 12  # of all its times in memory
    assert sum(line.startswith("# TYPE vllm:generation_tokens_total ") for line in numbers) == 1
    assert two.get("/health")[0] == 200
    card = two.get("/v1/models/draft")[1]
    assert (card["method"], card["status"]) == ("suffix", {"value": "sleeping"})
    assert two.get("/page.json")[1]["model"] == "base"


def test_the_name_is_needed_and_must_be_one_of_the_models(two: Served) -> None:
    status, answer, _ = asked(two, None)
    assert (status, answer["error"]["param"]) == (400, "model")
    assert "['base', 'draft']" in answer["error"]["message"]
    status, answer, _ = asked(two, "gpt-4")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "use 'base', 'draft'" in answer["error"]["message"]


def test_models_are_loaded_and_unloaded_by_hand(two: Served) -> None:
    assert two.send("/models/load", {"model": "draft"})[:2] == (200, {"success": True})
    assert states(two)["draft"] == "loaded"
    assert two.send("/models/unload", {"model": "draft"})[:2] == (200, {"success": True})
    assert two.get("/is_sleeping")[1] == {"is_sleeping": True}
    two.send("/wake_up", {})
    assert two.get("/is_sleeping")[1] == {"is_sleeping": False}
    assert two.send("/sleep?level=1", {})[1] == {"is_sleeping": True}
    assert set(states(two).values()) == {"sleeping"}
    status, answer, _ = two.send("/tokenize", {"model": "draft", "prompt": "a"})  # it wakes
    assert (status, answer["count"]) == (200, len(answer["tokens"]))


def test_two_models_run_side_by_side() -> None:
    sizes = {name: settings(name).num_bytes() for name in NAMES}
    with serving(budget=sum(sizes.values()) + 10**9) as server, ThreadPoolExecutor(8) as threads:
        names = [NAMES[each % 2] for each in range(8)]
        assert list(threads.map(lambda name: text(server, name), names)) == [expected(name) for name in names]
        assert set(states(server).values()) == {"loaded"}


def test_keys_and_values_count_when_another_model_is_loaded() -> None:
    sizes = {name: settings(name).num_bytes() for name in NAMES}
    with serving(budget=sum(sizes.values()) + 100) as server:
        text(server, "base")  # its keys and values take the place of the other one
        text(server, "draft")
        assert states(server) == {"base": "sleeping", "draft": "loaded"}


def test_a_model_beyond_the_budget_is_refused_and_others_go_on() -> None:
    sizes = {name: settings(name).num_bytes() for name in NAMES}
    with serving(budget=sizes["base"] - 1) as server:
        status, answer, _ = asked(server, "base")
        assert (status, answer["error"]["code"]) == (400, "model_too_large")
        assert "raise --models-memory" in answer["error"]["message"]
        assert text(server, "draft") == expected("draft")
        assert states(server)["base"] == "unloaded"


def test_a_load_that_fails_is_reported_and_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    damaged = ModelSettings(model=str(tmp_path), config={}, names=("damaged",))
    with serving(damaged, settings("draft")) as server:
        for _ in range(2):
            status, answer, _ = asked(server, "damaged")
            assert (status, answer["error"]["code"]) == (503, "model_not_loaded")
            assert "the model 'damaged' cannot be loaded: model" in answer["error"]["message"]
        assert text(server, "draft") == expected("draft")
        assert server.get("/health")[0] == 200


def test_an_idle_model_leaves_and_a_request_wakes_it() -> None:
    with serving(settings("draft"), idle_seconds=0.05) as server:
        assert text(server, "draft") == expected("draft")
        until(lambda: states(server)["draft"] == "sleeping")
        assert text(server, "draft") == expected("draft")


def test_a_dead_engine_is_replaced() -> None:
    with serving() as server:
        text(server, "draft")
        with mock.patch.object(server.pool.models[1].loop._driver, "step", side_effect=SystemError("broken")):
            assert asked(server, "draft")[0] == 503
        assert server.get("/health")[0] == 503
        assert text(server, "draft") == expected("draft")
        assert server.get("/health")[0] == 200


def table(tmp_path: Path, words: str) -> list[ModelSettings]:
    file = tmp_path / "models.toml"
    file.write_text(words)
    return read_models(file, ModelSettings(model="zoo:base", config={"method": "auto"}, names=("-",), options=OPTIONS))


def test_the_file_has_the_options_of_the_command(tmp_path: Path) -> None:
    first, second = table(
        tmp_path,
        """
        [base]
        model = "zoo:base"
        method = "ngram"
        set = { num_speculative_tokens = 3 }
        dtype = "bfloat16"
        served_model_name = ["gpt-4o", "gpt-*"]
        reasoning = "off"
        ["zoo:draft"]
        model = "zoo:draft"
        """,
    )
    assert first.config == {"method": "ngram", "num_speculative_tokens": 3}
    assert first.names == ("base", "gpt-4o", "gpt-*")
    assert first.options == {"dtype": "bfloat16", "max_num_seqs": 4}
    assert first.reasoning is False
    assert (second.names, second.config, second.options) == (("zoo:draft",), {"method": "auto"}, OPTIONS)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "names no model"),
        ("model = 1", "[model]: a model is a table"),
        ("[a]", "[a]: a model is a table with model = PATH"),
        ('[a]\nmodel = "zoo:nothing"', "nothing"),
        ('[a]\nmodel = "./nowhere"', "there is no such folder"),
        ('[a]\nmodel = "zoo:base"\ndtyp = "int8"', "did you mean 'dtype'?"),
        ('[a]\nmodel = "zoo:base"\nthreads = 2', "threads"),
        ('[a]\nmodel = "zoo:base"\nmax_num_seqs = 0', "max_num_seqs=0"),
        ('[a]\nmodel = "zoo:base"\nmethod = 7', "method = 7 must be a text"),
        ('[a]\nmodel = "zoo:base"\nmethod = "suffixx"', "did you mean 'suffix'?"),
        ('[a]\nmodel = "zoo:base"\nreasoning = "yes"', "reasoning"),
        ('[a]\nmodel = "zoo:base"\n[b]\nmodel = "zoo:base"\nserved_model_name = "a"', "'a' names two models"),
        ('["gpt-*"]\nmodel = "zoo:base"', "without *"),
        ("[a", "Expected ']' at the end of a table"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, words: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        table(tmp_path, words)
    assert says in str(refused.value)
    assert str(refused.value).startswith("--models ")
