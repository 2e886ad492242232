"""Labels for the judge without annotators: is the answer still right with a draft token in it?

    target's answer   def add ( a ,  b ) …
    draft's choices    ·   sum  ·  · ·  ·
    tried             def sum ( a ,  b ) …          the target continues alone; if the answer is still right, the token
                                                    is fine and stays in the text; otherwise it is not fine

Paper: AutoJudge, arXiv:2504.20039, Algorithm 1: mismatches between draft and target are tried from left to right, and a
token is not fine if the final answer changes.
Differs: only questions with a right answer of the target are mined: a wrong answer carries no information about its
tokens. The question defines a right answer (tasks/question_sets.py): the same number; in words, an answer that contains
the right one and at most as many additional words. An answer more than half as long again as the target's own never is
right. After the draft's favourite its next choices are tried; they do not stay in the text. End tokens and other
special tokens are not tried, since a judge never accepts them on its own. Tokens on which draft and target agree are
labelled, too (fine). Every answer gets ``STRANGERS`` random tokens of the vocabulary, labelled bad without a trial:
a judge that was trained only on a draft's plausible mistakes accepts nonsense.
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
from foretoken.engine.llm import LLM
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.models.language_model import LanguageModel
from foretoken.models.prefill import prefill
from foretoken.options.sampling import SamplingParams
from foretoken_lab.judge.labels import Label, Marked
from foretoken_lab.judge.store import Found, Store
from foretoken_lab.tasks.prompt_ids import question_ids
from foretoken_lab.tasks.question_sets import Question, QuestionSet, find_questions

ABREAST = 64  # maximum number of questions in progress
CHOICES = 4  # draft tokens per position: possible drafts at temperature 1 or in a tree
LEAST = 0.01  # minimum probability of a choice to try
LONGER = 1.5  # an answer is not right if it is longer than this many times the target's own answer
STRANGERS = 2  # random tokens for each answer
RANDOM = "random tokens"  # source of their labels
_MOST_DRAWS = 1000  # attempts to draw a new question
_SEED = 1000  # of the questions: different from the zoo's mixture, which the target was trained on


@dataclass(frozen=True)
class Mining:
    """Options of mining labels.

    Attributes:
        tasks: names of question sets, or files of questions (tasks/question_sets.py), used in turns.
        count: number of questions.
        seconds: time limit; None: none. Questions in progress then keep the labels found so far.
        seed: of the questions.
        choices: draft tokens to try per position, the target's own included; 1: only the favourite.
        held_out: use the held-out halves instead, the same questions as every evaluation: for measuring.
    """

    tasks: tuple[str, ...]
    count: int = 1000
    seconds: float | None = None
    seed: int = 0
    choices: int = CHOICES
    held_out: bool = False

    def __post_init__(self) -> None:
        """Check the tasks."""
        if not any(self.tasks):
            raise ConfigError("--task: name at least one, or a file of questions with answers")
        for name in self.tasks:
            find_questions(name)


@dataclass(frozen=True)
class Mined:
    """The result of mining.

    Attributes:
        questions: with at least one label each; the target's own answer to each is right.
        used: number of questions used, by task.
        right: number of right answers of the target, by task.
    """

    questions: list[Marked]
    used: dict[str, int]
    right: dict[str, int]


def mine(
    llm: LLM,
    draft: LanguageModel,
    how: Mining,
    report: Callable[[int], None] = lambda number: None,
    store: Store | None = None,
) -> Mined:
    """Answer questions and try the draft's tokens in the target's answers.

    Args:
        llm: the target, with plain decoding; faster with ``ABREAST`` sequences at once and a prefix cache.
        draft: has the same vocabulary.
        report: called with the number of finished questions.
        store: receives every finished question; questions in it are not repeated.
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
    """Yield the questions that fit the context, tasks in turns; no prompt twice."""
    readers = [(task, _asked(task, how)) for task in tasks]
    special = llm.target.special_ids  # tokens that a judge may not accept, end tokens included
    longest = min(llm.target.max_length, draft.max_length)
    known: set[str] = set()
    for number in range(how.count):
        task, questions = readers[number % len(readers)]
        question = next((each for each in islice(questions, _MOST_DRAWS) if each.prompt not in known), None)
        if question is None:  # this task has no more questions
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
        text: the target's answer with the fine draft tokens found so far; without its end token.
        ended: an end token followed the text.
        picks: the draft's choices at every position of the text, and after it; empty if the text is new.
        place: number of labelled tokens of the text; the next token is to be compared.
        tried: number of choices of this position considered so far.
        pick: the draft token on trial at that position; None: the target has not answered yet.
        longest: maximum number of tokens of a right answer.
        rejected: tried tokens outside of the text: position, token, and whether it was fine.
        started, right, over: the target has answered; its answer is right; no choices are left.
    """

    task: QuestionSet
    question: Question
    prompt: list[int]
    tokenizer: Any
    special: frozenset[int]
    text: list[int] = field(default_factory=list)
    longest: float = 0.0
    rejected: list[tuple[int, int, bool]] = field(default_factory=list)
    place: int = 0
    pick: int | None = None
    ended: bool = False
    picks: list[list[int]] = field(default_factory=list)
    tried: int = 0
    started: bool = False
    right: bool = False
    over: bool = False

    def trial(self) -> list[int]:
        """Return the start of the target's next generation: empty at first, then text up to a position plus a draft
        token.
        """
        return [] if self.pick is None else [*self.text[: self.place], self.pick]

    def judge(self, trial: list[int], continuation: Sequence[int]) -> None:
        """Judge the resulting answer. It becomes the text if the draft's favourite was fine."""
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
                self.rejected.append((self.place, self.pick, fine))
                return
            self.place, self.tried = self.place + 1, 0
        self.text, self.ended, self.picks = answer, ended, []

    def advance(self, picks: _Picks) -> None:
        """Move to the next position where the draft disagrees."""
        if self.over:
            return
        if not self.picks:
            self.picks = picks.of(self.prompt, self.text)
        places = len(self.text) + self.ended  # where the target ends, the draft may continue
        while self.place < min(places, self.task.max_tokens - 1):  # every trial generates at least one token
            said = self.text[self.place] if self.place < len(self.text) else None
            while self.tried < len(self.picks[self.place]):
                self.pick = self.picks[self.place][self.tried]
                self.tried += 1
                if self.pick != said and self.pick not in self.special:
                    return
            self.place, self.tried = self.place + 1, 0
        self.over = True

    def found(self, vocabulary: int) -> Found:
        """Return the result so far."""
        marked = self._marked(vocabulary) if self.right and self.place else None
        return Found(self.task.name, self.prompt, self.right, marked)

    def _marked(self, vocabulary: int) -> Marked:
        """Return the labels so far, with random tokens added."""
        kept = self.text[: self.place]
        rng = Random(self.question.prompt)
        others = [(place, token, (self.task.name, fine)) for place, token, fine in self.rejected]
        for place in rng.sample(range(len(kept)), min(STRANGERS, len(kept))):
            stranger = rng.randrange(vocabulary)
            if stranger != kept[place] and stranger not in self.special:
                others.append((place, stranger, (RANDOM, False)))
        tokens = [*kept, *(token for _, token, _ in others)]
        parents = [*range(ROOT, len(kept) - 1), *(place + ROOT for place, _, _ in others)]
        said: list[Label | None] = [None if token in self.special else (self.task.name, True) for token in kept]
        return Marked(self.prompt, TokenTree(tokens, parents), [*said, *(label for *_, label in others)])


class _Picks:
    """Alternative tokens of a model at every position of a given text."""

    def __init__(self, model: LanguageModel, choices: int) -> None:
        self._model, self._cache, self._choices = model, model.new_cache(1), choices

    @torch.inference_mode()
    def of(self, prompt: Sequence[int], text: Sequence[int]) -> list[list[int]]:
        """For each position of the text, and after it, return the most probable token and the next ones with at least
        ``LEAST``.
        """
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
