"""Labels for the judge: a planted task with known important tokens, the target's states by hand, annotations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken.core.errors import ConfigError, ForetokenError, InputError
from foretoken.core.tree import TokenTree
from foretoken.engine.llm import LLM
from foretoken.models.load import load
from foretoken_lab.judge import mining as judge_mining
from foretoken_lab.judge.labels import Marked, read_states
from foretoken_lab.judge.mining import RANDOM, STRANGERS, Mined, Mining, mine
from foretoken_lab.judge.store import Store
from foretoken_lab.judge.triples import read_triples
from foretoken_lab.tasks.question_sets import QuestionSet, checked
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model

# ---------------------------------------------------------------------- a planted task

END = "."
WORDS = ["<pad>", END, "Q", "the", "sum", "total", "minus", "is", "it", "7", "8", "9", "so", "none"]


def target_says(text: tuple[str, ...]) -> list[str]:
    """How the planted target goes on: "sum" and "total" are the same to it, after "minus" it computes otherwise."""
    if text and text[-1] == "so":
        return ["9", END]
    if not text:
        return ["the", "sum", "is", "7", END]
    if len(text) == 1:
        return ["sum", "is", "7", END]
    if len(text) == 2:
        return ["is", "9" if "minus" in text else "7", END]
    if len(text) == 3:
        return ["9" if "minus" in text else "7", END]
    return [END]


class Tokenizer:
    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [WORDS.index(word) for word in text.split()]}

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return " ".join(WORDS[index] for index in ids)


class Target:
    """Stands for an LLM: answers by :func:`target_says`, and records its prompts."""

    tokenizer = Tokenizer()
    is_chat_model = False
    target = SimpleNamespace(
        name="planted", end_ids=frozenset([1]), special_ids=frozenset([0, 1]), max_length=100, vocab_size=len(WORDS)
    )

    def __init__(self, says: Callable[[tuple[str, ...]], list[str]] = target_says) -> None:
        self.says, self.asked = says, list[str]()

    def generate(self, prompts: Any, params: Any) -> list[Any]:
        outputs = []
        for prompt, each in zip(prompts, params, strict=True):
            text = tuple(WORDS[index] for index in prompt["prompt_token_ids"])
            self.asked.append(" ".join(text))
            answer = text[text.index("Q") + 1 :]
            ids = [WORDS.index(word) for word in self.says(answer)[: each.max_tokens]]
            outputs.append(SimpleNamespace(token_ids=ids, error=None if ids else "NaN"))
        return outputs


def plant(
    monkeypatch: pytest.MonkeyPatch,
    picks: Callable[[list[str]], list[str]],
    max_tokens: int = 12,
    prompts: Sequence[str] = ("Q",),
) -> None:
    """A task, and a draft that would say ``picks`` of a text, one more than the text has: "this" or "this|next"."""
    questions = [checked(prompt, "7") for prompt in prompts]
    task = QuestionSet(
        name="planted", max_tokens=max_tokens, training=lambda seed: iter(questions), held_out=lambda count: questions
    )
    monkeypatch.setattr(judge_mining, "find_questions", {"planted": task}.__getitem__)

    class Picks:
        def __init__(self, model: Any, choices: int) -> None: ...

        def of(self, prompt: Sequence[int], text: Sequence[int]) -> list[list[int]]:
            assert WORDS[prompt[-1]] == "Q"
            found = picks([WORDS[index] for index in text])
            assert len(found) == len(text) + 1
            return [[WORDS.index(word) for word in each.split("|")] for each in found]

    monkeypatch.setattr(judge_mining, "_Picks", Picks)


def mined(target: Any = None, count: int = 1, **options: Any) -> Mined:
    draft: Any = SimpleNamespace(max_length=100)
    return mine(target or Target(), draft, Mining(tasks=("planted",), count=count, **options))


def labelled(found: Mined) -> list[tuple[str, str, bool | None]]:
    """Each token with the text before it."""
    (question,) = found.questions
    tree, words = question.tree, [WORDS[token] for token in question.tree.tokens]
    texts: list[str] = []
    for node, parent in enumerate(tree.parents):
        texts.append(f"{texts[parent]} {words[node]}" if parent >= 0 else words[node])
    found = []
    for text, label in zip(texts, question.labels, strict=True):
        if label is None or label[0] != RANDOM:
            found.append((text.rpartition(" ")[0], text.split()[-1], label and label[1]))
    return found


def test_what_changes_the_answer_is_bad_and_what_does_not_stays_in_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def picks(text: list[str]) -> list[str]:
        wanted = ["the", "total", "is", "8", "so"]
        return [*wanted[: len(text)], "so"]

    plant(monkeypatch, picks)
    target = Target()
    found = mined(target)
    assert target.asked == ["Q", "Q the total", "Q the total is 8", "Q the total is 7 so"]
    assert labelled(found) == [
        ("", "the", True),
        ("the", "total", True),  # tried and fine: the rest follows it
        ("the total", "is", True),
        ("the total is", "7", True),
        ("the total is", "8", False),  # another answer
        ("the total is 7", "so", False),  # where the target ends
    ]
    assert (found.used, found.right) == ({"planted": 1}, {"planted": 1})


def test_a_draft_s_next_choices_are_tried_and_do_not_stay_in_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda text: ["the", "sum|total|minus", "it|is", "7", END][: len(text) + 1])
    target = Target()
    found = mined(target)
    assert target.asked == ["Q", "Q the total", "Q the minus", "Q the sum it"]
    assert labelled(found) == [
        ("", "the", True),
        ("the", "sum", True),
        ("the sum", "it", True),  # the favourite: the text has it now
        ("the sum it", "7", True),
        ("the", "total", True),  # as fine, next to the text
        ("the", "minus", False),
    ]


@pytest.mark.parametrize(("more", "fine"), [(2, True), (3, False)])
def test_what_takes_half_as_many_tokens_again_is_not_fine(
    monkeypatch: pytest.MonkeyPatch, more: int, fine: bool
) -> None:
    """The target's own answer has four; after "total" it says "it" so often before it goes on."""
    plant(monkeypatch, lambda text: [*["the", "total", *["it"] * 9][: len(text)], END], max_tokens=30)
    rest = [*["it"] * more, "is", "7", END]
    target = Target(lambda text: rest if text[-1:] == ("total",) else target_says(text))
    assert ("the", "total", fine) in labelled(mined(target))


