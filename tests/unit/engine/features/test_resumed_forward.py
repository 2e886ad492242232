"""Any mixture of begun drafts, plain roots and prompt chunks, kept or refused anywhere, leaves a plain cache.

A stand-in for a drafter grows random chains and trees through the first layers of a tiny model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretoken.core.draft import NO_DRAFT, Draft, ResumePoint
from foretoken.core.needs import HiddenLayers
from foretoken.core.protocols import Budget
from foretoken.core.tree import ROOT, TokenTree
from foretoken.drafting.early_exit import EarlyExit, EarlyExitBuilder
from foretoken.engine.features.resumed_forward import resumed_forward
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import VOCAB_SIZE, save_model
from helpers.watching import committed, compare, fresh_rows

modelled = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module", params=["mistral", "gemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Windowed, grouped queries; the first may run fused, the second has soft-capped scores."""
    return load(save_model(request.param, tmp_path_factory.mktemp(request.param)), device="cpu")


@dataclass
class Text:
    """One request: its read tokens and its next ones."""

    slot: int
    tokens: list[int]
    unread: list[int] = field(default_factory=list)

    @property
    def context(self) -> Any:
        return SimpleNamespace(slot=self.slot, tokens=self.tokens, request_id=self.slot)


def draw_tokens(data: st.DataObject, least: int, most: int) -> list[int]:
    return data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=least, max_size=most))


def grow(shallow: EarlyExit, texts: list[Text], depth: int, data: st.DataObject) -> list[Draft]:
    """Random drafts of all of these, level by level, read by the first layers as they grow."""
    growing = [EarlyExitBuilder(text.context, Budget(8, 4)) for text in texts]
    active = growing
    while active:
        shallow.read(active, depth, (depth,), scored=data.draw(st.booleans()))
        for draft in active:
            parents = [ROOT] if not draft.tokens else [n for n in draft.frontier if draft.has_room(n)]
            wanted = [(each, parent) for parent in parents for each in draw_tokens(data, 0 if draft.tokens else 1, 2)]
            room = draft.budget.max_nodes - len(draft.tokens)
            draft.frontier = [draft.add(token, parent, 0.5, 0) for token, parent in wanted[:room]]
        active = [draft for draft in active if len(draft.unread)]
    return [
        Draft(TokenTree(draft.tokens, None if draft.chain else draft.parents), resume=draft.resume_point(depth))
        for draft in growing
    ]


