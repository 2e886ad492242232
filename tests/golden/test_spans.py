"""A forward in spans of layers equals the whole forward, and passes on the library's hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretoken.core.errors import UnsupportedArchitecture
from foretoken.drafting.early_exit import check_spans
from foretoken.forward import anatomy
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.models.adoption import probe
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.load import load
from foretoken.native import build as build_fused
from helpers import golden
from helpers.golden import LayerPlan
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import FAMILIES, VOCAB_SIZE, load_eager, save_model

REFUSED = ("gemma3n_text", "gemma4_text")  # layers that share keys and values, or carry several streams
CUT = [name for name in FAMILIES if name not in REFUSED]
TOLERANCE = 6e-5  # in units of the spread, as for whole forwards
TEXT = golden.tokens_of(1, 23, VOCAB_SIZE)


@pytest.fixture(scope="module", params=CUT)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LanguageModel, Any]:
    folder = save_model(request.param, tmp_path_factory.mktemp(request.param))
    return load(folder, device="cpu"), load_eager(folder)


class Reader:
    """Reads one text, in spans of layers."""

    def __init__(self, model: LanguageModel, plan: Any = DensePlan) -> None:
        self.model = model
        self.plan = plan
        self.cache = model.new_cache(1)
        self.cache.acquire()

    def read(self, tokens: list[int], span: Span | None, wanted: int | None = None, top: int = 0) -> Output:
        """A chunk after the committed rows; nothing is committed."""
        batch = PackedBatch()
        self.cache.reserve(0, len(tokens))
        count = len(tokens) if wanted is None else wanted
        batch.add_chunk(0, self.cache.lengths[0], tokens, wanted=count)
        return self.model.forward(batch, self.plan(self.cache, batch), top=top, span=span)


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().std())


def in_two(model: LanguageModel, cut: int, plan: Any = DensePlan) -> tuple[Tensor, Tensor]:
    """Logits of the text in two spans (the second half of the rows after the first), and the cut's hidden states."""
    reader = Reader(model, plan)
    logits, hidden = [], []
    for tokens in (TEXT[:9], TEXT[9:]):
        low = reader.read(tokens, Span(0, cut, taps=(cut,)), wanted=0)
        assert low.logits_MV.shape[0] == 0
        hidden.append(low.hidden[cut].clone())
        logits.append(reader.read(tokens, Span(cut, model.num_layers, hidden[-1])).logits_MV.clone())
        reader.cache.commit(0, range(len(tokens)))
    return torch.cat(logits), torch.cat(hidden)


def whole(model: LanguageModel, plan: Any = DensePlan) -> Tensor:
    reader = Reader(model, plan)
    logits = []
    for tokens in (TEXT[:9], TEXT[9:]):
        logits.append(reader.read(tokens, None).logits_MV.clone())
        reader.cache.commit(0, range(len(tokens)))
    return torch.cat(logits)


def test_two_spans_are_the_whole_at_every_cut(pair: tuple[LanguageModel, Any]) -> None:
    model, reference = pair
    check_spans(model)
    with torch.inference_mode():
        states = reference(torch.tensor([TEXT]), use_cache=False, output_hidden_states=True).hidden_states
    for plan in (DensePlan, LayerPlan):
        expected = whole(model, plan)
        for cut in range(1, model.num_layers):
            found, hidden = in_two(model, cut, plan)
            if model.native_decoder is not None and plan is DensePlan:
                assert torch.equal(found, expected)
            else:
                assert probe.same(found, expected)
                assert error(found, expected) < TOLERANCE
            assert error(hidden, states[cut][0]) < TOLERANCE


