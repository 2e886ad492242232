"""Answers in which a draft is read twice and corrected, as training tokens for reflective verification.

    tokens     question  a1 … ac │ d1 … dk │ R1 … Rr  S1 … Ss  t1 … tm        t: the right answer after ac
    counts     as ever           │    no   │    no       no      yes

The layout is that of the rows of a verification (methods/reflective/probe.py): R is a prompt, S repeats the end of the
answer, and the row before t_i has read the draft. Up to the first wrong token of the draft, t is its copy; there it is
the right token, so that copying is not the optimum. A third of the drafts is right, a third is a draft model's greedy
chain, and into a third one wrong token is put, after which the draft model goes on, so that the text after a mistake
agrees with it. Wrong tokens are of the right one's kind: a digit, a sign of arithmetic, a word of the same document.

A token id of V or more is that id minus V, and does not count (:class:`Counted`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretoken.core.errors import ConfigError
from foretoken.data import documents as doc
from foretoken.data.reflection import BACK, INSTRUCTION, PREFIX
from foretoken.engine.llm import LLM
from foretoken.options.sampling import SamplingParams
from foretoken.train.mixture import Source
from foretoken.train.objectives import weighted_loss
from foretoken.train.rendering import encoder
from foretoken_lab.recipes.objectives import AnswersFirst
from foretoken_lab.tasks.training import TASKS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST = 10  # tokens of a draft
KINDS = ("right", "drafted", "planted")
_MARK = "\x1e"  # begins a document of which a part is read twice; others begin with a marker of the chat format
_SEED = 1
_FAMILIES = ("0123456789", "+-*/")


def reflections(name: str, share: float) -> Source:
    """Answers of a generated task's training half, each to be broken off, drafted and put right."""

    def documents() -> Iterator[str]:
        return (_MARK + doc.exchange(example.prompt, example.response) for example in TASKS[name](_SEED))

    return Source(f"reflect_{name}", share, documents)


@dataclass(slots=True)
class _Case:
    """One answer, and where and how it is drafted.

    Attributes:
        right: the document's tokens up to the end of the answer.
        answer: where the answer begins in it.
        committed: where the draft begins.
        length: tokens of the draft.
        kind: of ``KINDS``.
        draft: its tokens, as far as they are known before the draft model goes on.
        prompt: number of the prompt.
    """

    right: list[int]
    answer: int
    committed: int
    length: int
    kind: str
    draft: list[int]
    prompt: int


