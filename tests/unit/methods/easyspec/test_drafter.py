"""EasySpec: one definition of a group, no fuzzy row outlives its draft, and N = 1 is the ordinary drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.certify.recipe_law import text_law
from foretoken.core.draft import Draft, Sampled
from foretoken.core.errors import ConfigError, UnsupportedArchitecture
from foretoken.core.protocols import Budget, Context
from foretoken.drafters.draft_model import ModelDrafter
from foretoken.drafting.draft_runner import RunnerBuilder
from foretoken.engine.llm import LLM
from foretoken.forward import anatomy
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.methods.easyspec.drafter import EasySpecDrafter
from foretoken.models import fuzzy
from foretoken.models.fuzzy import groups_of
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers import delays as delays_at
from helpers.adapters import shelf
from helpers.requests import make_request
from helpers.threads import one_thread
from helpers.tiny_models import VOCAB_SIZE, save_model
from helpers.zoo_llms import ids, with_config

__all__ = ["one_thread"]

LAYERS = 7
TEXT = [5, 9, 14, 23, 41, 7, 88, 3, 33, 77, 15, 16]
TEXTS = [{"prompt_token_ids": TEXT}, {"prompt_token_ids": [40, 6]}, {"prompt_token_ids": TEXT[3:9]}]


@cache
def model(seed: int = 1, kind: str = "llama") -> LanguageModel:
    """The target (0) and the draft (1): far apart, so that drafts are refused, too."""
    name = shelf() / f"easyspec-{kind}-{seed}"
    return load(save_model(kind, name, seed=seed, num_hidden_layers=LAYERS), device="cpu")


def recipe(method: str = "easyspec", **options: Any) -> LLM:
    config = {"method": method, "model": str(model().source), "tree": "chain", **options}
    return with_config(config, target=model(0))


def drafter(**options: Any) -> EasySpecDrafter:
    found = recipe(**options).recipe.drafter
    assert isinstance(found, EasySpecDrafter)
    return found


@pytest.mark.parametrize(
    ("layers", "size", "sizes"),
    [
        (32, 4, [1, 3, 4, 4, 4, 4, 4, 4, 3, 1]),  # the paper's example
        (16, 4, [1, 3, 4, 4, 3, 1]),
        (7, 3, [1, 2, 3, 1]),
        (7, 1, [1] * 7),
        (7, 9, [1, 5, 1]),
        (2, 4, [1, 1]),
        (1, 4, [1]),
    ],
)
def test_groups_cover_each_layer_once_and_leave_the_ends_alone(layers: int, size: int, sizes: list[int]) -> None:
    groups = groups_of(layers, size)
    assert [number for group in groups for number in group] == list(range(layers))
    assert [len(group) for group in groups] == sizes


def logits(groups: Sequence[range] | None, tokens: Sequence[int] = TEXT) -> Tensor:
    """Of all rows by the library's layers, read from the first token on."""
    cache_of = model().new_cache(1)
    slot = cache_of.acquire()
    cache_of.reserve(slot, len(tokens))
    batch = PackedBatch()
    batch.add_chunk(slot, 0, list(tokens), wanted=len(tokens))
    plan = DensePlan(cache_of, batch)
    plan.native = None
    if groups is None:
        return model().forward(batch, plan).logits_MV.clone()
    with fuzzy.fuzzy(anatomy.find(model().model), tuple(groups)):
        return model().forward(batch, plan).logits_MV.clone()


def by_hand(groups: Sequence[range], *, mlps_see_all: bool = False) -> Tensor:
    """The paper's Algorithm 2 over whole sequences, with the library's own attention and nothing of ours."""
    lm: Any = model().model
    ids_1T = torch.tensor([TEXT])
    body = lm.model
    positions_1T = torch.arange(len(TEXT))[None]
    with torch.inference_mode():
        h = body.embed_tokens(ids_1T)
        rotary = body.rotary_emb(h, positions_1T)
        mask = torch.full((1, 1, len(TEXT), len(TEXT)), -torch.inf).triu(1)
        for group in groups:
            layers = [body.layers[number] for number in group]
            attended = []
            for layer in layers:
                implementation, layer.self_attn.config._attn_implementation = (
                    layer.self_attn.config._attn_implementation,
                    "eager",
                )
                attended.append(
                    layer.self_attn(layer.input_layernorm(h), position_embeddings=rotary, attention_mask=mask)[0]
                )
                layer.self_attn.config._attn_implementation = implementation
            if mlps_see_all:
                h = h + sum(attended)
            for layer, each in zip(layers, attended, strict=True):
                h = h if mlps_see_all else h + each
                h = h + layer.mlp(layer.post_attention_layernorm(h))
        return lm.lm_head(body.norm(h))[0]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_group_computes_the_algorithm(size: int) -> None:
    groups = groups_of(LAYERS, size)
    torch.testing.assert_close(logits(groups), by_hand(groups), rtol=1e-4, atol=1e-4)
    if size > 1:
        assert (logits(groups) - logits(None)).abs().max() > 0.1  # fuzzy it is
        # an MLP reads the attentions up to its own layer's, and not those after it
        assert (logits(groups) - by_hand(groups, mlps_see_all=True)).abs().max() > 0.1


