"""The draft network's cache after drafts that were rejected, repeated or cancelled; and batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core.tree import ROOT
from foretoken.drafting.feature_heads import drafter as module
from foretoken.engine.llm import LLM
from foretoken.forward.hidden_states import FINAL
from foretoken.methods.dovetail import remote_head
from foretoken.methods.dovetail.drafter import DovetailDrafter
from foretoken.methods.dovetail.network import Dovetail
from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.methods.eagle.drafter import EagleDrafter
from foretoken.methods.scylla.drafter import ScyllaDrafter
from foretoken.methods.scylla.network import Scylla
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load, load_as_is
from foretoken.options.sampling import SamplingParams
from foretoken.train.frozen_target import FrozenTarget
from helpers.adapters import shelf
from helpers.golden import tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.untrained import untrained
from helpers.zoo_llms import assert_idle, with_config

SHAPES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "chain": (EagleDrafter, Eagle, {"draft_vocab_size": 60}, {}),
    "tree": (EagleDrafter, Eagle, {"draft_vocab_size": 60}, {"tree": True, "width": 3, "max_depth": 3}),
    "eagle2": (EagleDrafter, Eagle, {"algorithm": "eagle"}, {}),
    "layers": (ScyllaDrafter, Scylla, {"layers": 3}, {"width": 3, "max_depth": 3}),
    "gate": (DovetailDrafter, Dovetail, {"layers": 2}, {"width": 3, "max_depth": 3, "budget": "fixed"}),
    "lane": (
        DovetailDrafter,
        Dovetail,
        {"layers": 1, "fusion": "concat"},
        {"width": 3, "max_depth": 3, "budget": "fixed", "place": "thread"},
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
    return load(str(save_model("llama", tmp_path_factory.mktemp("tiny"), **sizes)), device="cpu")


def drafter_of(model: LanguageModel, shape: str) -> Any:
    kind, part, fields, options = SHAPES[shape]
    place = Path(shelf(), f"head-{id(model)}-{shape}")
    return kind(kind.Config(head=untrained(part, model, place, **fields), **options), model)


class Kept:
    """A drafter's cache as it was when each request ended: prompt and output -> keys and values of its pairs."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.found = drafter, dict[int, tuple[list[int], Tensor, Tensor]]()
        self._inner = drafter.lane.remote_head if isinstance(drafter, DovetailDrafter) else drafter
        self._propose = drafter.propose
        drafter.propose = self.propose

    def propose(self, contexts: Sequence[Any], budgets: Sequence[Any]) -> Any:
        drafts = self._propose(contexts, budgets)
        cache = self._inner._cache
        for context in contexts:
            state = self._inner._pending.get(context.request_id)
            if state is not None and cache.keys[0] is not None and cache.values[0] is not None:
                count = cache.lengths[state.slot]
                keys, values = (
                    torch.cat([buffer[state.slot, :, :count] for buffer in buffers])
                    for buffers in (cache.keys, cache.values)
                )
                self.found[context.request_id] = (list(context.tokens[: count + 1]), keys, values)
        return drafts


def run(llm: LLM, prompts: Sequence[Sequence[int]], count: int, temperature: float = 0.0) -> list[Any]:
    params = SamplingParams(max_tokens=count, temperature=temperature, seed=3, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params)


def read_anew(model: LanguageModel, shape: str, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """The same pairs, read from a prompt."""
    kept = Kept(drafter_of(model, shape))
    llm = with_config({"method": kept.drafter, "num_speculative_tokens": 3}, target=model)
    run(llm, [tokens[:-1]], 3)
    first = min(kept.found.values(), key=lambda each: len(each[0]))
    length = len(tokens) - 1
    return first[1][:, : length - 1], first[2][:, : length - 1]


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_cache_is_what_reading_the_text_anew_makes_of_it(
    shape: str, temperature: float, model: LanguageModel
) -> None:
    """After every draft, accepted in part or rejected, in a batch: bit for bit."""
    kept = Kept(drafter_of(model, shape))
    llm = with_config({"method": kept.drafter, "num_speculative_tokens": 5}, target=model, max_num_seqs=3)
    outputs = run(llm, [tokens_of(seed, 5 + 9 * seed, 100) for seed in range(5)], 24, temperature)
    assert all(output.error is None and len(output.token_ids) == 24 for output in outputs)
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 100
    assert_idle(llm)
    assert not len(kept.drafter._pending)
    for tokens, keys, values in list(kept.found.values())[::2]:
        again = read_anew(model, shape, tokens)
        count = again[0].shape[1]
        assert count > 20
        for found, expected in zip((keys[:, :count], values[:, :count]), again, strict=True):
            if model.native_decoder is not None:
                assert torch.equal(found, expected)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"tree": True, "width": 2}], ids=["chain", "tree"])
def test_no_path_exceeds_the_requested_length(options: dict[str, Any], model: LanguageModel, tmp_path: Path) -> None:
    head = untrained(Eagle, model, tmp_path)
    drafter = EagleDrafter(EagleDrafter.Config(head=head, max_depth=2, **options), model)
    propose, longest = drafter.propose, list[int]()

    def listening(contexts: Sequence[Any], budgets: Sequence[Any]) -> Any:
        drafts = propose(contexts, budgets)
        longest.extend(max(draft.tree.depths, default=0) for draft in drafts)
        return drafts

    drafter.propose = listening  # type: ignore[method-assign]
    run(with_config({"method": drafter, "num_speculative_tokens": 6}, target=model), [tokens_of(1, 9, 100)], 12)
    assert max(longest) == 2