class Reflections:
    """Turns documents into tokens, those of :func:`reflections` with a draft that is read twice.

    Args:
        tokenizer: the model's.
        draft: zoo name, folder or hub id of the model that drafts; loaded once it is needed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, draft: str) -> None:
        self._tokenizer, self._draft = tokenizer, draft
        self._encode, self._vocabulary = encoder(tokenizer), len(tokenizer)
        known: dict[str, int] = tokenizer.get_vocab()
        missing = [marker for marker in ("<|assistant|>", doc.END) if marker not in known]
        if missing:
            raise ConfigError(f"the tokenizer lacks {', '.join(missing)}: reflections need the chat format of the zoo")
        self._opens, self._ends = known["<|assistant|>"], known[doc.END]
        self._texts = [str(tokenizer.decode([each])) for each in range(self._vocabulary)]
        self._ids = {text: each for each, text in enumerate(self._texts)}
        self._prompts: list[list[int]] = [
            tokenizer.encode(prompt, add_special_tokens=False) for prompt in (BACK, INSTRUCTION)
        ]
        self._llm: LLM | None = None

    @property
    def num_ids(self) -> int:
        """Ids are below this: every token once as one that counts, and once as one that does not."""
        return 2 * self._vocabulary

    def encode(self, documents: list[str]) -> list[list[int]]:
        """The ids of documents; the same document gives the same ids."""
        found = self._encode([each.removeprefix(_MARK) for each in documents])
        marked = [place for place, each in enumerate(documents) if each.startswith(_MARK)]
        cases = {place: self._case(documents[place], found[place]) for place in marked}
        self._go_on(list(cases.values()))
        for place, case in cases.items():
            found[place] = self._laid_out(case)
        return found

    def _case(self, document: str, ids: list[int]) -> _Case:
        rng = random.Random(f"{_SEED} {document}")
        right = ids[: len(ids) - ids[::-1].index(self._ends)]  # the line break after the end of a turn is left out
        answer = len(right) - right[::-1].index(self._opens) + 1  # after the marker and its line break
        committed = rng.randrange(answer, len(right))
        length = min(rng.randint(1, LONGEST), len(right) - committed)
        kind = rng.choice(KINDS)
        draft: list[int] = []
        if kind == "right":
            draft = right[committed : committed + length]
        elif kind == "planted":
            places = list(range(committed, committed + length))
            rng.shuffle(places)
            for place in places:
                if others := self._of_its_kind(right[place], right):
                    draft = [*right[committed:place], rng.choice(others)]
                    break
        return _Case(right, answer, committed, length, kind, draft, rng.randrange(len(self._prompts)))

    def _of_its_kind(self, token: int, document: Sequence[int]) -> list[int]:
        """Other plausible tokens for that position; none unless it is a word, a digit or a sign of arithmetic."""
        text = self._texts[token]
        bare = text.strip()
        for family in _FAMILIES:
            if len(bare) == 1 and bare in family:
                found = (self._ids.get(text.replace(bare, other)) for other in family if other != bare)
                return [each for each in found if each is not None]
        if not bare.isalpha():
            return []
        return sorted(each for each in set(document) if each != token and _shape(self._texts[each]) == _shape(text))

    def _go_on(self, cases: Sequence[_Case]) -> None:
        """The draft model's own words, wherever a draft is not complete."""
        open_ones = [case for case in cases if len(case.draft) < case.length and self._ends not in case.draft]
        if not open_ones:
            return
        if self._llm is None:
            self._llm = LLM(self._draft, speculative_config={"method": "none"})
            theirs: Any = self._llm.tokenizer
            if theirs.get_vocab() != self._tokenizer.get_vocab():
                raise ConfigError(f"{self._draft} drafts in another vocabulary than that of the model to be trained")
        outputs = self._llm.generate(
            [{"prompt_token_ids": [*case.right[: case.committed], *case.draft]} for case in open_ones],
            [SamplingParams(temperature=0.0, max_tokens=case.length - len(case.draft)) for case in open_ones],
        )
        for case, output in zip(open_ones, outputs, strict=True):
            case.draft += output.token_ids

    def _laid_out(self, case: _Case) -> list[int]:
        committed = case.right[: case.committed]
        prefix = committed[max(len(committed) - PREFIX, min(case.answer, len(committed) - 1)) :]
        uncounted = [*case.draft, *self._prompts[case.prompt], *prefix]
        copied = case.right[case.committed : case.committed + len(case.draft)]
        return [*committed, *(self._vocabulary + token for token in uncounted), *copied]


def _shape(text: str) -> tuple[bool, ...]:
    """The shape of a word: letters only, a space before it, a capital."""
    bare = text.strip()
    return (bare.isalpha(), text.startswith(" "), bare[:1].isupper())


class Counted:
    """Next-token loss of answers, without ids of V or more and without first tokens of documents.

    Args:
        answers: gives the weights of the other tokens.
        vocabulary: V.
        begins: id of the token that begins a document: after a copy it is not predictable.
    """

    name = "next_token_of_reflections"

    def __init__(self, answers: AnswersFirst, vocabulary: int, begins: int) -> None:
        self._answers, self._vocabulary, self._begins = answers, vocabulary, begins

    def __call__(self, model: nn.Module, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        ids_BT = tokens_BT % self._vocabulary
        return weighted_loss(model, ids_BT, self.weights(tokens_BT, generator))

    def weights(self, tokens_BT: Tensor, generator: torch.Generator) -> Tensor:
        """What each token counts as one to be predicted: float32 [B, T], of sum 1."""
        ids_BT = tokens_BT % self._vocabulary
        counts_BT = (tokens_BT < self._vocabulary) & (ids_BT != self._begins)
        weights_BT = self._answers.weights(ids_BT, generator) * counts_BT
        return weights_BT / weights_BT.sum().clamp(min=1e-9)