def test_groups_of_one_are_the_model() -> None:
    torch.testing.assert_close(logits(groups_of(LAYERS, 1)), logits(None), rtol=0, atol=0)


def told(method: ModelDrafter, texts: Sequence[Sequence[int]]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Proposals for growing texts, one after the other, as one request."""
    asked = make_request(texts[0], vocab_size=VOCAB_SIZE, max_tokens=100)
    found = []
    for text in texts:
        asked.tokens[:] = text
        (draft,) = method.propose([asked], [Budget(4, 4)])
        found.append((draft.tree.tokens, draft.confidence))
    return found


def test_n_1_is_the_ordinary_drafter_bit_for_bit() -> None:
    ordinary = recipe("draft_model").recipe.drafter
    assert isinstance(ordinary, ModelDrafter)
    texts = [TEXT[:4], TEXT[:5], TEXT[:9], TEXT]
    assert told(drafter(parallel=1), texts) == told(ordinary, texts)
    assert told(drafter(parallel=4), texts) != told(ordinary, texts)


class Compared(EasySpecDrafter):
    """Notes where committed rows differ from those of a fresh reading of their tokens, every layer in its order."""

    differing = 0
    checked = 0

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]):
        found = super().propose(contexts, budgets)
        for context in contexts:
            state = self._states.get(context.request_id)
            if state is None:
                continue
            num_rows = len(state.tokens)
            fresh = self.model.new_cache(1)
            slot = fresh.acquire()
            batch = PackedBatch()
            fresh.reserve(slot, num_rows)
            batch.add_chunk(slot, 0, state.tokens, wanted=1)
            self.model.forward(batch, DensePlan(fresh, batch))
            self.checked += 1
            self.differing += not all(
                torch.allclose(mine[state.slot, :, :num_rows], theirs[slot, :, :num_rows], rtol=1e-4, atol=1e-4)
                for mine, theirs in zip(self.cache.keys, fresh.keys, strict=True)
                if mine is not None and theirs is not None
            )
        return found


@pytest.mark.parametrize("calibrate", [True, False])
def test_the_committed_rows_are_exact_with_calibration_only(calibrate: bool) -> None:
    """Without it the text is right all the same: this test and the acceptance see it alone."""
    config = Compared.Config(model=str(model(0).source), tree="chain", parallel=3, calibrate=calibrate)
    method = Compared(config, model(0))  # the target's own weights: only fuzziness costs acceptance
    llm = with_config({"method": method, "num_speculative_tokens": 3}, target=model(0))
    outputs = llm.generate(TEXTS, SamplingParams(max_tokens=30, ignore_eos=True))
    assert sum(out.metrics.num_accepted_tokens for out in outputs) > 0
    assert method.checked > 20
    assert (method.differing == 0) is calibrate


@pytest.mark.covering(1)
@pytest.mark.parametrize("executor", ["serial", "pearl"])
@pytest.mark.parametrize("tree", ["chain", "coupled", "topk"])
def test_the_text_is_that_of_plain_decoding(tree: str, executor: str) -> None:
    if tree == "topk" and executor == "pearl":
        with pytest.raises(ConfigError, match="set to propose trees"):
            recipe(tree=tree, executor=executor)
        return
    for params in (
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True),
    ):
        expected = ids(with_config(None, target=model(0)).generate(TEXTS, params))
        llm = recipe(tree=tree, verifier="match" if params.seed else "auto", parallel=3, executor=executor)
        assert ids(llm.generate(TEXTS, params)) == expected


@pytest.mark.parametrize("tree", ["chain", "coupled"])
def test_fuzzy_drafts_that_are_handed_over_late_change_nothing(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted ahead next to the target; calibration then reads pending tokens, and rejected ones are read again."""
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True)
    expected = ids(with_config(None, target=model(0)).generate(TEXTS, params))
    llm = recipe(tree=tree, verifier="match", parallel=3, executor="pearl")
    delays = delays_at.at_every_hand_over(monkeypatch, 2)
    assert ids(llm.generate(TEXTS, params)) == expected
    assert delays[0] > 10
    llm.close()


