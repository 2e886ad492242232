"""Answers with a draft that is read twice: the layout, what counts, where the wrong tokens come from."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from foretoken.core.errors import ConfigError
from foretoken.data import documents as doc
from foretoken.data.reflection import BACK, INSTRUCTION, PREFIX
from foretoken.models.load import load_tokenizer
from foretoken_lab.recipes import find
from foretoken_lab.recipes import reflections as module
from foretoken_lab.recipes.objectives import AnswersFirst
from foretoken_lab.recipes.reflections import LONGEST, Counted, Reflections, reflections
from helpers.threads import one_thread  # noqa: F401  (a fixture)

TASKS = ("arithmetic", "profiles", "json", "code")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("zoo:draft")


@pytest.fixture
def made(tokenizer, monkeypatch):
    """Reflections whose draft model always says the same two words."""
    word = tokenizer.encode(" marbles", add_special_tokens=False)[0]

    class Drafting:
        def __init__(self, name, **options):
            self.tokenizer = tokenizer

        def generate(self, prompts, params):
            return [SimpleNamespace(token_ids=[word] * each.max_tokens) for each in params]

    monkeypatch.setattr(module, "LLM", Drafting)
    return Reflections(tokenizer, "zoo:draft")


def taken_apart(ids, tokenizer):
    """Committed tokens, draft, prompt, prefix and copy of what was laid out."""
    size = len(tokenizer)
    first = next(place for place, each in enumerate(ids) if each >= size)
    last = max(place for place, each in enumerate(ids) if each >= size)
    assert all(each >= size for each in ids[first : last + 1])  # in one piece
    middle, copy = [each - size for each in ids[first : last + 1]], ids[last + 1 :]
    for text in (BACK, INSTRUCTION):
        prompt = tokenizer.encode(text, add_special_tokens=False)
        at = len(copy)  # a draft has as many tokens as its copy
        if middle[at : at + len(prompt)] == prompt:
            return ids[:first], middle[:at], text, middle[at + len(prompt) :], copy
    raise AssertionError("no prompt to reflect after the draft")


@pytest.mark.parametrize("task", TASKS)
def test_the_layout_is_that_of_a_verification_and_the_copy_is_right(task, made, tokenizer):
    documents = list(islice(reflections(task, 1.0).documents(), 60))
    prompts, wrong = set(), 0
    for document, ids in zip(documents, made.encode(documents), strict=True):
        committed, draft, prompt, prefix, copy = taken_apart(ids, tokenizer)
        [right] = tokenizer([document[1:]], add_special_tokens=False)["input_ids"]
        assert right[: len(committed) + len(copy)] == [*committed, *copy]
        assert 1 <= len(draft) == len(copy) <= LONGEST
        assert committed[-len(prefix) :] == prefix
        answer = len(tokenizer.encode(document[1 : document.index("<|assistant|>")], add_special_tokens=False)) + 2
        assert len(prefix) == min(PREFIX, max(1, len(committed) - answer))  # of the answer, or what stands before it
        prompts.add(prompt)
        wrong += draft != copy
    assert prompts == {BACK, INSTRUCTION}
    assert 15 < wrong < 55  # about two thirds


def test_planted_tokens_are_of_the_right_kind_and_the_draft_model_continues(made, tokenizer, monkeypatch):
    monkeypatch.setattr(module, "KINDS", ("planted",))
    documents = list(islice(reflections("arithmetic", 1.0).documents(), 80))
    digits = operators = words = 0
    marbles = tokenizer.encode(" marbles", add_special_tokens=False)[0]
    for ids in made.encode(documents):
        _, draft, _, _, copy = taken_apart(ids, tokenizer)
        place = next((k for k, (a, b) in enumerate(zip(draft, copy, strict=True)) if a != b), None)
        if place is None:
            continue
        ours, theirs = (tokenizer.decode([each[place]]) for each in (draft, copy))
        digits += ours.strip().isdigit() and theirs.strip().isdigit()
        operators += ours.strip() in tuple("+-*/") and theirs.strip() in tuple("+-*/")
        words += ours.strip().isalpha() and theirs.strip().isalpha() and ours[0] == theirs[0] == " "
        assert all(each == marbles for each in draft[place + 1 :])
    assert min(digits, operators, words) > 0


def test_the_same_document_gives_the_same_ids_in_any_company_and_others_are_left_alone(made, tokenizer):
    documents = list(islice(reflections("json", 1.0).documents(), 8))
    plain = doc.exchange("Say 5.", "5")
    together = made.encode([plain, *documents])
    assert together[1:] == [made.encode([each])[0] for each in documents]
    assert together[0] == tokenizer([plain], add_special_tokens=False)["input_ids"][0]
    assert max(map(max, together)) < made.num_ids


def test_a_draft_model_or_a_tokenizer_that_does_not_fit_is_refused(made, tokenizer, monkeypatch):
    class Other:
        def get_vocab(self):
            return {"a": 0}

    monkeypatch.setattr(module, "LLM", lambda name, **options: SimpleNamespace(tokenizer=Other()))
    with pytest.raises(ConfigError, match="another vocabulary"):
        Reflections(tokenizer, "x").encode(list(islice(reflections("code", 1.0).documents(), 20)))
    with pytest.raises(ConfigError, match="need the chat format"):
        Reflections(Bare(tokenizer), "x")


class Bare:
    """A tokenizer without the zoo's markers."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __len__(self):
        return len(self._tokenizer)

    def get_vocab(self):
        return {"a": 0}

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


def test_what_does_not_count_has_no_weight_and_no_gradient():
    size, begins = 10, 1
    objective = Counted(AnswersFirst([], []), size, begins)
    tokens = torch.tensor([[1, 2, 3, 14, 15, 6, 1, 2]])
    weights = objective.weights(tokens, torch.Generator())
    assert weights.tolist()[0] == pytest.approx([0, 0.25, 0.25, 0, 0, 0.25, 0, 0.25])
    assert objective.weights(torch.tensor([[1, 12, 13]]), torch.Generator()).sum() == 0

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = SimpleNamespace()
            self.logits = torch.nn.Parameter(torch.zeros(1, 8, size))

        def forward(self, input_ids, use_cache):
            assert input_ids.max() < size  # the model never sees which ones count
            return SimpleNamespace(logits=self.logits)

    model = Model()
    loss = objective(model, tokens, torch.Generator())
    assert loss.item() == pytest.approx(2.302585, abs=1e-5)
    loss.backward()
    rows = [place for place in range(8) if model.logits.grad[0, place].abs().sum() > 0]
    assert rows == [0, 1, 4, 6]  # each predicts the next


def test_the_recipe_reads_half_reflections_and_keeps_the_mixture(tmp_path, monkeypatch):
    monkeypatch.setattr("foretoken_lab.recipes.sources.corpus_files", lambda name, root: [tmp_path / name])
    sources = find("base-reflect").sources(tmp_path)
    reflected = [source for source in sources if source.name.startswith("reflect_")]
    assert sum(source.share for source in reflected) == pytest.approx(0.5)
    assert sum(source.share for source in sources) == pytest.approx(1.0)
    assert len({source.name for source in sources}) == len(sources)