def test_a_token_that_only_later_turns_the_answer_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda text: ["the", "minus", "is", "7", ".", "."][: len(text) + 1])
    found = labelled(mined())
    assert ("the", "minus", False) in found
    assert [each for each in found if each[2] is False] == [("the", "minus", False)]


def test_special_tokens_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda text: [END, "<pad>", END, "<pad>", END][: len(text) + 1])
    target = Target()
    found = labelled(mined(target))
    assert target.asked == ["Q"]
    assert [word for _, word, _ in found] == ["the", "sum", "is", "7"]


def test_questions_that_are_answered_wrongly_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted target answers 9 to a question with the answer 7, or without a number: nothing is tried."""
    plant(monkeypatch, lambda text: ["it", "9", "7"][: len(text) + 1] + ["<pad>"] * max(0, len(text) - 2))
    for said in ("9", "none"):
        target = Target(lambda text, said=said: [*("the", said)[len(text) :], END])
        found = mined(target)
        assert target.asked == ["Q"]
        assert (found.questions, found.used, found.right) == ([], {"planted": 1}, {"planted": 0})


def test_answers_without_space_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda text: ["the", "sum", "is", "8", "9"][: len(text) + 1], max_tokens=4)
    target = Target()
    found = labelled(mined(target))
    assert target.asked == ["Q"]  # the fourth token is the last there is: nothing could follow an 8 in its place
    assert [word for _, word, _ in found] == ["the", "sum", "is"]


def test_random_tokens_are_added_to_the_answer_as_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [f"{'so ' * number}Q" for number in range(20)]
    plant(monkeypatch, lambda text: ["the", "total", "is", "7", END][: len(text) + 1], prompts=prompts)
    questions = mined(count=20).questions
    drawn = []
    for question in questions:
        kept = [WORDS[token] for token in question.tree.tokens[:4]]
        assert kept == ["the", "total", "is", "7"]
        strangers = [node for node, label in enumerate(question.labels) if label == (RANDOM, False)]
        assert len(strangers) <= STRANGERS
        for node in strangers:
            place = question.tree.parents[node] + 1
            drawn.append((place, WORDS[question.tree.tokens[node]]))
            assert drawn[-1][1] not in (kept[place], END, "<pad>")
    assert len(drawn) > 20
    assert {place for place, _ in drawn} == {0, 1, 2, 3}
    assert mined(count=20).questions == questions


def test_a_task_ends_with_its_questions_and_a_run_with_a_broken_target(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda text: [END] * (len(text) + 1), prompts=["Q", "it Q", "Q"])
    assert mined(count=10).used == {"planted": 2}
    with pytest.raises(ForetokenError, match="model 'planted' failed at a question of 'planted': NaN"):
        mined(Target(lambda text: []))


def test_a_stopped_run_goes_on_where_it_was_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts = [f"{'so ' * number}Q" for number in range(judge_mining.ABREAST + 3)]
    plant(monkeypatch, lambda text: ["the", "total", "is", "8", END][: len(text) + 1], prompts=prompts)
    how, draft = Mining(tasks=("planted",), count=len(prompts)), SimpleNamespace(max_length=100)
    whole = mined(count=len(prompts))

    def stop(number: int) -> None:
        if number:
            raise KeyboardInterrupt

    target: Any = Target()
    with pytest.raises(KeyboardInterrupt):
        mine(target, draft, how, stop, Store(tmp_path / "labels.jsonl", "t", "d", 4))  # type: ignore[arg-type]
    store, again, seen = Store(tmp_path / "labels.jsonl", "t", "d", 4), Target(), list[int]()
    assert 0 < len(store.found) < len(prompts)
    rest = mine(again, draft, how, seen.append, store)  # type: ignore[arg-type]
    assert seen[-1] == len(prompts)
    assert len({each for each in again.asked if each.endswith("Q")}) == len(prompts) - len(store.found)
    assert sorted(map(repr, rest.questions)) == sorted(map(repr, whole.questions))
    assert (rest.used, rest.right) == (whole.used, whole.right)


def test_no_time_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda text: ["so"] * (len(text) + 1))
    assert mined(seconds=0.0).questions == []


# ---------------------------------------------------------------------- the real pair


@pytest.mark.parametrize("family", ["llama", "exaone4"])  # the native decoder and the library's layers
def test_a_draft_s_picks_are_its_own_choices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str) -> None:
    save_model(family, tmp_path)
    prompt, text = [5, 9, 40, 41], [30, 31, 12, 60, 61]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        q_MV = model(input_ids=torch.tensor([prompt + text])).logits[0].softmax(-1)
        best = q_MV.argmax(-1).tolist()
    model = load(tmp_path, device="cpu")
    picks = judge_mining._Picks(model, 1)
    assert picks.of(prompt, text) == [[each] for each in best[len(prompt) - 1 :]]
    assert picks.of(prompt, text[:2]) == [[each] for each in best[len(prompt) - 1 : len(prompt) + 2]]
    monkeypatch.setattr(judge_mining, "LEAST", float(q_MV[len(prompt) - 1].sort().values[-2]) - 1e-4)
    several = judge_mining._Picks(model, 3).of(prompt, text)
    assert several[0] == q_MV[len(prompt) - 1].topk(2).indices.tolist()
    assert [each[0] for each in several] == best[len(prompt) - 1 :]
    assert all(len(each) <= 3 for each in several)


# ---------------------------------------------------------------------- the target's states


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_state_belongs_to_the_token_after_its_own_past(tmp_path: Path, family: str) -> None:
    save_model(family, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    #          0   1   2   and in the place of node 1: node 3; before node 0's place: node 4
    tree = TokenTree([30, 31, 32, 77, 78], [-1, 0, 1, 0, -1])
    prompt = [5, 9, 40]
    with torch.inference_mode():
        own = int(model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax())
    questions = [
        Marked(prompt, tree, [("one", True), None, ("one", True), ("one", False), ("two", False)]),
        Marked(prompt, TokenTree([own]), [("one", True)]),
        Marked(prompt[:1], TokenTree([8]), [None]),
        Marked(prompt[:1], TokenTree([8]), [("two", True)]),
    ]
    found = read_states(load(tmp_path, device="cpu"), questions)
    paths = [[*prompt, 30], [*prompt, 30, 31, 32], [*prompt, 30, 77], [*prompt, 78], [*prompt, own], [5, 8]]
    asked = []
    for path, state_D, law_3 in zip(paths, found.hidden_ND, found.law_N3, strict=True):
        with torch.inference_mode():
            output = model(input_ids=torch.tensor([path]), output_hidden_states=True)
        torch.testing.assert_close(state_D, output.hidden_states[-1][0, -1], rtol=1e-4, atol=1e-4)
        logp_V = output.logits[0, -2].log_softmax(-1)
        entropy = torch.distributions.Categorical(logits=logp_V).entropy()
        logp = logp_V[path[-1]]
        torch.testing.assert_close(law_3, torch.stack([logp, logp - logp_V.max(), entropy]), rtol=1e-4, atol=1e-4)
        asked.append(int(logp_V.argmax()) != path[-1])
    assert found.fine_N.tolist() == [True, True, False, False, True, True]
    assert found.asked_N.tolist() == asked
    assert asked[4] is False
    assert found.question_N.tolist() == [0, 0, 0, 0, 0, 1]  # equal prompts are one question
    assert [found.sources[place] for place in found.source_N.tolist()] == ["one", "one", "one", "two", "one", "two"]
    some = found.of(~found.fine_N)
    assert (len(some), some.question_N.tolist()) == (2, [0, 0])
    assert torch.equal(some.hidden_ND, found.hidden_ND[2:4])
    assert len(read_states(load(tmp_path, device="cpu"), [])) == 0


# ---------------------------------------------------------------------- annotations

GOOD = {"question": "What is 2 + 3?", "correct": "It is 5.", "wrong": "It is 6, I say.", "error": [6, 7]}


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A target with characters as tokens."""
    return LLM(save_model("llama", tmp_path_factory.mktemp("letters")), device="cpu")