def test_groups_are_reported() -> None:
    assert drafter(parallel=3).explanation == "4 phases of attention for 7 layers: [0] [1-2] [3-5] [6]"
    assert drafter(groups=[2, 5]).explanation == "2 phases of attention for 7 layers: [0-1] [2-6]"
    bundled = with_config({"method": "easyspec", "model": "zoo:draft"}).recipe.drafter
    assert bundled.explanation == "2 layers, none of them grouped: drafts as draft_model does"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": 0}, "parallel=0 must be an integer"),
        ({"parallel": True}, "parallel=True must be"),
        ({"groups": [1, 3]}, r"groups=\[1, 3\] add up to 4.*7 layers"),
        ({"groups": "1,3,3"}, "groups='1,3,3' must be sizes"),
        ({"groups": [7, 0]}, r"groups=\[7, 0\] must be sizes"),
        ({"groups": []}, r"groups=\[\] must be sizes"),
        ({"calibrate": 1}, "calibrate=1 must be true or false"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**options)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("olmo2", "its layers have"),
        ("qwen2_window", "not alike"),
        ("granite", "do more than add"),
        ("gpt2", "its layers have"),
    ],
)
def test_layers_of_another_build_are_refused_in_words(kind: str, message: str) -> None:
    scaled = {"residual_multiplier": 0.5} if kind == "granite" else {}
    odd = save_model(kind, shelf() / f"easyspec-odd-{kind}", seed=3, **scaled)
    with pytest.raises(UnsupportedArchitecture, match=rf"{message}.*use parallel=1"):
        recipe(model=str(odd), groups=[1, 2])
    assert recipe(model=str(odd), parallel=1).recipe.drafter.name == "easyspec"


def test_the_model_is_left_as_it_was() -> None:
    expected = logits(None)
    parts = anatomy.find(model().model)
    with pytest.raises(RuntimeError, match="planted"), fuzzy.fuzzy(parts, groups_of(LAYERS, 3)):
        raise RuntimeError("planted")
    assert torch.equal(logits(None), expected)


class Recomputed(EasySpecDrafter):
    """Planted: drawn by the fuzzy groups, and declared with the distribution of the layers in their order."""

    def _finish(self, draft: RunnerBuilder) -> Draft:
        found = super()._finish(draft)
        tokens = [*draft.context.tokens, *found.tree.tokens]
        cache_of = self.model.new_cache(1)
        slot = cache_of.acquire()
        cache_of.reserve(slot, len(tokens))
        batch = PackedBatch()
        batch.add_chunk(slot, 0, tokens, wanted=len(found) + 1)
        raw_MV = self.model.forward(batch, DensePlan(cache_of, batch)).logits_MV[:-1]
        nodes = range(-1, len(found) - 1)
        q_KV = torch.softmax(draft.context.laws.process(raw_MV, found.tree, nodes), dim=-1)
        return replace(found, law=Sampled(q_KV, tuple(range(len(found))))) if len(found) else found


@pytest.mark.parametrize("planted", [False, True])
def test_a_draft_declares_the_fuzzy_distribution_that_it_was_drawn_from(planted: bool) -> None:
    """Every draw enumerated: with the distribution of the exact layers in its place the texts have another
    distribution.
    """
    made = Recomputed if planted else EasySpecDrafter
    method = made(made.Config(model=str(model().source), tree="chain", parallel=3), model(0))
    llm = with_config({"method": method, "num_speculative_tokens": "auto"}, target=model(0))
    found = text_law(llm, TEXT[:2], [20, 57], length=4, num_nodes=3)
    plain = text_law(with_config(None, target=model(0)), TEXT[:2], [20, 57], length=4, num_nodes=0)
    distance = found.distance(plain)
    assert distance > 1e-4 if planted else distance <= 1e-12