READS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "depths out of order": (EagleDrafter, Eagle, {"draft_vocab_size": 60, "depths": (3, 1, 2)}, {}),
    "one depth twice": (EagleDrafter, Eagle, {"depths": (2, 1, 2), "norm_output": True}, {}),
    "eagle2": (EagleDrafter, Eagle, {"algorithm": "eagle"}, {"tree": True, "width": 2, "max_depth": 3}),
    "layers": (ScyllaDrafter, Scylla, {"layers": 2, "draft_vocab_size": 50}, {"width": 3, "max_depth": 3}),
}


@pytest.mark.parametrize("shape", READS)
def test_drafts_follow_from_the_target_s_states(shape: str, model: LanguageModel, tmp_path: Path) -> None:
    """Every node's chance is what training's columns give its token: the same depths, norm, tokens and ids."""
    kind, part, fields, options = READS[shape]
    drafter = kind(kind.Config(head=untrained(part, model, tmp_path, **fields), **options), model)
    head, propose, asked = part.load(tmp_path), drafter.propose, list[tuple[list[int], Any]]()

    def listening(contexts: Sequence[Any], budgets: Sequence[Any]) -> Any:
        drafts = propose(contexts, budgets)
        asked.extend((list(each.tokens), draft) for each, draft in zip(contexts, drafts, strict=True))
        return drafts

    drafter.propose = listening
    llm = with_config({"method": drafter, "num_speculative_tokens": 5}, target=model)
    run(llm, [tokens_of(seed, 6 + 5 * seed, 100) for seed in range(2)], 16)
    depths = (FINAL,) if head.config.taps.final else head.config.taps.of(model.num_layers)
    library = load_as_is(model.source, device="cpu").model
    frozen = FrozenTarget(library, [each for each in depths if each != FINAL])
    table, rows_VW = library.get_input_embeddings().weight, library.get_output_embeddings().weight
    rows = rows_VW if head.ids_K is None else rows_VW[head.ids_K]
    nodes = 0
    for tokens, draft in asked[::3]:
        for node in range(len(draft)):
            path, place = [], node
            while place != ROOT:
                path.insert(0, draft.tree.tokens[place])
                place = draft.tree.parents[place]
            text_1T = torch.tensor([tokens + path])
            states = frozen.states(text_1T)
            states_SF = torch.cat([states[each] for each in depths], dim=-1)[0, : len(tokens) - 1]
            with torch.inference_mode():
                q_K = (head(states_SF, text_1T[0, 1:-1], table)[-1] @ rows.T).softmax(-1)
            ids = range(len(q_K)) if head.ids_K is None else head.ids_K.tolist()
            assert draft.confidence[node] == pytest.approx(float(q_K[ids.index(path[-1])]), rel=1e-3, abs=2e-6)
            nodes += 1
    assert nodes > 30


@pytest.mark.parametrize("shape", SHAPES)
def test_long_prompts_are_read_while_they_come(shape: str, model: LanguageModel, monkeypatch: Any) -> None:
    """The same drafts whether a prompt's states wait for the first draft or are read piece by piece."""
    found = []
    for rows in (10_000, 16):
        monkeypatch.setattr(module, "_PENDING_ROWS", rows)
        monkeypatch.setattr(remote_head, "_WAITING_ROWS", rows)
        monkeypatch.setattr(remote_head, "EAGER_ROWS", rows)
        drafter = drafter_of(model, shape)
        llm = with_config(
            {"method": drafter, "num_speculative_tokens": 4}, target=model, max_num_seqs=2, max_rows_per_step=24
        )
        outputs = run(llm, [tokens_of(1, 90, 100), tokens_of(2, 41, 100)], 12)
        found.append([(each.token_ids, each.metrics.num_steps, each.metrics.num_draft_tokens) for each in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_request_drafts_alike_alone_and_in_company(shape: str, model: LanguageModel) -> None:
    """Seeded, at temperature 1: tokens depend on the drafts, and other requests must not change these."""
    if model.native_decoder is None:
        pytest.skip("the library's products round by their number of rows")
    prompts = [tokens_of(seed, 8 + seed, 100) for seed in range(4)]
    config = {"num_speculative_tokens": 4}
    together = run(with_config({"method": drafter_of(model, shape), **config}, target=model), prompts, 16, 1.0)
    alone = with_config({"method": drafter_of(model, shape), **config}, target=model)
    for prompt, output in zip(prompts, together, strict=True):
        assert run(alone, [prompt], 16, 1.0)[0].token_ids == output.token_ids


def test_two_calls_for_one_root_propose_the_same(model: LanguageModel) -> None:
    """A neighbour's fault makes the engine ask again: the last pair is taken back and read once more."""
    drafter = drafter_of(model, "chain")
    propose, answers = drafter.propose, []

    def twice(contexts: Sequence[Any], budgets: Sequence[Any]) -> Any:
        first, second = propose(contexts, budgets), propose(contexts, budgets)
        answers.append(([each.tree.tokens for each in first], [each.tree.tokens for each in second]))
        return second

    drafter.propose = twice
    llm = with_config({"method": drafter, "num_speculative_tokens": 4}, target=model)
    (output,) = run(llm, [tokens_of(1, 9, 100)], 20)
    assert output.error is None
    assert all(first == second for first, second in answers)
    assert any(first[0] for first, _ in answers)
    plain = drafter_of(model, "chain")
    (other,) = run(
        with_config({"method": plain, "num_speculative_tokens": 4}, target=model), [tokens_of(1, 9, 100)], 20
    )
    assert (other.token_ids, other.metrics.num_steps) == (output.token_ids, output.metrics.num_steps)
