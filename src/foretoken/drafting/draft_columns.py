"""Which tokens the drafts of each request are made of: a draft vocabulary at run time (VocabTrim).

    kept          the vocabulary's tokens, the same for every request             K columns
    context rows  tokens of its own prompt and output that are not kept, few      m columns, after them
    all           where too much is missed without the others                     V columns: the whole head

Everything here follows from a request's own tokens and verdicts, so that a seeded draft is the same alone and next to
others: of a forward that has scored other requests' context rows, or the whole head, a request sees its own columns
only, in the order that they have when it is alone.

Letters: M rows of logits, C columns, V vocabulary.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.core.columns import Columns
from foretoken.core.protocols import Context, Outcome
from foretoken.core.tree import ROOT
from foretoken.drafting.draft_vocabulary import DraftVocabulary
from foretoken.models.head_rows import HeadRows
from foretoken.models.language_model import LanguageModel, Output

# Fall-back. The paper's pitfall of uneven tasks; its share is ours.
LEAVE_AT, RETURN_AT = 0.2, 0.1  # share of acceptance lost, above which all tokens are scored, and below which not
_DECAY = 0.95  # per step with a draft
_LEAST = 8.0  # tokens, accepted and missed, before either is decided


@dataclass(slots=True)
class _State:
    """One request.

    Attributes:
        tail: its context rows; ``known`` is the same as a set.
        num_read: tokens looked at for them.
        columns: kept tokens and tail; None: to be made.
        accepted, refused, missed: moving sums of draft tokens that stood and that could have been drafted, of
            refusals, and of tokens that stood or would have stood but have no column.
        whole: whether all tokens are scored.
    """

    tail: list[int] = field(default_factory=list)
    known: set[int] = field(default_factory=set)
    num_read: int = 0
    columns: Columns | None = None
    accepted: float = 0.0
    refused: float = 0.0
    missed: float = 0.0
    whole: bool = False

    @property
    def lost(self) -> float:
        """Share of the acceptance that the missing columns cost."""
        return self.missed / (self.accepted + self.missed) if self.missed else 0.0


class DraftColumns:
    """The tokens that the drafts of each request are made of.

    Paper:   VocabTrim, arXiv:2506.22694 (and FR-Spec, arXiv:2502.14856): the head's rows of the tokens that the target
             emits most.
    Exact:   a draft carries the distribution of its own columns, 0 at every other token; the whole head verifies.
    Differs: context rows, and the fall-back to the whole head (ours). A request falls back when, over its last steps,
             more than a fifth of the tokens that would have been accepted had no column: a rejected draft with a
             correction outside of the columns counts up to its accepted length. It returns when less than a tenth of
             the accepted tokens has none.

    Args:
        model: the owner of the drafting head: a draft model, or the target.
        vocabulary: None: always the whole head.
        vocab_size: V, of the target; a draft model's table may be padded otherwise.
    Attributes:
        head: the kept rows and this step's context rows; None without a vocabulary.
        rows: the rows that the forwards of this step score: ``head``, or None for the whole head.
    """

    def __init__(self, model: LanguageModel, vocabulary: DraftVocabulary | None, vocab_size: int) -> None:
        self.rows: HeadRows | None = None
        self.head = None if vocabulary is None else HeadRows(model, vocabulary.ids, vocab_size)
        self._model = model
        self._most_context = 0 if vocabulary is None else vocabulary.context_rows
        self._vocab_size = vocab_size
        # tokens that the model has no row for cannot be context rows
        self._kept = bytearray(model.vocab_size) + b"\1" * (vocab_size - model.vocab_size)
        for token in () if vocabulary is None else vocabulary.ids:
            self._kept[token] = 1
        self._states: dict[int, _State] = {}
        self._base: Columns | None = None if self.head is None else self.head.columns

    def __len__(self) -> int:
        """Tokens that can be ranked for any request."""
        return self._vocab_size if self._base is None else len(self._base)

    def begin(self, contexts: Sequence[Context]) -> None:
        """Choose the columns that the forwards of a step score, for the requests with a draft."""
        if self.head is None:
            return
        states = [self._read(context) for context in contexts]
        if any(state.whole for state in states):
            self.rows = None
            return
        self.head.set_tail(list(dict.fromkeys(token for state in states for token in state.tail)))
        self.rows = self.head

    def alone(self, context: Context, *, own: bool) -> bool:
        """Whether a request sees rows of a forward's output as they are: there is nothing in them but its own.

        Args:
            own: see :meth:`view`.
        """
        if self.head is None:
            return True
        state = self._states[context.request_id]
        if state.whole:
            return True
        return self.rows is not None and len(self.head) == self.head.num_base + len(state.tail) and not own

    def view(
        self, output: Output, start: int, stop: int, context: Context, *, top: int, own: bool
    ) -> tuple[Output, int]:
        """A request's view of rows of a forward's output, and the first of these rows in it.

        Args:
            top: tokens of each row to rank.
            own: the request's drafts may follow from its own past only, to the last bit of a probability.
        """
        if self.alone(context, own=own):
            return output, start
        assert self.head is not None
        state = self._states[context.request_id]
        if state.columns is None:
            tail = torch.tensor(state.tail, dtype=torch.int64, device=self._model.device)
            assert self._base is not None
            state.columns = Columns(torch.cat([self._base.ids_C, tail]), self._vocab_size) if state.tail else self._base
        ids_C = state.columns.ids_C
        columns_C = ids_C if output.columns is None else output.columns.of_tokens(ids_C)
        logits_MC = output.logits_MV[start:stop][:, columns_C]
        return Output.of(logits_MC, top=top, hidden=output.hidden, columns=state.columns), 0

    def score(self, hidden_MD: Tensor, request_id: int) -> Output:
        """Logits of the kept tokens for hidden states of any depth, with the best one; without context rows.

        Args:
            hidden_MD: before the final norm.
        """
        state = self._states.get(request_id)
        if self.head is None or (state is not None and state.whole):
            return self._model.score(hidden_MD, top=1)
        logits_MC = self._model.score(hidden_MD, head=self.head).logits_MV[:, : self.head.num_base]
        return Output.of(logits_MC, top=1, columns=self._base)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Record accepted tokens without a column."""
        for outcome in outcomes:
            state = self._states.get(outcome.request_id)
            if state is not None and len(outcome.draft):
                self._learn(state, outcome)

    def release(self, request_id: int) -> None:
        """Forget a request."""
        self._states.pop(request_id, None)

    def _learn(self, state: _State, outcome: Outcome) -> None:
        tree, path = outcome.draft.tree, outcome.verdict.path
        outside = sum(not self._scores(state, tree.tokens[node]) for node in path)  # drafted by the whole head
        state.accepted = state.accepted * _DECAY + len(path) - outside
        state.refused *= _DECAY
        state.missed = state.missed * _DECAY + outside
        if (path[-1] if path else ROOT) in tree.children:
            if state.whole or self._scores(state, outcome.verdict.extra):
                state.refused += 1.0
            else:
                state.missed += state.accepted / max(1.0, state.accepted + state.refused)
        if state.accepted + state.missed >= _LEAST:
            state.whole = state.lost > (RETURN_AT if state.whole else LEAVE_AT)

    def _scores(self, state: _State, token: int) -> bool:
        return bool(self._kept[token]) or token in state.known

    def _read(self, context: Context) -> _State:
        """A request's state, its context rows up to its last committed token: a function of its tokens alone."""
        state = self._states.get(context.request_id)
        if state is None:
            state = self._states[context.request_id] = _State()
        tokens = context.tokens
        if not state.num_read and self._most_context:
            odd = Counter(token for token in tokens[: context.num_prompt] if not self._kept[token])
            self._add(state, [token for token, _ in odd.most_common()])
            state.num_read = context.num_prompt
        self._add(state, [token for token in tokens[state.num_read :] if not self._kept[token]])
        state.num_read = len(tokens)
        return state

    def _add(self, state: _State, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token not in state.known and len(state.tail) < self._most_context:
                state.tail.append(token)
                state.known.add(token)
                state.columns = None