def step(model: LanguageModel, cache: KVCache, shallow: EarlyExit, texts: list[Text], data: st.DataObject) -> None:
    """One step: some draft, some are plain roots, some read their prompt; then a path of each stands."""
    depth = data.draw(st.integers(1, model.num_layers - 1), label="depth")
    decoding = [text for text in texts if not text.unread]
    drafting = [text for text in decoding if data.draw(st.booleans(), label="drafts")]
    before = model.layer_rows
    drafts = dict(zip([text.slot for text in drafting], grow(shallow, drafting, depth, data), strict=True))
    batch, jobs = PackedBatch(), []
    for text in data.draw(st.permutations(texts)):
        length = cache.lengths[text.slot]
        draft = drafts.get(text.slot, NO_DRAFT)
        if text.unread:
            chunk = text.unread[: data.draw(st.integers(1, len(text.unread)), label="chunk")]
            cache.reserve(text.slot, len(chunk))
            batch.add_chunk(text.slot, length, chunk, wanted=int(len(chunk) == len(text.unread)))
        else:
            cache.reserve(text.slot, 1 + len(draft))
            batch.add_tree(text.slot, length, text.tokens[-1], draft.tree)
        jobs.append((text, draft))
    last = data.draw(st.sampled_from([None, 1, 3]), label="last")
    depths = tuple(sorted(data.draw(st.sets(st.integers(1, model.num_layers)), label="depths")))
    plan = DensePlan(cache, batch)
    verifying = data.draw(st.booleans(), label="a verifier looks")
    output, pieces = resumed_forward(
        model, cache, batch, [draft for _, draft in jobs], plan, HiddenLayers(depths, last), last=verifying
    )
    assert model.layer_rows - before == len(batch) * model.num_layers
    wanted = iter(output.hidden[model.num_layers]) if verifying else iter(())

    for (text, draft), segment, piece in zip(jobs, batch.segments, pieces, strict=True):
        path = draft.tree.path_to(data.draw(st.integers(-1, len(draft) - 1), label="path"))
        # the shown states equal those of a fresh forward of each row's own past
        begun = draft.resume.depth if draft.resume is not None else 0
        assert set(piece.hidden) == {each for each in depths if each > begun}
        rows = segment.num_rows if last is None or len(draft) else min(last, segment.num_rows)
        assert piece.begin == segment.prefix + (segment.num_rows - rows)
        committed_before = text.tokens[: segment.prefix]
        if text.unread:
            past = [*committed_before, *text.unread[: segment.num_rows]]
            shown = range(segment.num_rows - rows, segment.num_rows)
        else:
            past = [*committed_before, text.tokens[-1], *(draft.tree.tokens[node] for node in path)]
            shown = range(1)
        for each in piece.hidden:
            fresh = fresh_rows(model, past, each)[1][segment.prefix :]
            values = piece.hidden[each]
            assert len(values) == rows
            if text.unread:
                ours, theirs = values, fresh[shown.start :]
            else:
                ours, theirs = values[[0, *(node + 1 for node in path)]], fresh
            compare([ours], [theirs], exact=model.native_decoder is not None)
        if verifying:  # states of the wanted rows are kept, in order
            fresh = fresh_rows(model, past, model.num_layers)[1][segment.prefix :]
            kept = [next(wanted) for row in batch.wanted if segment.start <= row < segment.start + segment.num_rows]
            ours = kept if text.unread else [kept[0], *(kept[node + 1] for node in path)]
            if ours:
                compare(ours, list(fresh[len(fresh) - len(ours) :]), exact=model.native_decoder is not None)
        # commit, or forget everything
        if text.unread:
            cache.commit(text.slot, range(segment.num_rows))
            text.tokens += text.unread[: segment.num_rows]
            del text.unread[: segment.num_rows]
            if not text.unread:
                text.tokens.append(data.draw(st.integers(0, VOCAB_SIZE - 1)))
        elif data.draw(st.integers(0, 4), label="kept"):
            cache.commit(text.slot, [0, *(node + 1 for node in path)])
            text.tokens += [draft.tree.tokens[node] for node in path]
            text.tokens.append(data.draw(st.integers(0, VOCAB_SIZE - 1)))
        elif data.draw(st.booleans(), label="rolled back"):
            length = data.draw(st.integers(1, cache.lengths[text.slot]))
            cache.rollback(text.slot, length)
            del text.tokens[length + 1 :]


@modelled
@given(data=st.data())
def test_any_history_leaves_the_cache_of_a_fresh_forward(model: LanguageModel, data: st.DataObject) -> None:
    cache = model.new_cache(4)
    cache.capacity = 4  # so that it has to grow while drafts are under way
    shallow = EarlyExit.__new__(EarlyExit)
    shallow.target = model
    shallow.attach(cache)
    texts: list[Text] = []
    for _ in range(data.draw(st.integers(2, 5), label="steps")):
        while len(texts) < 4 and (not texts or data.draw(st.booleans(), label="joins")):
            texts.append(Text(cache.acquire(), [], draw_tokens(data, 1, 7)))
        step(model, cache, shallow, texts, data)
        for text in list(texts):
            length = cache.lengths[text.slot]
            assert length == len(text.tokens) - (0 if text.unread else 1)
            if length:
                expected, _ = fresh_rows(model, text.tokens[:length])
                compare(committed(cache, text.slot), expected, exact=model.native_decoder is not None)
            if len(texts) > 1 and data.draw(st.integers(0, 5), label="leaves") == 0:
                cache.release(text.slot)
                texts.remove(text)


