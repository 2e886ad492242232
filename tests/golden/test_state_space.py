"""Targets with state-space layers: the library's logits and texts, whoever drafts, chains and trees, in every layout.

The reference of rows is the library's forward over the whole text; of texts, its ``generate``, whose single rows do
not limit dt where those of a prompt do.
"""

from __future__ import annotations

import logging
import random
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from foretoken import zoo
from foretoken.core.errors import ConfigError, UnsupportedArchitecture
from foretoken.core.tree import TokenTree
from foretoken.engine.llm import LLM
from foretoken.forward.ssm.state import LONG
from foretoken.methods.stree.plan import TreeScan, TreeScanPlans
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.native import build
from foretoken.options.sampling import SamplingParams
from foretoken_lab import testing as stubs
from helpers import golden
from helpers.golden import Session
from helpers.pairwise import in_pairs
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import STATE_SPACE, VOCAB_SIZE, load_eager, save_model
from helpers.variants import Case, cases
from helpers.zoo_llms import PROMPTS, ids, prompt_ids, with_config

LENGTH = 8
SCENARIOS = [name for name in golden.SCENARIOS if name != "after_rollback"]  # states are not shortened
CLOSE = 6e-5
# products over the stream and the embedding side by side, with weights as wide as these, lose two digits more
CLOSE_BY_LAYOUT = {"zamba2": 2e-3}
NATIVE = {
    name
    for name in STATE_SPACE
    if name.startswith(("mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "lfm2", "qwen3", "olmo"))
}
LIMITED = [name for name, family in STATE_SPACE.items() if "time_step_limit" in family.options]


@cache
def place(name: str, root: Path) -> Path:
    return save_model(name, root / name)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(params=STATE_SPACE)
def layout(request: pytest.FixtureRequest, root: Path) -> tuple[str, LanguageModel, Path]:
    name: str = request.param
    if name == "olmo_hybrid" and transformers.__version__.startswith("5.17."):
        pytest.skip("refused: this version computes another recurrence where key heads are shared")
    return name, load(place(name, root), device="cpu"), place(name, root)


def generated(model: object, tokens: list[int], count: int) -> list[int]:
    given = torch.tensor([tokens])
    with torch.inference_mode():
        output = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False)
    found: list[int] = output[0, len(tokens) :].tolist()
    return found


def worst_of_any_history(model: LanguageModel, reference: Any, seed: int) -> float:
    """Chunks, trees, commits of any path, forks, rollbacks, slots given back and used again: rows are their texts'.

    Returns:
        the largest difference of a row that was read last, or of a node, to the library's row after the whole text,
        in units of the logits' spread.
    """
    rng, worst, compared = random.Random(seed), 0.0, 0
    session = Session(model, max_slots=3)
    cache, texts = session.cache, dict[int, list[int]]()

    def compare(row_V: torch.Tensor, text: list[int]) -> None:
        nonlocal worst, compared
        with torch.inference_mode():
            expected_V = reference(torch.tensor([text]), use_cache=False).logits[0, -1]
        worst, compared = max(worst, float((row_V - expected_V).abs().max() / expected_V.std())), compared + 1

    while compared < 6:
        action = rng.choice(["open", "read", "draft", "draft", "fork", "back", "close"])
        if not texts or (action == "open" and cache.free_slots):
            slot = cache.acquire()
            texts[slot] = [rng.randrange(4, VOCAB_SIZE)]
            session.chunk(slot, texts[slot])
        slot = rng.choice(list(texts))
        text = texts[slot]
        if action == "read":
            text += [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.choice([1, 3, LONG + 1]))]
            compare(session.chunk(slot, text[cache.lengths[slot] :], wanted=1)[-1], text)
        elif action == "draft":
            count, root = rng.randrange(0, 7), rng.randrange(4, VOCAB_SIZE)
            nodes = [rng.randrange(4, VOCAB_SIZE) for _ in range(count)]
            tree = TokenTree(nodes, [rng.randrange(-1, each) for each in range(count)])
            rows = session.draft(slot, root, tree)
            node = rng.randrange(-1, count)
            path = [] if node < 0 else tree.path_to(node)
            text += [root, *(nodes[each] for each in path)]
            compare(rows[node + 1], text)
            cache.commit(slot, [0, *(each + 1 for each in path)])
        elif action == "fork" and cache.free_slots:
            texts[cache.fork(slot)] = list(text)
        elif action == "back":
            length = cache.reachable(slot, rng.randrange(len(text) + 1))
            cache.rollback(slot, length)
            del text[length:]
        elif action == "close":
            cache.release(slot)
            del texts[slot]
        for each in [slot for slot, text in texts.items() if not text or len(text) > 90]:
            cache.release(each)
            del texts[each]
    return worst