def write(folder: Path, *records: Any) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(("tail", "behind"), [("mask", False), ("negative", True)])
def test_annotated_tokens(tmp_path: Path, letters: LLM, tail: str, behind: bool) -> None:
    correct, wrong = read_triples(write(tmp_path, GOOD), letters, tail)
    assert correct.prompt == wrong.prompt
    assert letters.tokenizer.decode(wrong.tree.tokens) == GOOD["wrong"]
    fine, bad = ("mine", True), ("mine", False)
    assert list(correct.labels) == [fine] * len(str(GOOD["correct"]))
    assert list(wrong.labels) == [fine] * 6 + [bad] + [bad if behind else None] * (len(str(GOOD["wrong"])) - 7)


def test_a_token_with_a_character_of_the_error_is_not_fine(tmp_path: Path) -> None:
    llm = LLM("zoo:base", device="cpu", speculative_config=None)
    record = {**GOOD, "wrong": "There are hundreds of marbles here.", "error": [14, 15]}
    _, wrong = read_triples(write(tmp_path, record), llm)
    words = [llm.tokenizer.decode([token]) for token in wrong.tree.tokens]
    bad = [word for word, label in zip(words, wrong.labels, strict=True) if label == ("mine", False)]
    assert len(bad) == 1
    before = "".join(words[: wrong.labels.index(("mine", False))])
    assert len(before) <= 14 < len(before) + len(bad[0])
    assert wrong.prompt[-1] == llm.chat_prompt([{"role": "user", "content": "x"}])["prompt_token_ids"][-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error": [6, 6]}, "'error' must be .BEGIN, END."),
        ({"error": [6, 16]}, "0 <= BEGIN < END <= 15"),
        ({"error": [-1, 3]}, "'error' must be"),
        ({"error": "6"}, "'error' must be"),
        ({"error": [True, 2]}, "'error' must be"),
        ({"correct": ""}, "'correct' must be a text"),
        ({"question": 3}, "'question' must be a text"),
        ({"correct": "x" * 200}, "question and answer have 214 tokens, the context of .* holds 128: shorten"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, letters: LLM, change: Any, message: str) -> None:
    with pytest.raises(InputError, match=rf"mine.jsonl:2: .*{message}"):
        read_triples(write(tmp_path, GOOD, {**GOOD, **change}), letters)


def test_files_that_hold_nothing_and_unknown_tails(tmp_path: Path, letters: LLM) -> None:
    with pytest.raises(InputError, match="holds no triples"):
        read_triples(write(tmp_path), letters)
    with pytest.raises(InputError, match="needs the field 'error'"):
        read_triples(write(tmp_path, {"question": "a", "correct": "b", "wrong": "c"}), letters)
    with pytest.raises(InputError, match="no such file"):
        read_triples(tmp_path / "none.jsonl", letters)
    with pytest.raises(ConfigError, match="--tail keep: must be mask or negative"):
        read_triples(write(tmp_path, GOOD), letters, "keep")