def begin(model: LanguageModel, cache: KVCache, depth: int, tokens: list[int]) -> Draft:
    shallow = EarlyExit.__new__(EarlyExit)
    shallow.target = model
    shallow.attach(cache)
    draft = EarlyExitBuilder(SimpleNamespace(slot=0, tokens=[5], request_id=0), Budget(8, 8))  # type: ignore[arg-type]
    shallow.read([draft], depth, (depth,), scored=False)
    for token in tokens:
        draft.add(token, len(draft.tokens) - 1, 0.5, 0)
    shallow.read([draft], depth, (depth,), scored=False)
    return Draft(TokenTree(tokens), resume=draft.resume_point(depth))


def test_drafts_begun_to_different_depths_are_refused(model: LanguageModel) -> None:
    cache = model.new_cache(2)
    cache.acquire()
    cache.acquire()
    one = begin(model, cache, 1, [3, 4])
    assert one.resume is not None
    other = replace(one, resume=ResumePoint(2, one.resume.hidden_TD))
    batch = PackedBatch()
    for slot in range(2):
        cache.reserve(slot, 3)
        batch.add_tree(slot, 0, 5, one.tree)
    with pytest.raises(ValueError, match=r"different depths: \[1, 2\]"):
        resumed_forward(model, cache, batch, [one, other], DensePlan(cache, batch), HiddenLayers(()))


def test_without_a_begun_forward_one_forward_runs(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, batch, calls = model.new_cache(1), _chunk([5, 3, 4]), []
    cache.acquire()
    cache.reserve(0, 3)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *given, **named: calls.append(named) or forward(*given, **named))
    _, (piece,) = resumed_forward(model, cache, batch, [NO_DRAFT], DensePlan(cache, batch), HiddenLayers((1,)))
    assert len(calls) == 1
    assert piece.hidden[1].shape[0] == 3


@pytest.mark.parametrize("fault", ["none", "hidden", "depth"])
def test_a_wrong_beginning_is_seen(fault: str, model: LanguageModel) -> None:
    """Negative control: rows in another order, or begun to another depth, leave another cache."""
    cache = model.new_cache(1)
    cache.acquire()
    draft = begin(model, cache, 1, [3, 4])
    assert draft.resume is not None
    if fault == "hidden":
        draft = replace(draft, resume=ResumePoint(1, draft.resume.hidden_TD.flip(0)))
    elif fault == "depth":
        draft = replace(draft, resume=ResumePoint(2, draft.resume.hidden_TD))
        # layer 1 has never seen these rows
        model.forward(_chunk([9, 9, 9]), DensePlan(cache, _chunk([9, 9, 9])), span=Span(0, 2))
    batch = PackedBatch()
    batch.add_tree(0, 0, 5, draft.tree)
    resumed_forward(model, cache, batch, [draft], DensePlan(cache, batch), HiddenLayers(()))
    cache.commit(0, range(3))
    expected, _ = fresh_rows(model, [5, 3, 4])
    worst = max(float((a - b).abs().max()) for a, b in zip(committed(cache, 0), expected, strict=True))
    assert worst < 1e-4 if fault == "none" else worst > 1e-2


def _chunk(tokens: list[int]) -> PackedBatch:
    batch = PackedBatch()
    batch.add_chunk(0, 0, tokens, wanted=0)
    return batch


def test_growth_keeps_the_rows_of_a_draft_under_way(model: LanguageModel) -> None:
    cache = model.new_cache(1)
    cache.capacity = 2
    cache.acquire()
    draft = begin(model, cache, 2, [3, 4])
    generation = cache.generation
    cache.reserve(0, 40)
    assert cache.generation > generation
    batch = PackedBatch()
    batch.add_tree(0, 0, 5, draft.tree)
    resumed_forward(model, cache, batch, [draft], DensePlan(cache, batch), HiddenLayers(()))
    cache.commit(0, range(3))
    expected, _ = fresh_rows(model, [5, 3, 4])
    compare(committed(cache, 0), expected, exact=model.native_decoder is not None)
    assert all(torch.isfinite(each).all() for each in committed(cache, 0))