def test_rows_and_texts_are_the_library_s(layout: tuple[str, LanguageModel, Path]) -> None:
    """Logits in every scenario, walked and scanned; then greedy texts after prompts of one token and more."""
    name, model, folder = layout
    reference = load_eager(folder)
    if build.library() is not None:
        assert (model.native_decoder is not None) == (name in NATIVE)
    close = CLOSE_BY_LAYOUT.get(name, CLOSE)
    if name not in LIMITED:  # a forward over the whole text limits every dt
        for scenario in SCENARIOS:
            assert golden.worst(Session(model), reference, scenario, VOCAB_SIZE) < close, scenario
        for scenario in ("prefill_of_many_rows", "after_commit"):
            assert golden.worst(Session(model, plan=TreeScan), reference, scenario, VOCAB_SIZE) < close, scenario
        assert worst_of_any_history(model, reference, seed=0) < close
    prompts = [golden.tokens_of(70 + count, count, VOCAB_SIZE) for count in (1, 3, 21)]
    expected = [generated(reference, prompt, 5) for prompt in prompts]
    params = SamplingParams(max_tokens=5)
    for config in (
        None,
        {"method": stubs.Random(VOCAB_SIZE, tree=True), "num_speculative_tokens": 6},
        {"method": "ngram", "num_speculative_tokens": 4, "stree": {"kernel": "scan"}},
    ):
        llm = LLM.from_target(model, speculative_config=config, max_num_seqs=3, max_rows_per_step=9)
        assert ids(llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)) == expected


def test_a_convolution_may_reach_back_beyond_a_long_chunk(tmp_path: Path) -> None:
    folder = save_model("mamba2", tmp_path, conv_kernel=LONG + 8)
    prompt = golden.tokens_of(6, 2 * LONG + 4, VOCAB_SIZE)
    llm = LLM.from_target(load(folder, device="cpu"), max_rows_per_step=LONG + 2)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=8))
    assert output.token_ids == generated(load_eager(folder), prompt, 8)


@pytest.mark.parametrize("name", LIMITED)
def test_a_prompt_s_last_row_is_limited_in_whatever_chunk(name: str, root: Path) -> None:
    """Also where the budget of a step cuts off all but one row of it."""
    model, prompt = load(place(name, root), device="cpu"), golden.tokens_of(5, 17, VOCAB_SIZE)
    first = [
        LLM.from_target(model, max_num_seqs=1, max_rows_per_step=rows)
        .generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1, logprobs=1))[0]
        .logprobs[0]
        .logprob
        for rows in (17, 8, 16)
    ]
    assert first == pytest.approx([first[0]] * 3, abs=1e-5)


