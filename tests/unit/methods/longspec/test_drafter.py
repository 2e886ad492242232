"""Contents of a ring, and drafts: in batches, after rejections, cancelled, called twice, after long prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core.draft import PointMass, Sampled
from foretoken.core.errors import ConfigError
from foretoken.engine.llm import LLM
from foretoken.methods.longspec.drafter import LongSpecDrafter
from foretoken.methods.longspec.network import LongSpec
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.native import build
from foretoken.options.sampling import SamplingParams
from helpers.drafters import Crashing
from helpers.golden import tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.untrained import untrained
from helpers.zoo_llms import assert_idle, with_config

WINDOW = 20
SHAPES: dict[str, dict[str, Any]] = {"chain": {}, "tree": {"tree": True, "width": 8, "max_depth": 3}}
every_shape = pytest.mark.parametrize("shape", SHAPES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    sizes = {"head_dim": 32, "intermediate_size": 128, "max_position_embeddings": 2048}
    place = tmp_path_factory.mktemp("model")
    found = load(save_model("llama_rope_yarn", place, **sizes), device="cpu")
    untrained(LongSpec, found, place / "longspec", window=WINDOW)
    return found


def drafter_of(model: LanguageModel, shape: str) -> LongSpecDrafter:
    return LongSpecDrafter(LongSpecDrafter.Config(**SHAPES[shape]), model)


def run(llm: LLM, prompts: Sequence[Sequence[int]], count: int, temperature: float = 0.0) -> list[Any]:
    params = SamplingParams(max_tokens=count, temperature=temperature, seed=3, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params)


def check_rings(drafter: LongSpecDrafter) -> list[int]:
    """Have every ring compared, after each draft, with one that is filled from the text alone; counts them."""
    checked: list[int] = []
    propose = drafter.propose

    def watched(contexts: Any, budgets: Any) -> Any:
        drafts = propose(contexts, budgets)
        for context, draft in zip(contexts, drafts, strict=True):
            if not len(draft):
                continue
            slot = drafter._states[context.request_id]
            root = len(context.tokens) - 1
            begin = max(0, root - WINDOW)
            expected = drafter._runner.keys(context.tokens[begin:root], begin)
            for found, wanted in zip(drafter.ring.read(slot, WINDOW), expected, strict=True):
                assert torch.equal(found, wanted)
            checked.append(len(context.tokens))
        return drafts

    drafter.propose = watched  # type: ignore[method-assign]
    return checked


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@every_shape
def test_the_ring_is_what_the_text_makes_of_it(shape: str, temperature: float, model: LanguageModel) -> None:
    """After every draft, accepted in part or rejected, in a batch of requests that come and go: bit for bit."""
    drafter = drafter_of(model, shape)
    checked = check_rings(drafter)
    llm = with_config({"method": drafter, "num_speculative_tokens": 5}, target=model, max_num_seqs=3)
    outputs = run(llm, [tokens_of(seed, 2 + 9 * seed, 100) for seed in range(5)], 24, temperature)
    assert all(output.error is None and len(output.token_ids) == 24 for output in outputs)
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 100
    assert min(checked) < WINDOW < max(checked)
    assert_idle(llm)
    assert drafter.ring.num_slots == 0


@every_shape
def test_long_texts_are_those_of_plain_decoding(shape: str, model: LanguageModel) -> None:
    """Prompts many windows long, read in chunks next to others that decode."""
    prompts = [tokens_of(seed, length, 100) for seed, length in enumerate((700, 90, 1500, 3))]
    options = {"target": model, "max_num_seqs": 2, "max_rows_per_step": 200}
    plain = run(with_config(None, **options), prompts, 20)
    drafter = drafter_of(model, shape)
    fast = run(with_config({"method": drafter, "num_speculative_tokens": 5}, **options), prompts, 20)
    assert [each.token_ids for each in fast] == [each.token_ids for each in plain]
    assert sum(each.metrics.num_draft_tokens for each in fast) > 100


@every_shape
def test_its_memory_does_not_grow_with_the_context(shape: str, model: LanguageModel) -> None:
    held = []
    for length in (30, 1900):
        drafter = drafter_of(model, shape)
        (output,) = run(
            with_config({"method": drafter, "num_speculative_tokens": 4}, target=model), [tokens_of(1, length, 100)], 8
        )
        assert output.metrics.num_draft_tokens > 0
        held.append(drafter.ring.num_bytes)
    nodes = 4 if shape == "chain" else 2 * 8
    assert held[0] == held[1] == 2 * 2 * (2 * WINDOW + 1 + nodes) * 32 * 4


def test_two_calls_for_one_root_propose_the_same(model: LanguageModel) -> None:
    drafter = drafter_of(model, "chain")
    checked, propose, answers = check_rings(drafter), drafter.propose, []

    def twice(contexts: Any, budgets: Any) -> Any:
        first, second = propose(contexts, budgets), propose(contexts, budgets)
        answers.append(([each.tree.tokens for each in first], [each.tree.tokens for each in second]))
        return second

    drafter.propose = twice  # type: ignore[method-assign]
    llm = with_config({"method": drafter, "num_speculative_tokens": 4}, target=model)
    (output,) = run(llm, [tokens_of(1, 33, 100)], 20)
    assert output.error is None
    assert checked
    assert answers
    assert all(first == second for first, second in answers)


@pytest.mark.parametrize("when", ["propose", "observe"])
def test_a_neighbour_s_fault_and_a_cancelled_request_leave_the_others_as_they_are(
    when: str, model: LanguageModel
) -> None:
    prompts = [tokens_of(seed, 30 + seed, 100) for seed in range(3)]
    expected = run(with_config(None, target=model), prompts, 16)
    inner = drafter_of(model, "chain")
    checked = check_rings(inner)
    drafter = Crashing(inner, lambda context: context.num_prompt == 31 and len(context.tokens) > 36, when=when)
    llm = with_config({"method": drafter, "num_speculative_tokens": 4}, target=model)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert [output.error is None for output in outputs] == [True, False, True]
    for place in (0, 2):
        assert outputs[place].token_ids == expected[place].token_ids
    assert checked
    assert inner.ring.num_slots == 0


@every_shape
def test_a_request_drafts_alike_alone_and_in_company(shape: str, model: LanguageModel) -> None:
    """Seeded, at temperature 1: tokens depend on the drafts, and other requests must not change these."""
    if model.native_decoder is None:
        pytest.skip("the library's products round by their number of rows")
    prompts = [tokens_of(seed, 8 + 7 * seed, 100) for seed in range(4)]
    config = {"num_speculative_tokens": 4}
    together = run(with_config({"method": drafter_of(model, shape), **config}, target=model), prompts, 16, 1.0)
    alone = with_config({"method": drafter_of(model, shape), **config}, target=model)
    for prompt, output in zip(prompts, together, strict=True):
        assert run(alone, [prompt], 16, 1.0)[0].token_ids == output.token_ids


def test_a_beam_has_the_widths_of_the_paper(model: LanguageModel) -> None:
    """4, 16, 16, 16, 16 where the budget holds them all; of less, the most probable paths."""
    drafter = LongSpecDrafter(LongSpecDrafter.Config(tree=True), model)
    found: list[Any] = []
    propose = drafter.propose

    def watched(contexts: Any, budgets: Any) -> Any:
        drafts = propose(contexts, budgets)
        found.extend(drafts)
        return drafts

    drafter.propose = watched  # type: ignore[method-assign]
    config = {"method": drafter, "num_speculative_tokens": 68}
    run(with_config(config, target=model, max_rows_per_step=128, max_num_seqs=1), [tokens_of(1, 9, 100)], 20)
    whole = [sum(depth == level for depth in found[0].tree.depths) for level in range(1, 6)]
    assert whole == [4, 16, 16, 16, 16]
    config["num_speculative_tokens"] = 7
    found.clear()
    run(with_config(config, target=model), [tokens_of(1, 9, 100)], 20)
    assert len(found[0]) == 7
    assert isinstance(found[0].law, PointMass)
    reach: list[float] = []
    for confidence, parent in zip(found[0].confidence, found[0].tree.parents, strict=True):
        reach.append(confidence * (1.0 if parent < 0 else reach[parent]))
    assert drafter.laws == (PointMass,)
    assert drafter_of(model, "chain").laws == (Sampled,)


def test_a_head_next_to_the_weights_is_found_and_a_folder_is_accepted(model: LanguageModel, tmp_path: Path) -> None:
    untrained(LongSpec, model, tmp_path, window=WINDOW, levels=2)
    assert LongSpecDrafter(LongSpecDrafter.Config(head=str(tmp_path)), model)._depth == 2
    assert LongSpecDrafter(LongSpecDrafter.Config(), model)._depth == 5


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # tied, and with a head of its own
@pytest.mark.parametrize("native", [True, False])
def test_a_head_drafts_for_a_model_grown_from_its_target(
    family: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found without an option, the same drafts, at the cost that they have next to the original."""
    build.library()  # the native decoder comes from the user's own cache
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128}
    folder = save_model(family, tmp_path / "original", **sizes)
    original = load(str(folder), device="cpu")
    untrained(LongSpec, original, folder / "longspec", window=WINDOW)
    wide = load(f"grown:{folder}:0.6m", device="cpu")
    assert wide.num_layers > original.num_layers
    found = []
    for target in (original, wide):
        drafter = LongSpecDrafter(LongSpecDrafter.Config(), target)
        if not native:
            drafter._runner._native = None
        llm = with_config({"method": drafter, "num_speculative_tokens": 4}, target=target)
        outputs = run(llm, [tokens_of(seed, 9 + 20 * seed, 100) for seed in range(3)], 24)
        found.append(
            [(each.token_ids, each.metrics.num_draft_tokens, each.metrics.num_accepted_tokens) for each in outputs]
        )
        assert drafter.ring.num_bytes == 4 * 2 * 2 * (2 * WINDOW + 5) * 32 * 4
    assert found[0] == found[1]
    assert sum(count for _, count, _ in found[0]) > 100
    with pytest.raises(ConfigError, match="draft_vocab"):
        LongSpecDrafter(LongSpecDrafter.Config(draft_vocab=str(tmp_path)), wide)
