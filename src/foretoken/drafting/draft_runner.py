"""A second checkpoint, run over drafts while they grow: the base of the drafters with a model of their own.

The draft model has its own K/V cache, and remembers the tokens of its rows. For the next draft it
keeps the rows of the common prefix with the new tokens, drafted rows included, and reads the rest:

    tokens          x x x x x x a b c      c is the root of the next draft
    rows            x x x x x x a d        d was drafted and refused; b and c are read first

So the tokens alone decide which rows are valid: judging, dropping or repeating a draft changes no proposal.

One level of the tree is one packed forward over all requests.

Letters: B requests, N draft nodes, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.draft import NO_DRAFT, Draft, GreedyLaws
from foretoken.core.errors import ConfigError, MismatchError
from foretoken.core.needs import Declared, Offers
from foretoken.core.protocols import Budget, Context, Drafter, Outcome, Plan
from foretoken.core.threads import threads_for
from foretoken.core.tree import ROOT, TokenTree
from foretoken.drafting import draft_vocabulary
from foretoken.drafting.draft_columns import DraftColumns
from foretoken.drafting.other_vocabulary import OtherVocabulary
from foretoken.drafting.reranked_tree import RerankedBuilder
from foretoken.forward.adapter import Adapter
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.models.adapters import load_adapter
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.load import DTYPES, load
from foretoken.models.prefill import CHUNK_ROWS, chunks
from foretoken.models.quantised.rounding import SCHEMES
from foretoken.models.vocabulary import different_vocabulary
from foretoken.options.option import Option

DRAFT_DTYPE = Option(
    "Of the draft model; int8 and int4 round it, for faster drafts and the same text; None: the target's.",
    choices=(*DTYPES, *SCHEMES),
)
DRAFT_CHECKPOINT = Option(
    "The draft checkpoint: zoo:NAME, a local folder, or a hub id. For zoo:base it need not be named: zoo:draft.",
    remedy="name the draft checkpoint, as in zoo:NAME, a folder or a hub id",
)
"""Of drafters that have a model of their own."""

_MARKED_BYTES = 1 << 28  # copies of states, of all requests
_SLOTS = 1024  # requests at once, at most; buffers grow with use


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a forward that belong to one draft."""

    output: Output
    start: int
    stop: int

    @property
    def logits_MV(self) -> Tensor:
        return self.output.logits_MV[self.start : self.stop]


@dataclass(slots=True)
class State:
    """One request: its slot in the draft's cache, and the tokens of its rows.

    Attributes:
        slot: in the draft's cache.
        tokens: of the committed rows.
        tail: token of each row after them, and the tail row of its parent; ROOT for children of the root.
        row_of: node of the last draft -> row of the tail.
        laws: node -> the output and the row in it with its children's distribution, if they are kept.
    """

    slot: int
    tokens: list[int] = field(default_factory=list)
    tail: list[tuple[int, int]] = field(default_factory=list)
    row_of: dict[int, int] = field(default_factory=dict)
    laws: dict[int, tuple[Output, int]] = field(default_factory=dict)

    def read(self, node: int, token: int, parent: int) -> None:
        """A node of the last draft is read into the next row of the tail."""
        self.row_of[node] = len(self.tail)
        self.tail.append((token, ROOT if parent == ROOT else self.row_of[parent]))

    def path_along(self, tokens: Sequence[int]) -> list[int]:
        """Rows of the tail, from a child of the root downwards, that were read from the first of these tokens."""
        path: list[int] = []
        for token in tokens:
            wanted = token, path[-1] if path else ROOT
            row = next((row for row, read in enumerate(self.tail) if read == wanted), None)
            if row is None:
                break
            path.append(row)
        return path


@dataclass(slots=True)
class RunnerBuilder(RerankedBuilder):
    """A draft while it grows, and where its request stands in the draft's cache.

    Attributes:
        text: the committed tokens, in the draft's vocabulary.
        spells: its nodes are tokens of a draft with another vocabulary, which become the target's at the end.
    """

    state: State = field(kw_only=True)
    text: Sequence[int] = field(kw_only=True)
    spells: bool = False