@pytest.mark.skipif(build.library() is None, reason="there is no compiled decoder on this machine")
def test_layers_that_run_in_the_library_s_modules_say_so(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(place("bamba", root), device="cpu")
        assert not caplog.text
        load(str(save_model("nemotron_h", root / "compressed", moe_latent_size=32)), device="cpu")
        load(place("zamba2", root), device="cpu")
    assert "the slower general path is: the experts of layer 4 read compressed rows" in caplog.text
    assert "the slower general path is: its type 'zamba2' is not one of afmoe, arcee, " in caplog.text


@cache
def hybrid(name: str) -> LLM:
    return LLM(f"zoo:{name}", dtype="float32", device="cpu", seed=0, speculative_config=None)


@pytest.mark.parametrize("name", ["mamba", "hybrid"])
def test_the_zoo_is_the_library_s(name: str) -> None:
    reference = AutoModelForCausalLM.from_pretrained(zoo.path(name), dtype=torch.float32)
    expected = [generated(reference, prompt_ids(prompt), 12) for prompt in PROMPTS]
    assert ids(hybrid(name).generate(PROMPTS, SamplingParams(max_tokens=12))) == expected


@cache
def plain(name: str) -> list[list[int]]:
    return ids(hybrid(name).generate(PROMPTS, SamplingParams(max_tokens=LENGTH, ignore_eos=True)))


@pytest.mark.parametrize(
    "case", in_pairs(cases(), lambda case: (case.entry.name, case.kind), lambda case: ()), ids=lambda case: case.label
)
def test_every_drafter_gives_the_plain_tokens(case: Case) -> None:
    """Collected from the catalogue. Without the native decoder a forward of the library's cannot be cut everywhere."""
    target = hybrid("hybrid").target
    if target.native_decoder is None and case.entry.name in {"kangaroo", "del"}:
        with pytest.raises(UnsupportedArchitecture, match="cannot draft for itself"):
            with_config(case.config(target, None, 5), target=target)
        return
    if case.entry.name == "longspec":  # Bamba turns half of a head
        with pytest.raises(UnsupportedArchitecture, match="'zoo:hybrid' is of type 'bamba': the angles of its keys"):
            with_config(case.config(target, None, 5), target=target)
        return
    llm = with_config(case.config(target, None, 5), target=target, max_num_seqs=2, max_rows_per_step=40)
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    assert ids(llm.generate(PROMPTS[:3], params)) == plain("hybrid")[:3]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kernel", ["walk", "scan"])
@pytest.mark.parametrize("name", ["mamba", "hybrid"])
def test_good_and_bad_trees_give_the_plain_tokens(name: str, kernel: str) -> None:
    target = hybrid(name).target
    truth = {tuple(prompt_ids(prompt)): text for prompt, text in zip(PROMPTS, plain(name), strict=True)}
    for drafter in (stubs.OracleTree(truth), stubs.Random(8192, tree=True), stubs.AlwaysWrong(truth)):
        config = {"method": drafter, "num_speculative_tokens": 7, "stree.kernel": kernel}
        llm = LLM.from_target(target, speculative_config=config, max_num_seqs=2)
        assert isinstance(llm.recipe.plan, TreeScanPlans)
        assert ids(llm.generate(PROMPTS, SamplingParams(max_tokens=LENGTH, ignore_eos=True))) == plain(name)


def test_a_seed_gives_the_same_stream_with_any_point_mass_drafter() -> None:
    target = hybrid("hybrid").target
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3)
    expected = ids(hybrid("hybrid").generate(PROMPTS, params))
    for method in ("ngram", "suffix"):
        llm = LLM.from_target(target, speculative_config={"method": method, "num_speculative_tokens": 5})
        assert ids(llm.generate(PROMPTS, params)) == expected


def test_a_state_space_model_drafts() -> None:
    """Levels after its own tail, for a target of another kind."""
    config = {"method": "draft_model", "model": "zoo:mamba", "num_speculative_tokens": 5}
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    target = hybrid("hybrid").target
    llm = LLM.from_target(target, speculative_config=config)
    outputs = llm.generate(PROMPTS, params)
    assert ids(outputs) == plain("hybrid")
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"stree.kernel": "wlak"}, r"kernel='wlak'.*walk"),
        ({"stree.size": 3}, r"unknown option 'stree.size'"),
        ({"stree": 1}, r"stree=1 must be a mapping of options to values.*--set stree.NAME=VALUE"),
        ({"verification.attention": "per_head"}, r"verification.*: model 'zoo:hybrid' has state-space layers"),
    ],
)
def test_what_does_not_fit_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM.from_target(hybrid("hybrid").target, speculative_config={"method": "ngram", **config})


def test_a_cache_that_cannot_branch_refuses_trees() -> None:
    target = hybrid("hybrid").target
    cache = target.new_cache(1)
    cache.can_branch = False
    with mock.patch.object(target, "new_cache", return_value=cache):
        LLM.from_target(target, speculative_config={"method": "ngram"})
        with pytest.raises(ConfigError, match=r"'suffix' proposes trees.*cannot branch: let the method propose chains"):
            LLM.from_target(target, speculative_config={"method": "suffix"})


def test_a_target_without_states_has_no_such_plan() -> None:
    with pytest.raises(ConfigError, match=r"stree.*: model 'zoo:draft' has no state-space layers"):
        LLM("zoo:draft", device="cpu", speculative_config={"method": "ngram", "stree.kernel": "scan"})
