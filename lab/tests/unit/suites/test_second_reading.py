"""What the second reading knows of refused tokens: the rows that it comes from, areas and their intervals, by task."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.tree import TokenTree
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.models.load import load
from foretoken.train.roc import auc
from foretoken_lab.judge.labels import Marked
from foretoken_lab.judge.mining import RANDOM, Mined, Mining, _questions
from foretoken_lab.suites import second_reading as module
from foretoken_lab.suites.second_reading import judgement
from foretoken_lab.tasks import catalog
from foretoken_lab.tasks.catalog import Setting
from foretoken_lab.tasks.question_sets import find_questions
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.zoo_llms import base, prompt_ids, target

PROMPT = "Tom has 12 marbles. He buys 30 more. How many marbles does he have now?"
BACK = " [BACK] "


@pytest.fixture
def mined(monkeypatch):
    """An answer of five tokens, the third a fine stranger; a wrong and a random token hang on the second, too."""
    prompt = prompt_ids(PROMPT)
    tree = TokenTree((300, 310, 320, 330, 340, 999, 998), (-1, 0, 1, 2, 3, 1, 1))
    labels = [None, None, ("arithmetic", True), None, None, ("arithmetic", False), (RANDOM, False)]
    question = Marked(prompt, tree, labels)
    asked = []

    def mine(llm, draft, how):
        asked.append(how)
        return Mined([question], {}, {})

    monkeypatch.setattr(module, "mine", mine)
    return question, asked


def read(tokens):
    """Raw logits of every row of a text, in one piece."""
    cache, batch = target().new_cache(1), PackedBatch()
    slot = cache.acquire()
    cache.reserve(slot, len(tokens))
    batch.add_chunk(slot, 0, tokens, wanted=len(tokens))
    return target().forward(batch, DensePlan(cache, batch)).logits_MV


def test_scores_are_those_of_plain_forwards_over_the_text_the_draft_the_prompt_and_the_prefix(mined, monkeypatch):
    question, asked = mined
    llm, seen, draft = base(), [], []
    scores = module._scores

    def noting(*arguments):
        seen.append((arguments[2], scores(*arguments)))
        draft.append(arguments[3])
        return seen[-1][1]

    monkeypatch.setattr(module, "_scores", noting)
    section = judgement(llm, "zoo:draft", ("arithmetic", "json"), 2, {"back": (BACK, 3)}, (0.5,), 4, lambda what: None)
    assert asked[0].held_out
    (row,) = section.rows  # nothing is known of json
    assert (row["prompt"], row["task"], row["fine"], row["wrong"]) == ("back", "arithmetic", 1, 1)
    assert all(len(each) == 4 for each in draft)
    ids = llm.tokenizer.encode(BACK, add_special_tokens=False)
    for (refused, found), drafted in zip(seen, draft, strict=True):
        context = [*question.prompt, 300, 310]
        assert refused.context == context
        assert drafted[0] == refused.token
        prefix = context[max(len(context) - 3, len(question.prompt)) :]  # of the answer only
        assert prefix == [300, 310]
        logits = read([*context, *drafted, *ids, *prefix])
        z0, zr = logits[len(context) - 1], logits[-1]
        token = refused.token
        assert found["p0"] == pytest.approx(float(z0[token] - z0.max()), abs=1e-2)
        assert found["pr"] == pytest.approx(float(zr[token] - zr.max()), abs=1e-2)
        expected = float(zr.log_softmax(-1)[token] - z0.log_softmax(-1)[token])
        assert found["D"] == pytest.approx(expected, abs=1e-2)
        mixed = 0.5 * z0 + 0.5 * zr
        assert found["mix 0.5"] == pytest.approx(float(mixed[token] - mixed.max()), abs=1e-2)
    by_fine = {each.fine: found for each, found in seen}
    for name in ("p0", "q", "D", "pr", "mix 0.5"):
        assert row[name][0] == float(by_fine[True][name] > by_fine[False][name])


def test_areas_have_intervals_over_questions_and_widen_where_questions_are_few():
    generator = torch.Generator().manual_seed(0)
    fine = torch.arange(200) % 2 == 0
    score = torch.randn(200, generator=generator) + fine.float()
    many = module._with_interval(score, fine, torch.arange(200))
    few = module._with_interval(score, fine, torch.arange(200) // 50)
    assert many[0] == few[0] == auc(score, fine)
    assert many[1] < many[0] < many[2]
    assert 0.05 < many[2] - many[1] < 0.25
    one = module._with_interval(score, fine, torch.zeros(200, dtype=torch.int64))
    assert one[1] == one[2] == one[0]  # one question drawn again is the same
    assert module._with_interval(score, torch.ones(200, dtype=torch.bool), torch.arange(200)) is None


def test_held_out_questions_are_those_of_every_evaluation():
    names = ("code", "json")
    draft, tasks = load("zoo:draft", device="cpu"), [find_questions(name) for name in names]
    how = Mining(tasks=names, count=7, held_out=True)
    asked = [walk.question.prompt for walk in _questions(base(), draft, how, tasks)]
    expected = {name: [each.prompt for each in catalog.find(name).examples(4, Setting())] for name in names}
    assert asked == [expected[names[number % 2]][number // 2] for number in range(7)]
    how = Mining(tasks=names, count=8)
    trained = [walk.question.prompt for walk in _questions(base(), draft, how, tasks)]
    assert not set(asked) & set(trained)
