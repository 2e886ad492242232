"""Drafts of a model with another tokenizer: texts in its tokens, its drafts in the target's, and the target's text."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.core.draft import PointMass, Sampled
from foretoken.core.errors import ConfigError, MismatchError
from foretoken.core.protocols import Budget
from foretoken.drafters.draft_model import ModelDrafter
from foretoken.drafting.other_vocabulary import OtherVocabulary
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load, load_as_is
from helpers.requests import make_request

TARGET, DRAFT = "zoo:smollm2-135m", "zoo:draft"
TEXTS = (
    "Tom has 12 marbles. He buys 30 more.\n\n  How many marbles does he have now?",
    "def f(x):\n\treturn {'naïve': x ** 2, \"日本語\": '🙂 é'}  # 漢字\n",
    "unbelievably  hydroelectric\u00a0antidisestablishmentarianism e\u0301 ok",
)
PROMPTS = ["The capital of France is", "Tom has 12 marbles. He buys 30 more. How many marbles"]


@cache
def target() -> LanguageModel:
    return load(TARGET, device="cpu")


@cache
def draft_model() -> LanguageModel:
    return load(DRAFT, device="cpu")


@cache
def pair() -> OtherVocabulary:
    return OtherVocabulary(target(), draft_model())


def drafted_text(ids: list[int]) -> str:
    return draft_model().tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_shared_tokens_have_equal_bytes() -> None:
    other, draft = pair(), draft_model().tokenizer
    ids = other.columns.ids_C.tolist()
    assert len(set(ids)) == len(ids) == len(set(other.draft_C.tolist())) > 5000
    special = {*target().tokenizer.all_special_ids}
    for token, own in zip(ids, other.draft_C.tolist(), strict=True):
        if token not in special:
            assert target().tokenizer.convert_ids_to_tokens(token) == draft.convert_ids_to_tokens(own)
    assert other.draft_token(target().tokenizer.eos_token_id) == draft.eos_token_id


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_given_in_pieces_is_the_text_given_at_once(text: str) -> None:
    """In the draft's tokens, which keep every byte; splits within characters wait."""
    other, rng = pair(), random.Random(7)
    canonical = target().tokenizer.encode(text, add_special_tokens=False)
    single = [token for word in text for token in target().tokenizer.encode(word, add_special_tokens=False)]
    for number, tokens in enumerate((canonical, single)):
        whole = other.text_of(100 + number, tokens)
        assert drafted_text(whole) == text
        end = 0
        while end < len(tokens):
            end = min(len(tokens), end + rng.randint(1, 3))
            found = other.text_of(200 + number, tokens[:end])
            assert not found or text.startswith(drafted_text(found))
        assert drafted_text(found) == text
        assert sum(a != b for a, b in zip(found, whole, strict=False)) <= len(whole) // 5
        shorter = other.text_of(200 + number, tokens[: len(tokens) // 2])
        assert shorter == other.text_of(300 + number, tokens[: len(tokens) // 2])


@pytest.mark.parametrize("text", TEXTS)
def test_a_drafted_text_is_spelled_as_the_target_splits_it(text: str) -> None:
    """Where the draft drafts the very text, the target's own tokens are proposed."""
    other, tokenizer = pair(), target().tokenizer
    tokens = tokenizer.encode(text, add_special_tokens=False)
    draft = draft_model().tokenizer
    for cut in range(0, len(tokens), 2):
        before = tokenizer.decode(tokens[:cut], clean_up_tokenization_spaces=False)
        if "\ufffd" in before or not text.startswith(before):
            continue
        rest = text[len(before) :]
        own = draft.encode(rest, add_special_tokens=False)
        found = other.spelled(tokens[:cut], own)
        assert [token for token, _ in found] == tokens[cut:]
        assert [count for _, count in found] == sorted(count for _, count in found)
        assert found[-1][1] <= len(own)
    ended = other.spelled(tokens, [*draft.encode(" and", add_special_tokens=False), draft.eos_token_id])
    assert [token for token, _ in ended] == [*tokenizer.encode(" and"), tokenizer.eos_token_id]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(TARGET, device="cpu", dtype="float32", speculative_config=None)


@pytest.mark.parametrize(
    "options", [{}, {"vocabulary": "shared"}, {"vocabulary": "text"}, {"tree": "topk"}, {"tree": "coupled"}], ids=str
)
def test_the_greedy_text_is_the_target_s(options: dict[str, str], plain: LLM) -> None:
    params = SamplingParams(max_tokens=10, temperature=0)
    expected = plain.generate(PROMPTS, params)
    llm = plain.with_method({"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 4, **options})
    found = llm.generate(PROMPTS, params)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert sum(each.metrics.num_accepted_tokens for each in found) > 0
    assert "has another vocabulary" in llm.recipe.drafter.explanation


def test_a_seeded_text_is_kept_by_match(plain: LLM) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=5)
    config = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3, "verifier": "match"}
    expected = [
        each.token_ids for each in plain.with_method({"method": "none", "verifier": "match"}).generate(PROMPTS, params)
    ]
    for options in ({"tree": "coupled"}, {"vocabulary": "text"}):
        found = plain.with_method({**config, **options}).generate(PROMPTS, params)
        assert [each.token_ids for each in found] == expected


def test_a_draft_carries_the_distribution_of_its_tokens() -> None:
    """Shared: the draft's own, on shared tokens, normalised. Text: a point mass."""
    tokens = target().tokenizer.encode(PROMPTS[1], add_special_tokens=False)
    asked = make_request(tokens, vocab_size=target().vocab_size, max_tokens=50, temperature=1.0)
    (draft,) = ModelDrafter(ModelDrafter.Config(model=DRAFT, tree="chain"), target()).propose([asked], [Budget(3, 3)])
    assert isinstance(draft.law, Sampled)
    text = pair().text_of(900, tokens)
    ours = dict(zip(pair().columns.ids_C.tolist(), pair().draft_C.tolist(), strict=True))
    library = load_as_is(DRAFT, device="cpu").model
    for node, token in enumerate(draft.tree.tokens):
        own = [*text, *(ours[each] for each in draft.tree.tokens[:node])]
        with torch.inference_mode():
            logits_V = library(torch.tensor([own])).logits[0, -1].float()
        q_C = logits_V[pair().draft_C].softmax(-1)
        assert float((draft.law.q_KV[node] - q_C).abs().sum()) < 0.02  # bfloat16
        assert float(draft.law.q_KV[node].sum()) == pytest.approx(1, abs=1e-5)
        assert token in ours
    (point,) = ModelDrafter(ModelDrafter.Config(model=DRAFT, vocabulary="text"), target()).propose(
        [asked], [Budget(3, 3)]
    )
    assert isinstance(point.law, PointMass)
    assert draft_model().vocab_size < target().vocab_size


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(MismatchError, match="has another vocabulary than"):
        ModelDrafter(ModelDrafter.Config(model=DRAFT, vocabulary="same"), target())
    with pytest.raises(ConfigError, match="vocabulary='text' with tree='topk'"):
        ModelDrafter(ModelDrafter.Config(model=DRAFT, vocabulary="text", tree="topk"), target())