def test_taps_and_early_exits_are_the_library_s(pair: tuple[LanguageModel, Any]) -> None:
    """All depths at once; some rows only; norm and head over them, in a forward and by score."""
    model, reference = pair
    layers = model.num_layers
    captured: dict[str, Tensor] = {}
    parts = anatomy.find(reference)
    hook = parts.layers[-1].register_forward_hook(lambda *args: captured.update(last=args[-1]))
    with torch.inference_mode():
        output = reference(torch.tensor([TEXT]), use_cache=False, output_hidden_states=True)
    hook.remove()
    states = [each[0] for each in output.hidden_states[:-1]]
    states.append(captured["last"][0])

    depths = tuple(range(1, layers + 1))
    tapped = Reader(model).read(TEXT, Span(0, layers, taps=depths)).hidden
    some = Reader(model).read(TEXT, Span(0, layers, taps=depths, tap_rows=[2, 7, 22]), wanted=1).hidden
    assert set(tapped) == set(some) == set(depths)
    for depth in depths:
        assert error(tapped[depth], states[depth]) < TOLERANCE
        # the library's products round by their number of rows
        assert error(some[depth], tapped[depth][[2, 7, 22]]) < (
            1e-12 if model.native_decoder is not None else TOLERANCE
        )

    for depth in depths:
        early = Reader(model).read(TEXT, Span(0, depth), top=3)
        expected = exit_logits(reference, states, depth)
        assert error(early.logits_MV, expected) < TOLERANCE
        scored = model.score(tapped[depth], top=3)
        assert error(scored.logits_MV, early.logits_MV) < TOLERANCE
        if model.native_decoder is not None:
            assert torch.equal(scored.logits_MV, early.logits_MV)
            assert list(scored.top_ids) == list(early.top_ids)
        assert list(scored.best) == scored.logits_MV.argmax(-1).tolist() == list(scored.top_ids[::3])

    with torch.inference_mode():
        normed = parts.final_norm(tapped[2].to(model.dtype))
    assert error(model.score(normed, final_norm=False).logits_MV, exit_logits(reference, states, 2)) < TOLERANCE
    # it can fail: these rows have not been normed
    assert error(model.score(tapped[2], final_norm=False).logits_MV, exit_logits(reference, states, 2)) > 1e-2


def exit_logits(reference: Any, states: list[Tensor], depth: int) -> Tensor:
    """What the library's own model says when its last layers return their input."""
    parts = anatomy.find(reference)
    handle = parts.final_norm.register_forward_pre_hook(lambda module, args: (states[depth][None],))
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([TEXT]), use_cache=False).logits[0]
    handle.remove()
    return logits


def test_rows_times_layers_are_counted(pair: tuple[LanguageModel, Any]) -> None:
    model, _ = pair
    before = model.layer_rows
    check_spans(model)
    assert model.layer_rows == before
    reader = Reader(model)
    reader.read(TEXT, None)
    low = reader.read(TEXT, Span(0, 1, taps=(1,)))
    model.score(low.hidden[1])
    assert model.layer_rows - before == len(TEXT) * (model.num_layers + 1)


def test_the_model_is_left_as_it_was(pair: tuple[LanguageModel, Any]) -> None:
    """Also after a span that failed."""
    model, _ = pair
    expected = whole(model, LayerPlan)
    with pytest.raises(Exception, match=r".+"):
        Reader(model, LayerPlan).read(TEXT, Span(1, model.num_layers, torch.zeros(len(TEXT), 7)))
    assert torch.equal(whole(model, LayerPlan), expected)


# ------------------------------------------------------------------ the native decoder


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, one_thread: None) -> Iterator[int]:  # noqa: F811
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.covering(1)
@pytest.mark.skipif(build_fused.library() is None, reason="no C compiler on this machine: the native path is off")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3_window"])
def test_fused_spans_are_bit_equal(name: str, dtype: str, threads: int, tmp_path: Path) -> None:
    """In chunks, with taps or without, on one thread or two, from a copy of the hidden states."""
    model = load(save_model(name, tmp_path), dtype=dtype, device="cpu")
    assert model.native_decoder is not None
    torch.set_num_threads(1)
    expected = whole(model)
    depths = tuple(range(1, model.num_layers + 1))
    tapped = Reader(model).read(TEXT, Span(0, model.num_layers, taps=depths))
    torch.set_num_threads(threads)
    for cut in range(1, model.num_layers):
        found, hidden = in_two(model, cut)
        assert hidden.dtype == torch.float32
        assert torch.equal(found, expected)
        assert torch.equal(hidden, tapped.hidden[cut])
        assert torch.equal(model.score(hidden).logits_MV, Reader(model).read(TEXT, Span(0, cut)).logits_MV)
    assert torch.equal(model.score(tapped.hidden[model.num_layers]).logits_MV, tapped.logits_MV)


