"""Labels for the judge without annotators: does the answer survive a draft's token?

    target's answer   def add ( a ,  b ) …
    draft's choices    ·   sum  ·  · ·  ·
    tried             def sum ( a ,  b ) …          the target goes on by itself; still right: the token is fine, and
                                                    stays in the text; else it is not, and does not

Paper: AutoJudge, arXiv:2504.20039, Algorithm 1: mismatches between draft and target are tried from left to right, and a
token is not fine if the final answer changes.
Differs: only questions that the target answers rightly are mined: what a wrong answer survives says nothing about right
and wrong. What is still right is the question's own to say (data/questions.py): the same number; in words what holds
the right answer and at most as many words next to it. An answer of more than half as many tokens again as the target's
own never is. Next to the draft's favourite its next choices are tried;
they do not stay in the text. End tokens and other special tokens are not tried, since a judge never accepts them on its
own. Tokens that draft and target agree on are labelled, too (fine). Into every answer ``STRANGERS`` random tokens of
the vocabulary are put, and labelled bad without being tried: a judge that has only seen a draft's plausible mistakes
lets nonsense pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Any

import torch

from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.core.tree import ROOT, TokenTree
from foretoken.data.questions import Question, QuestionSet, find_questions
from foretoken.engine.llm import LLM
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.methods.judge.labels import Label, Marked
from foretoken.methods.judge.store import Found, Store
from foretoken.models.language_model import LanguageModel
from foretoken.models.prefill import prefill
from foretoken.options.sampling import SamplingParams
from foretoken.train.rendering import question_ids

ABREAST = 64  # questions in work at a time
CHOICES = 4  # of the draft in a place: what it may draft at temperature 1 or for a tree
LEAST = 0.01  # probability of a choice that is worth trying
LONGER = 1.5  # times the target's own answer: what takes more tokens is not as good
STRANGERS = 2  # random tokens for each answer
RANDOM = "random tokens"  # whose labels they are
_MOST_DRAWS = 1000  # for a question that was not asked before
_SEED = 1000  # of the questions: not those of the zoo's mixture, which the target has seen


@dataclass(frozen=True)
class Mining:
    """How labels are mined.

    Attributes:
        tasks: names of question sets, or files of questions (data/questions.py), which are asked in turns.
        count: questions to ask.
        seconds: stop after so long; None: never. Questions in work then count as far as they were walked.
        seed: of the questions.
        choices: of the draft that are tried in a place, the target's own among them; 1: its favourite alone.
        held_out: ask the halves that no model was trained on instead, the same ones as every evaluation: for measuring.
    """

    tasks: tuple[str, ...]
    count: int = 1000
    seconds: float | None = None
    seed: int = 0
    choices: int = CHOICES
    held_out: bool = False

    def __post_init__(self) -> None:
        """Refuse tasks that are not there."""
        if not any(self.tasks):
            raise ConfigError("--task: name at least one, or a file of questions with answers")
        for name in self.tasks:
            find_questions(name)


@dataclass(frozen=True)
class Mined:
    """What was found.

    Attributes:
        questions: with at least one label each, all answered rightly by the target itself.
        asked: questions that were asked, by task.
        right: how many of them it answered rightly.
    """

    questions: list[Marked]
    asked: dict[str, int]
    right: dict[str, int]


def mine(
    llm: LLM,
    draft: LanguageModel,
    how: Mining,
    report: Callable[[int], None] = lambda number: None,
    store: Store | None = None,
) -> Mined:
    """Ask questions and try the draft's tokens in the target's answers.

    Args:
        llm: the target, decoding plainly; faster with ``ABREAST`` sequences at once and prefixes kept.
        draft: of the same vocabulary.
        report: called with the number of questions that are done.
        store: gets every question that is done; those that are in it are not asked again.
    """
    ends = time.monotonic() + (how.seconds if how.seconds is not None else float("inf"))
    known = {} if store is None else {tuple(each.prompt): each for each in store.found}
    old = list[Found]()
    asked = [find_questions(name) for name in how.tasks]
    waiting, active, done = _questions(llm, draft, how, asked), list[_Walk](), list[_Walk]()
    picks = _Picks(draft, how.choices)
    while time.monotonic() < ends:
        while len(active) < ABREAST and (walk := next(waiting, None)) is not None:
            if (found := known.get(tuple(walk.prompt))) is not None:
                old.append(found)
            else:
                active.append(walk)
        trials = [(walk, walk.trial()) for walk in active]
        if not trials:
            break
        outputs = llm.generate(
            [{"prompt_token_ids": [*walk.prompt, *trial]} for walk, trial in trials],
            [SamplingParams(temperature=0.0, max_tokens=walk.task.max_tokens - len(trial)) for walk, trial in trials],
        )
        for (walk, trial), output in zip(trials, outputs, strict=True):
            if output.error is not None:
                raise ForetokenError(
                    f"model '{llm.target.name}' failed at a question of '{walk.task.name}': {output.error}"
                )
            walk.judge(trial, output.token_ids)
            walk.advance(picks)
        ended = [walk for walk in active if walk.over]
        if store is not None:
            store.add([walk.found(llm.target.vocab_size) for walk in ended])
        done += ended
        active = [walk for walk in active if not walk.over]
        report(len(old) + len(done))
    every = [*old, *(walk.found(llm.target.vocab_size) for walk in (*done, *active) if walk.started)]
    return Mined(
        [each.marked for each in every if each.marked is not None],
        {task.name: sum(each.task == task.name for each in every) for task in asked},
        {task.name: sum(each.task == task.name and each.right for each in every) for task in asked},
    )


def _questions(llm: LLM, draft: LanguageModel, how: Mining, tasks: Sequence[QuestionSet]) -> Iterator[_Walk]:
    """The questions that fit, tasks in turns; no prompt twice."""
    readers = [(task, _asked(task, how)) for task in tasks]
    special = llm.target.special_ids  # what a judge may not let stand, the ends among them
    longest = min(llm.target.max_length, draft.max_length)
    known: set[str] = set()
    for number in range(how.count):
        task, questions = readers[number % len(readers)]
        question = next((each for each in islice(questions, _MOST_DRAWS) if each.prompt not in known), None)
        if question is None:  # this task has no other questions
            continue
        known.add(question.prompt)
        prompt = question_ids(llm, question.prompt)
        if len(prompt) + task.max_tokens < longest:
            yield _Walk(task, question, prompt, llm.tokenizer, special)


def _asked(questions: QuestionSet, how: Mining) -> Iterator[Question]:
    if how.held_out:
        return iter(questions.held_out(-(-how.count // len(how.tasks))))
    return iter(questions.training(_SEED + how.seed))


@dataclass
class _Walk:
    """One question on its way through the mismatches of its answer.

    Attributes:
        text: the target's answer with the tokens that were found fine in it; without the token that ended it.
        ended: a token ended it.
        picks: the draft's choices in every place of the text, and after it; empty if the text is new.
        place: tokens of the text that are labelled; the next one is to be compared.
        tried: choices of this place that were looked at.
        pick: the draft's token that is tried there; None: the target has not answered yet.
        longest: tokens that an answer may have to be as good as the first.
        beside: tokens that were tried and are not in the text: place, token, and whether it was fine.
        started, right, over: it was answered; rightly; nothing is left to be tried.
    """

    task: QuestionSet
    question: Question
    prompt: list[int]
    tokenizer: Any
    special: frozenset[int]
    text: list[int] = field(default_factory=list)
    longest: float = 0.0
    beside: list[tuple[int, int, bool]] = field(default_factory=list)
    place: int = 0
    pick: int | None = None
    ended: bool = False
    picks: list[list[int]] = field(default_factory=list)
    tried: int = 0
    started: bool = False
    right: bool = False
    over: bool = False

    def trial(self) -> list[int]:
        """What the target is to go on from: nothing at first, then its answer up to a place and the draft's token."""
        return [] if self.pick is None else [*self.text[: self.place], self.pick]

    def judge(self, trial: list[int], continuation: Sequence[int]) -> None:
        """Look at the answer that came of it. It is the text from now on if the draft's favourite was fine."""
        answer = [*trial, *continuation]
        ended = answer[-1] in self.special
        if ended:
            answer.pop()
        said = self.tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()
        if self.pick is None:
            self.started, self.right = True, self.question.right(said)
            self.over, self.longest = not self.right, LONGER * len(answer)
        else:
            fine = len(answer) <= self.longest and self.question.still_right(said)
            if not fine or self.tried > 1:
                self.beside.append((self.place, self.pick, fine))
                return
            self.place, self.tried = self.place + 1, 0
        self.text, self.ended, self.picks = answer, ended, []

    def advance(self, picks: _Picks) -> None:
        """Go to the next place where the draft says something else."""
        if self.over:
            return
        if not self.picks:
            self.picks = picks.of(self.prompt, self.text)
        places = len(self.text) + self.ended  # where the target ends, the draft may go on
        while self.place < min(places, self.task.max_tokens - 1):  # something is generated after every trial
            said = self.text[self.place] if self.place < len(self.text) else None
            while self.tried < len(self.picks[self.place]):
                self.pick = self.picks[self.place][self.tried]
                self.tried += 1
                if self.pick != said and self.pick not in self.special:
                    return
            self.place, self.tried = self.place + 1, 0
        self.over = True

    def found(self, vocabulary: int) -> Found:
        """What there is of it so far."""
        marked = self._marked(vocabulary) if self.right and self.place else None
        return Found(self.task.name, self.prompt, self.right, marked)

    def _marked(self, vocabulary: int) -> Marked:
        """The labels so far, with random tokens next to them."""
        kept = self.text[: self.place]
        rng = Random(self.question.prompt)
        beside = [(place, token, (self.task.name, fine)) for place, token, fine in self.beside]
        for place in rng.sample(range(len(kept)), min(STRANGERS, len(kept))):
            stranger = rng.randrange(vocabulary)
            if stranger != kept[place] and stranger not in self.special:
                beside.append((place, stranger, (RANDOM, False)))
        tokens = [*kept, *(token for _, token, _ in beside)]
        parents = [*range(ROOT, len(kept) - 1), *(place + ROOT for place, _, _ in beside)]
        said: list[Label | None] = [None if token in self.special else (self.task.name, True) for token in kept]
        return Marked(self.prompt, TokenTree(tokens, parents), [*said, *(label for *_, label in beside)])


class _Picks:
    """What a model might say at every place of a text that another one wrote."""

    def __init__(self, model: LanguageModel, choices: int) -> None:
        self._model, self._cache, self._choices = model, model.new_cache(1), choices

    @torch.inference_mode()
    def of(self, prompt: Sequence[int], text: Sequence[int]) -> list[list[int]]:
        """In the place of each token of the text, and after it: the most probable token, and the next ones with at
        least ``LEAST``."""
        slot = self._cache.acquire()
        try:
            prefill(self._model, self._cache, slot, prompt[:-1])
            rows = [prompt[-1], *text]
            self._cache.reserve(slot, len(rows))
            batch = PackedBatch()
            batch.add_chunk(slot, self._cache.lengths[slot], rows, wanted=len(rows))
            logits_MV = self._model.forward(batch, DensePlan(self._cache, batch)).logits_MV
        finally:
            self._cache.release(slot)
        q_MK, best_MK = logits_MV.float().softmax(-1).topk(self._choices)
        likely_MK = q_MK >= LEAST
        likely_MK[:, 0] = True
        return [best_K[likely_K].tolist() for best_K, likely_K in zip(best_MK, likely_MK, strict=True)]