class DraftRunner(Drafter, ABC):
    """A draft model and its cache. Drafters give :meth:`_expand` and :meth:`_finish`.

    Args:
        model: the draft checkpoint, in the target's dtype and on its device; or a draft that is loaded already.
        target: the model to draft for.
        top: how many tokens of each row are ranked.
        draft_vocab: a folder with the tokens that are drafted; None: all.
        dtype: of the draft checkpoint, as for ``load``; None: the target's.
        any_vocabulary: the draft may have another vocabulary; it is translated.
    Raises:
        ConfigError: there is no such dtype, or not on this device.
        MismatchError: the draft has another vocabulary, or ``draft_vocab`` is another tokenizer's.
        ModelError: ``draft_vocab`` is no such folder.
    """

    declared = Declared(draft_model=True)
    offers = Offers(evidence=(GreedyLaws,))
    span: Span | None = None  # all layers, and the taps of the wanted rows; None: no taps
    keeps_laws = False  # set before :meth:`score` is used

    def __init__(
        self,
        model: str | LanguageModel,
        target: LanguageModel,
        *,
        top: int = 1,
        draft_vocab: str | Path | None = None,
        dtype: str | None = None,
        any_vocabulary: bool = False,
    ) -> None:
        dtype = dtype or str(target.dtype).removeprefix("torch.")
        self.model = (
            load(model, dtype=dtype, device=str(target.device), trust_remote_code=target.trusted)
            if isinstance(model, str)
            else model
        )
        reason = different_vocabulary(target.tokenizer, self.model.tokenizer)
        self.other = OtherVocabulary(target, self.model) if reason is not None and any_vocabulary else None
        if reason is not None and not any_vocabulary:
            raise MismatchError(
                f"draft model '{self.model.name}' has another vocabulary than '{target.name}' ({reason}): "
                "use a draft with the target's tokenizer"
            )
        self.vocab_size = target.vocab_size
        self.cache = self.model.new_cache(_SLOTS)
        if self.other is not None and draft_vocab is not None:
            raise ConfigError(
                f"draft_vocab={draft_vocab!r} with draft model '{self.model.name}', which has another vocabulary than "
                f"'{target.name}': leave draft_vocab out"
            )
        scored = self.vocab_size if self.other is None else self.model.vocab_size
        self.columns = DraftColumns(self.model, draft_vocabulary.find(draft_vocab, self.model), scored)
        self._top = min(top, len(self.columns if self.other is None else self.other.columns))
        self._states: dict[int, State] = {}
        self._adapters: dict[Any, tuple[str, Adapter]] = {}  # by the adapter of the target: folder, adapter
        self._corrections: dict[int, Adapter] = {}  # by slot
        # a text became shorter than states could: so with PEARL, which drafts after tokens that may be rejected
        self._marks = False

    @property
    def flops(self) -> float:
        """Of all forwards of the draft so far, counted; see models/work.py."""
        return self.model.flops

    def reading_flops(self, num_tokens: int) -> float:
        """Of the draft's reading so many tokens of a prompt, the same count."""
        return self.model.reading_flops(num_tokens)

    def adapt(self, adapter: Any, folder: str) -> bool:
        if self._adapters.get(adapter, ("", None))[0] != folder:
            self._adapters[adapter] = folder, load_adapter(self.model, adapter.name, folder)
        return True

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Grow one draft per request, level by level; one forward per level for all of them."""
        growing = []
        for context, budget in zip(contexts, budgets, strict=True):
            # The draft may have fewer positions than the target, or fewer rows in its table: then the request goes on
            # without drafts.
            text = context.tokens if self.other is None else self.other.text_of(context.request_id, context.tokens)
            room = self.model.max_length - len(text) if text else 0
            if self.model.vocab_size < self.vocab_size and max(text, default=0) >= self.model.vocab_size:
                room = 0
            nodes, depth = min(budget.max_nodes, room), min(budget.max_depth, room)
            known = context.request_id in self._states or self.cache.free_slots > 0
            if nodes > 0 and depth > 0 and known:
                bounded = replace(budget, max_nodes=nodes, max_depth=depth)
                growing.append(
                    RunnerBuilder(
                        context, bounded, state=self._state(context, text), text=text, spells=self._spells(context)
                    )
                )
        active = [draft for draft in growing if self._wants_first(draft)]
        if active:
            with torch.inference_mode():
                self.columns.begin([draft.context for draft in active])
                self._read(active)
                rows = self._forward_roots(active)
                while active:
                    count = sum(its.stop - its.start for its in rows) * len(self.columns)
                    processed = not all(draft.context.laws.trivial for draft in active)
                    with threads_for(count) if processed else nullcontext():
                        active = self._expand(active, rows)
                    if active:
                        rows = self._forward_level(active)
        done = {draft.context.request_id: self._finish(draft) for draft in growing}
        return [done.get(context.request_id, NO_DRAFT) for context in contexts]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Record missed columns; the tokens of the next draft decide which rows are valid."""
        self.columns.observe(outcomes)

    def score(
        self, contexts: Sequence[Context], budgets: Sequence[Budget], trees: Sequence[TokenTree]
    ) -> list[list[float] | None]:
        """Probabilities of the tokens of larger trees, each given its parent, at temperature 1.

        One forward reads the nodes with children that were not read for the draft, including nodes of other drafters;
        their rows stay in the tail.

        Args:
            contexts, budgets: as in the last call of :meth:`propose`, with ``keeps_laws`` set.
            trees: one each; their first nodes are the draft's.
        Returns:
            a probability for each node of a tree; None if the model was not run for the request, or its cache is full.
        """
        found: list[list[float] | None] = []
        if self.other is not None:  # other drafters' tokens may have no partner
            return [None] * len(trees)
        with torch.inference_mode():
            self._read_inner(contexts, budgets, trees)
            for context, tree in zip(contexts, trees, strict=True):
                state = self._states.get(context.request_id)
                known = state is not None and all(node in state.laws for node in tree.children)
                found.append(_probabilities(state.laws, tree) if state is not None and known else None)
        return found

    def unlikely(self, request_id: int, tree: TokenTree, top: int) -> frozenset[int]:
        """Nodes of a larger tree that are not among the draft's ``top`` most probable tokens after their parent.

        Only children of nodes that the last draft has read are judged: no forward is needed.

        Args:
            request_id: of the last call of :meth:`propose`, with ``keeps_laws`` set.
            tree: its first nodes are the draft's.
        """
        state, found = self._states.get(request_id), set()
        if state is None or self.other is not None:  # other drafters' tokens may have no partner
            return frozenset()
        for parent in tree.children.keys() & state.laws.keys():
            output, row = state.laws[parent]
            best_C = output.logits_MV[row].topk(min(top, output.logits_MV.shape[-1])).indices
            best = (best_C if output.columns is None else output.columns.ids_C[best_C]).tolist()
            found |= {node for node in tree.children[parent] if tree.tokens[node] not in best}
        return frozenset(found)

    def _read_inner(self, contexts: Sequence[Context], budgets: Sequence[Budget], trees: Sequence[TokenTree]) -> None:
        """Read the nodes that have children, of every tree with a read root, after the tail."""
        batch = PackedBatch()
        reading = []
        for context, budget, tree in zip(contexts, budgets, trees, strict=True):
            state = self._states.get(context.request_id)
            if state is None or ROOT not in state.laws:
                continue
            read, slot = state.row_of, state.slot
            fresh = sorted(node for node in tree.children if node != ROOT and node not in read)
            if not fresh or self.cache.lengths[slot] + len(read) + len(fresh) > self.cache.max_length:
                continue
            self.cache.reserve(slot, len(read) + len(fresh))
            tail, tail_depths = len(read), [tree.depths[node] - 1 for node in read]
            for node in fresh:
                state.read(node, tree.tokens[node], tree.parents[node])
            reading.append((context, budget, state, fresh, len(batch.wanted)))
            batch.add_level(
                slot,
                self.cache.lengths[slot],
                [tree.tokens[node] for node in fresh],
                depths=[tree.depths[node] - 1 for node in fresh],
                tail=tail,
                tail_depths=tail_depths,
                ancestors=[[read[each] for each in tree.path_to(node)[:-1]] for node in fresh],
            )
        if not reading:
            return
        output = self._forward(batch)
        for context, budget, state, fresh, start in reading:
            stop = start + len(fresh)
            view, first = self.columns.view(output, start, stop, context, top=self._top, own=budget.history_only)
            state.laws.update({node: (view, row) for row, node in enumerate(fresh, first)})

    def release(self, request_id: int) -> None:
        self.columns.release(request_id)
        if self.other is not None:
            self.other.release(request_id)
        state = self._states.pop(request_id, None)
        if state is not None:
            self.cache.release(state.slot)
            self._corrections.pop(state.slot, None)

    # ------------------------------------------------------------------ forwards

    def _spells(self, context: Context) -> bool:
        """Whether a request's draft is made of the draft's own tokens; see :class:`RunnerBuilder`."""
        return False

    def _state(self, context: Context, text: Sequence[int]) -> State:
        state = self._states.get(context.request_id)
        if state is None:
            state = self._states[context.request_id] = State(self.cache.acquire())
            if self._adapters and context.adapter in self._adapters:
                self._corrections[state.slot] = self._adapters[context.adapter][1]
        self._keep(state, text)
        state.tail.clear()
        state.row_of.clear()
        state.laws.clear()
        return state

    def _keep(self, state: State, tokens: Sequence[int]) -> None:
        """Commit the rows of these tokens, all but the last (the root's row gives the first distribution), and no
        more.
        """
        slot, last = state.slot, len(tokens) - 1
        held = common_length(state.tokens, tokens[:last])
        if self.cache.lengths[slot] > held:
            reached = self.cache.reachable(slot, held)
            self._marks |= reached < held
            self.cache.rollback(slot, reached)
            del state.tokens[reached:]
        elif path := state.path_along(tokens[held:last]):
            self.cache.commit(slot, path)
            state.tokens += tokens[held : held + len(path)]
        if self._marks:
            self.cache.mark(slot, _MARKED_BYTES)

    def _read(self, drafts: Sequence[RunnerBuilder]) -> None:
        """Read committed tokens, all but the last, in chunks; after the first draft there is at most one."""
        for draft in drafts:
            tokens, slot = draft.text, draft.state.slot
            begin = self.cache.lengths[slot]
            whole = max(0, len(tokens) - begin - 1) // CHUNK_ROWS * CHUNK_ROWS  # the rest is read with the root
            for *_, batch in chunks(self.cache, slot, tokens[begin : begin + whole]):
                self._forward(batch)
            draft.state.tokens += tokens[begin : begin + whole]

    def _forward_roots(self, drafts: Sequence[RunnerBuilder]) -> list[Rows]:
        """Read up to and including the root; one row per draft."""
        batch = PackedBatch()
        for draft in drafts:
            slot = draft.state.slot
            begin = self.cache.lengths[slot]
            rest = draft.text[begin:]
            self.cache.reserve(slot, len(rest) + draft.budget.max_nodes)
            batch.add_chunk(slot, begin, rest, wanted=1)
        output = self._forward(batch)
        for draft in drafts:
            slot, tokens = draft.state.slot, draft.text
            begin = self.cache.lengths[slot]
            self.cache.commit(slot, range(len(tokens) - begin))
            draft.state.tokens += tokens[begin:]
        return [self._rows(draft, output, row, row + 1) for row, draft in enumerate(drafts)]

    def _forward_level(self, drafts: Sequence[RunnerBuilder]) -> list[Rows]:
        """Read the frontier of every draft after the nodes already read; a row per frontier node."""
        batch = PackedBatch()
        rows = []
        for draft in drafts:
            slot = draft.state.slot
            read = draft.state.row_of
            tokens = [self._own_token(draft, node) for node in draft.frontier]
            self.cache.reserve(slot, len(read) + len(tokens))  # more may be read than is going to be proposed
            rows.append((len(batch.wanted), len(batch.wanted) + len(tokens)))
            if draft.chain and len(tokens) == 1:
                batch.add_chunk(slot, self.cache.lengths[slot], tokens, wanted=1, tail=len(read))
            else:
                draft.add_frontier(batch, slot, self.cache.lengths[slot], tokens, read)
            for node in draft.frontier:
                draft.state.read(node, self._own_token(draft, node), draft.parents[node])
        output = self._forward_drafted(batch)
        return [self._rows(draft, output, *its) for draft, its in zip(drafts, rows, strict=True)]

    def _rows(self, draft: RunnerBuilder, output: Output, start: int, stop: int) -> Rows:
        """A draft's rows of a forward, in the columns that it is made of."""
        view, first = self.columns.view(
            output, start, stop, draft.context, top=self._top, own=draft.budget.history_only
        )
        if self.other is not None and not draft.spells:
            logits_MC = output.logits_MV[start:stop][:, self.other.draft_C]
            view, first = Output.of(logits_MC, top=self._top, columns=self.other.columns), 0
        if self.keeps_laws:
            draft.state.laws.update({node: (view, row) for row, node in enumerate(draft.frontier, first)})
        return Rows(view, first, first + stop - start)

    def _own_token(self, draft: RunnerBuilder, node: int) -> int:
        """A node's token in the draft's vocabulary."""
        token = draft.tokens[node]
        return token if self.other is None or draft.spells else self.other.draft_token(token)

    def _forward_drafted(self, batch: PackedBatch) -> Output:
        """The forward of a level of drafts; the tokens before them are read by :meth:`_forward`."""
        return self._forward(batch)

    def _forward(self, batch: PackedBatch, plan: Plan | None = None) -> Output:
        """One forward, dense by default; the draft's table may be padded to another size than the target's."""
        span = None if self.span is None else replace(self.span, tap_rows=batch.wanted)
        rows = self.columns.rows
        if self._corrections:
            own = self._corrections
            batch.segments[:] = [replace(each, adapter=own.get(each.slot)) for each in batch.segments]
        plan = plan or DensePlan(self.cache, batch)
        output = self.model.forward(batch, plan, top=self._top, span=span, head=rows)
        if rows is not None:
            return output
        width = output.logits_MV.shape[-1]
        if width == self.vocab_size or self.other is not None:
            return output
        if width > self.vocab_size:
            return Output.of(output.logits_MV[:, : self.vocab_size], top=self._top, hidden=output.hidden)
        padded_MV = torch.nn.functional.pad(output.logits_MV, (0, self.vocab_size - width), value=-torch.inf)
        return Output.of(padded_MV, top=self._top, hidden=output.hidden)

    # ------------------------------------------------------------------ growing

    def _wants_first(self, draft: RunnerBuilder) -> bool:
        """Whether to draft at all. The stop rule refuses where even a certain token would not pay."""
        return draft.pays(1.0, 1.0)

    @abstractmethod
    def _expand(self, drafts: Sequence[RunnerBuilder], rows: Sequence[Rows]) -> list[RunnerBuilder]:
        """Give the frontier of each draft its children; returns the drafts that go on."""

    @abstractmethod
    def _finish(self, draft: RunnerBuilder) -> Draft:
        """The proposal; drafters add the distribution."""


def common_length(read: list[int], tokens: Sequence[int]) -> int:
    """How many tokens both begin with."""
    if read == tokens[: len(read)]:  # nearly always
        return len(read)
    return next((i for i, (a, b) in enumerate(zip(read, tokens, strict=False)) if a != b), len(tokens))


def _probabilities(laws: Mapping[int, tuple[Output, int]], tree: TokenTree) -> list[float]:
    """Of each node's token in its parent's distribution."""
    found = [0.0] * len(tree)
    for parent, nodes in tree.children.items():
        output, row = laws[parent]
        q_C = torch.softmax(output.logits_MV[row].float(), dim=-1)
        for node in nodes:
            column = tree.tokens[node] if output.columns is None else output.columns.of(tree.tokens[node])
            found[node] = float(q_C[column]) if column >= 0 else 0.0
    return found