@pytest.mark.skipif(build_fused.library() is None, reason="no C compiler on this machine: the native path is off")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_go_on_from_what_the_fused_decoder_began(dtype: str, tmp_path: Path) -> None:
    """A plan that is not dense verifies through the library what dense drafting began."""
    model = load(save_model("qwen2", tmp_path), dtype=dtype, device="cpu")
    reader = Reader(model)
    expected = reader.read(TEXT, None).logits_MV.float().clone()
    hidden = reader.read(TEXT, Span(0, 2, taps=(2,)), wanted=0).hidden[2]
    reader.plan = LayerPlan
    found = reader.read(TEXT, Span(2, model.num_layers, hidden)).logits_MV
    assert error(found, expected) < (TOLERANCE if dtype == "float32" else 0.1)


# ------------------------------------------------------------------ what cannot be cut


def test_one_layer_is_refused(tmp_path: Path) -> None:
    model = load(save_model("llama", tmp_path, num_hidden_layers=1), device="cpu")
    with pytest.raises(UnsupportedArchitecture, match="has one layer"):
        check_spans(model)


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_share_are_refused(name: str, tmp_path: Path) -> None:
    model = load(save_model(name, tmp_path), device="cpu")
    with pytest.raises(UnsupportedArchitecture, match=r"cannot draft for itself: ."):
        check_spans(model)


class Pairs(nn.Module):
    """A layer that gives more than the hidden states."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.inner(*args, **kwargs), None)


class Remembers(nn.Module):
    """A layer that adds what another one noted next to the residual stream."""

    def __init__(self, inner: nn.Module, notes: list[Tensor], writes: bool) -> None:
        super().__init__()
        self.inner = inner
        self.notes, self.writes = notes, writes

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        if self.writes:
            self.notes[:] = [hidden_states]
            return self.inner(hidden_states, **kwargs)
        return self.inner(hidden_states + (self.notes[0] if self.notes else 0.0), **kwargs)


@pytest.fixture
def layered(tmp_path: Path) -> LanguageModel:
    """Through the library's layers; three of them."""
    return load(save_model("llama_odd_heads", tmp_path), device="cpu")


def test_layers_of_several_kinds_are_refused(layered: LanguageModel) -> None:
    layers = anatomy.find(layered.model).layers
    layers[0] = Remembers(layers[0], [], writes=True)
    with pytest.raises(UnsupportedArchitecture, match="not all of one kind"):
        check_spans(layered)


def test_layers_that_give_tuples_are_refused(layered: LanguageModel) -> None:
    layers = anatomy.find(layered.model).layers
    for number, layer in enumerate(layers):
        layers[number] = Pairs(layer)
    with pytest.raises(UnsupportedArchitecture, match="cannot draft for itself"):
        check_spans(layered)


def test_state_outside_the_hidden_states_is_refused(layered: LanguageModel) -> None:
    layers = anatomy.find(layered.model).layers
    notes: list[Tensor] = []
    for number, layer in enumerate(layers):
        layers[number] = Remembers(layer, notes, writes=number == 0)
    anatomy.find(layered.model).body.register_forward_pre_hook(lambda *args: notes.clear())
    with pytest.raises(UnsupportedArchitecture, match="give something else than all of them"):
        check_spans(layered)
