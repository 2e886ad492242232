"""What a model says itself, stored as it is made, read again, and never about held-out documents."""

from __future__ import annotations

import itertools
import json
import random
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from foretoken import zoo
from foretoken.core.errors import InputError
from foretoken.data import documents as doc
from foretoken.train import outputs as module
from foretoken.train.mixture import Source, is_held_out
from foretoken.train.outputs import Outputs, opening
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model

DOCUMENTS = [doc.exchange(f"Tom has {n} marbles. He buys {n + 3} more. How many?", str(2 * n + 3)) for n in range(300)]
DRAFT = str(zoo.path("draft"))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(module, "BATCH", 4)
    monkeypatch.setattr(module, "LENGTH", 8)


class Asked:
    """Returns the model to load, and counts the calls."""

    def __init__(self, name=DRAFT):
        self.name, self.count = name, 0

    def __call__(self):
        self.count += 1
        return self.name


def source(documents=DOCUMENTS, name="a"):
    return Source(name, 1.0, lambda: iter(documents))


def read(store, count, model=None, seed=0, sources=None, **options):
    outputs = Outputs(model or Asked(), sources or [source()], store, seed, **options)
    return list(itertools.islice(outputs.source("own", 1.0).documents(), count))


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """Eight documents of an uninterrupted run."""
    store = tmp_path_factory.mktemp("whole") / "own.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCH", 4)
        patch.setattr(module, "LENGTH", 8)
        documents = read(store, 8)
    return store, documents


def test_documents_are_the_model_s_own_continuations(eight):
    store, documents = eight
    assert [json.loads(line)["document"] for line in store.read_text().splitlines()] == documents
    prompts = {document.split("<|assistant|>\n")[0] for document in DOCUMENTS}
    tokenizer = AutoTokenizer.from_pretrained(DRAFT)
    for document in documents:
        prompt, said = document.split("<|assistant|>\n")
        assert prompt in prompts
        assert said
        assert len(tokenizer(said, add_special_tokens=False)["input_ids"]) <= 10
        assert not said.endswith("<|end|>")  # the turn is closed as in every document
    assert len(set(documents)) == 8


def test_stored_documents_are_read_again_without_the_model(tmp_path, eight):
    store, documents = eight
    copy = tmp_path / "own.jsonl"
    copy.write_bytes(store.read_bytes())
    model = Asked()
    assert read(copy, 8, model) == documents
    assert model.count == 0
    assert read(copy, 9, model)[:8] == documents
    assert model.count == 1


@pytest.mark.parametrize("cut", ["in a line", "at a line's end", "everything"])
def test_a_run_that_was_killed_goes_on_with_the_same_documents(tmp_path, eight, cut):
    store, documents = eight
    whole = store.read_bytes()
    lines = whole.splitlines(keepends=True)
    copy = tmp_path / "own.jsonl"
    copy.write_bytes({"in a line": b"".join(lines[:4]) + lines[4][:-9], "at a line's end": b"".join(lines[:4]),
                      "everything": b""}[cut])  # fmt: skip
    assert read(copy, 8) == documents
    assert copy.read_bytes() == whole


def test_half_are_greedy_and_half_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 64)  # not a divisor of a hundred
    asked = []

    class Silent:
        tokenizer = AutoTokenizer.from_pretrained(DRAFT)

        def __init__(self, *arguments, **options):
            pass

        def generate(self, prompts, params):
            asked.extend(params)
            return [SimpleNamespace(**prompt, token_ids=[], finish_reason="length") for prompt in prompts]

    monkeypatch.setattr(module, "LLM", Silent)
    assert len(read(tmp_path / "own.jsonl", 640)) == len(asked) == 640
    assert {params.temperature for params in asked} == {0.0, 1.0}
    assert 0.45 < sum(params.temperature for params in asked) / 640 < 0.55
    assert len({params.seed for params in asked}) == 640


def test_held_out_documents_are_never_continued(tmp_path):
    outputs = Outputs(Asked(), [source()], tmp_path / "own.jsonl", 0)
    kept = [document for document in DOCUMENTS if is_held_out(document)]
    assert kept
    openings = set(itertools.islice(outputs._openings(), 3 * len(DOCUMENTS)))
    answers = {document[: document.index("<|assistant|>\n")] + "<|assistant|>\n" for document in DOCUMENTS}
    unseen = {document[: document.index("<|assistant|>\n")] + "<|assistant|>\n" for document in kept}
    assert openings == answers - unseen


def test_sources_without_a_document_are_refused(tmp_path):
    [held_out, *_] = [document for document in DOCUMENTS if is_held_out(document)]
    for documents in ([], [held_out]):
        with pytest.raises(InputError, match="corpus 'mine' is empty"):
            read(tmp_path / "own.jsonl", 1, sources=[source(documents, "mine")])


def test_nothing_is_written_for_the_held_out_loss(tmp_path, eight):
    model = Asked()
    made = Outputs(model, [source()], tmp_path / "own.jsonl", 0).source("own", 1.0)
    assert list(made.kept()) == []
    store, documents = eight
    (tmp_path / "own.jsonl").write_bytes(store.read_bytes() + b'{"document": "cut')
    assert list(made.kept()) == documents
    assert model.count == 0


def test_a_model_that_changes_is_loaded_for_every_batch(tmp_path):
    model = Asked()
    read(tmp_path / "a.jsonl", 9, model, renew=True)
    assert model.count == 3
    model = Asked()
    read(tmp_path / "b.jsonl", 9, model)
    assert model.count == 1


def test_a_model_is_prompted_in_its_own_format(tmp_path, monkeypatch):
    folder = save_model("llama", tmp_path / "m", max_position_embeddings=512)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    for document in read(tmp_path / "own.jsonl", 4, Asked(str(folder))):
        assert document.startswith("[user] Tom has ")
        assert "</s>[assistant] " in document
        assert "<|" not in document


def test_openings_end_where_an_answer_begins():
    chat = doc.chat([("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")])
    found = {opening(chat, random.Random(seed)) for seed in range(20)}
    first = "<|bos|><|user|>\na<|end|>\n<|assistant|>\n"
    assert found == {first, f"{first}b<|end|>\n<|user|>\nc<|end|>\n<|assistant|>\n"}
    unasked = doc.chat([("assistant", "Hello"), ("user", "c"), ("assistant", "d")])
    assert {opening(unasked, random.Random(seed)) for seed in range(20)} == {unasked.removesuffix("d<|end|>\n")}


def test_openings_of_a_text_begin_anywhere_and_have_one_marker():
    text = doc.text("".join(f"word{number} " for number in range(400)))
    found = [opening(text, random.Random(seed)) for seed in range(200)]
    for each in found:
        assert each.startswith("<|bos|>")
        assert each.count("|>") == 1
        assert each.removeprefix("<|bos|>") in text
        assert 60 <= len(each.removeprefix("<|bos|>")) <= 600
    assert len({each[:30] for each in found}) > 100
    short = doc.text("Once upon a time")
    assert opening(short, random.Random(0)) == "<|bos|>Once upon a time"


def test_the_seed_decides_the_openings(tmp_path):
    def openings(seed):
        outputs = Outputs(Asked(), [source(), source(DOCUMENTS[100:], "b")], tmp_path / "x.jsonl", seed)
        return list(itertools.islice(outputs._openings(), 20))

    assert openings(0) == openings(0)
    assert openings(0) != openings(1)
