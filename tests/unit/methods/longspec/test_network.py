"""Serving and training compute the paper's forward pass; what a row sees; which targets and heads are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from foretoken.core.draft import Draft
from foretoken.core.errors import ConfigError, MismatchError, ModelError, UnsupportedArchitecture
from foretoken.core.protocols import Budget
from foretoken.core.tree import ROOT
from foretoken.drafting.learned_part import find
from foretoken.forward import anatomy, target_kv
from foretoken.forward.batch import PackedBatch
from foretoken.forward.native_plan import NativePlan
from foretoken.forward.span import Span
from foretoken.methods.longspec.drafter import LongSpecDrafter
from foretoken.methods.longspec.native.target_layer import TargetPrefix
from foretoken.methods.longspec.network import LongSpec, LongSpecConfig
from foretoken.methods.longspec.runner import Level, Runner
from foretoken.methods.longspec.train import KeyedTarget, read
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load, load_as_is
from foretoken.train.replies import Replies
from helpers.golden import Session, tokens_of
from helpers.requests import make_request
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.untrained import random_part, untrained

WINDOW, LEVELS, PROMPT = 6, 4, 40
SHAPES: dict[str, dict[str, Any]] = {"chain": {}, "tree": {"tree": True, "width": 4}}


@pytest.fixture(scope="module", params=["llama_rope_yarn", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return load(save_model(request.param, tmp_path_factory.mktemp("tiny"), intermediate_size=128), device="cpu")


@pytest.fixture(scope="module")
def head(model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("head")
    return Path(untrained(LongSpec, model, place, window=WINDOW, levels=LEVELS))


class Drafting:
    """A drafter over a prompt that a model has read, and the scores of the last draft, row by row."""

    def __init__(
        self, model: LanguageModel, head: Path, length: int = PROMPT, piece: int = 1000, **options: Any
    ) -> None:
        self.drafter = LongSpecDrafter(LongSpecDrafter.Config(head=str(head), **options), model)
        self.session = Session(model)
        self.drafter.attach(self.session.cache)
        self.request = make_request(tokens_of(1, length, 100), vocab_size=model.vocab_size, max_tokens=50)
        self.request.slot = self.session.cache.acquire()
        for begin in range(0, length - 1, piece):
            self.session.chunk(self.request.slot, self.request.tokens[begin : min(begin + piece, length - 1)], wanted=1)
        self.logits: list[Tensor] = []
        inner = self.drafter._runner.read

        def watched(levels: Sequence[Any], cache: Any, **options: Any) -> Any:
            found = inner(levels, cache, **options)
            for each in found:
                self.logits += list(each.output.logits_MV.clone())
            return found

        self.drafter._runner.read = watched

    def count_calls(self) -> list[int]:
        """Notes from now on how many levels every call reads."""
        calls: list[int] = []
        inner = self.drafter._runner.read

        def counted(*arguments: Any, **options: Any) -> Any:
            found = inner(*arguments, **options)
            calls.append(len(found))
            return found

        self.drafter._runner.read = counted  # type: ignore[method-assign]
        return calls

    def draft(self, nodes: int = 60, depth: int = LEVELS) -> Draft:
        self.logits.clear()
        (found,) = self.drafter.propose([self.request], [Budget(nodes, depth)])
        return found


# ------------------------------------------------------------------ every implementation is LongSpec.forward


def paper(model: LanguageModel, head: Path, tokens: list[int], known: list[int]) -> Tensor:
    """Logits of the plain forward pass for a text, [T, V], from the K*, V* of the library's own forward."""
    net, library = LongSpec.load(head), load_as_is(str(model.source)).model.eval()
    ids_1T, positions_T = torch.tensor([tokens]), torch.arange(len(tokens))
    cache = DynamicCache(config=library.config)
    with torch.no_grad():
        library(input_ids=ids_1T, use_cache=True, **{anatomy.cache_argument(library): cache})
        layer = cache.layers[net.config.layer]
        cos_1Td, sin_1Td = library.model.rotary_emb(torch.zeros(1), positions_T[None])
        cos_Th, sin_Th = (each[0, :, : each.shape[-1] // 2] for each in (cos_1Td, sin_1Td))
        e_TW = library.get_input_embeddings()(ids_1T)[0]
        out_TW = net(e_TW, cos_Th, sin_Th, layer.keys[0], layer.values[0], torch.tensor(known))
        return cast(Tensor, library.get_output_embeddings()(out_TW))


def drafted_difference(model: LanguageModel, head: Path, shape: str, implementation: str) -> float:
    """Largest difference between the rows of a draft and the plain forward along each node's own path."""
    drafting = Drafting(model, head, **SHAPES[shape])
    if implementation == "torch":
        drafting.drafter._runner._native = None
    elif drafting.drafter._runner._native is None:
        pytest.skip("this machine has no native decoder")
    draft = drafting.draft()
    prompt = drafting.request.tokens
    root = len(prompt) - 1
    inner = [node for node in range(len(draft)) if draft.tree.depths[node] < LEVELS]
    assert len(drafting.logits) == 1 + len(inner)
    worst = 0.0
    for row, node in enumerate([ROOT, *inner]):
        path: list[int] = []
        while node != ROOT:
            path, node = [draft.tree.tokens[node], *path], draft.tree.parents[node]
        tokens = [*prompt, *path]
        expected = paper(model, head, tokens, [min(place, root) for place in range(len(tokens))])[-1]
        worst = max(worst, float((drafting.logits[row] - expected).abs().max()))
    return worst


def trained_difference(model: LanguageModel, head: Path, gap: int, error: int = 0) -> float:
    """Largest difference between training's rows at a gap and the plain forward.

    Args:
        error: planted: training hides so many keys more.
    """
    loaded = load_as_is(str(model.source))
    target = KeyedTarget(loaded.model, "it", Replies(loaded.tokenizer))
    tokens = tokens_of(1, PROMPT, 100)
    positions_1T = torch.arange(PROMPT)[None]
    batch = target.batch(torch.tensor([tokens]), positions_1T)
    with torch.no_grad():
        found = target.logits(read(LongSpec.load(head), target, batch, positions_1T, [gap + error])[0])
    expected = paper(model, head, tokens, [max(0, place - gap + 1) for place in range(PROMPT)])
    return float((found - expected).abs().max())


every_implementation = pytest.mark.parametrize("implementation", ["native", "torch"])


@pytest.mark.covering(1)
@every_implementation
@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_of_a_draft_is_the_paper_s_forward(
    shape: str, implementation: str, model: LanguageModel, head: Path
) -> None:
    """With rings that have wrapped around, and, in a tree, along every node's own path."""
    assert drafted_difference(model, head, shape, implementation) < 1e-5


@pytest.mark.parametrize("gap", [1, LEVELS])
def test_every_row_of_training_is_the_paper_s_forward(gap: int, model: LanguageModel, head: Path) -> None:
    assert trained_difference(model, head, gap) < 1e-5
    assert trained_difference(model, head, gap, error=1) > 1e-3


@every_implementation
@pytest.mark.parametrize("fault", ["one target key fewer", "one own key fewer", "one position later"])
def test_a_planted_fault_is_far_from_the_paper_s_forward(
    fault: str, implementation: str, model: LanguageModel, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Runner.read

    def faulty(self: Runner, levels: Sequence[Level], *arguments: Any, **options: Any) -> Any:
        for level in levels:
            level.root -= fault == "one target key fewer"
            level.depth += fault in ("one target key fewer", "one position later")
        return inner(self, levels, *arguments, **options)

    if fault == "one own key fewer":
        monkeypatch.setattr(LongSpecConfig, "seen", property(lambda config: config.window))
    monkeypatch.setattr(Runner, "read", faulty)
    monkeypatch.setattr("foretoken.methods.longspec.drafter.prefetch_plan", lambda active, scored: [])
    assert drafted_difference(model, head, "chain", implementation) > 1e-3


def test_it_sees_the_keys_before_the_root_and_no_others(model: LanguageModel, head: Path) -> None:
    found = []
    for place in (None, PROMPT - 1, PROMPT - 2):
        drafting = Drafting(model, head)
        keys, values = (each[2] for each in (drafting.session.cache.keys, drafting.session.cache.values))
        assert keys is not None
        assert values is not None
        if place is not None:
            slot = drafting.request.slot
            keys[slot, :, place] += 3.0
            values[slot, :, place] += 3.0
            if place == PROMPT - 1:  # the root's own place, and all after it
                keys[slot, :, place:], values[slot, :, place:] = 7.0, 7.0
        drafting.draft()
        found.append(torch.stack(drafting.logits))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2], atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_level_reads_all_keys_before_the_root(shape: str, model: LanguageModel, head: Path) -> None:
    plain = Drafting(model, head, **SHAPES[shape])
    plain.draft()
    for place in (0, 15, 16, PROMPT // 2, PROMPT - 2):
        drafting = Drafting(model, head, **SHAPES[shape])
        (values,) = (each[2] for each in (drafting.session.cache.values,))
        assert values is not None
        values[drafting.request.slot, :, place] += 1e-3  # too little for other tokens to be drafted
        drafting.draft()
        assert len(drafting.logits) == len(plain.logits) >= LEVELS
        assert not any(torch.equal(*rows) for rows in zip(drafting.logits, plain.logits, strict=True))


def test_a_chain_at_once_is_its_levels_one_by_one(model: LanguageModel, head: Path, monkeypatch: Any) -> None:
    """To the bit, and to rounding what the network's own arithmetic gives."""
    if model.native_decoder is None:
        pytest.skip("several levels are one call next to a fused target")
    once, apart, written_out = (Drafting(model, head) for _ in range(3))
    calls = once.count_calls(), apart.count_calls()
    drafts = [once.draft()]
    monkeypatch.setattr("foretoken.methods.longspec.drafter.prefetch_plan", lambda active, scored: [])
    written_out.drafter._runner._native = None
    drafts += [apart.draft(), written_out.draft()]
    assert [len(each) for each in calls] == [1, LEVELS]
    assert all(each.tree.tokens == drafts[0].tree.tokens for each in drafts)
    assert torch.equal(torch.stack(once.logits), torch.stack(apart.logits))
    torch.testing.assert_close(torch.stack(once.logits), torch.stack(written_out.logits), rtol=1e-4, atol=1e-5)


def test_tiles_that_the_target_has_laid_out_are_read_where_they_lie(model: LanguageModel, head: Path) -> None:
    """A prompt in pieces has whole committed tiles, one read at once has none: the same bits."""
    found = []
    for piece in (1000, 9):
        drafting = Drafting(model, head, piece=piece)
        drafting.draft()
        found.append(torch.stack(drafting.logits))
    assert torch.equal(*found)


def test_the_ring_is_as_good_as_a_cache_of_everything(model: LanguageModel, head: Path, tmp_path: Path) -> None:
    """Under the window: the same drafts from a ring that is larger than the text."""
    whole = LongSpec.load(head)
    settings = json.loads((head / "config.json").read_text())
    found = []
    for window in (WINDOW, 3 * PROMPT):
        place = tmp_path / str(window)
        whole.save(place)
        (place / "config.json").write_text(json.dumps({**settings, "window": window}))
        drafting = Drafting(model, place, length=WINDOW - LEVELS + 1)
        drafting.draft()
        found.append(torch.stack(drafting.logits))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    beyond = [Drafting(model, tmp_path / str(window)) for window in (WINDOW, 3 * PROMPT)]
    for each in beyond:
        each.draft()
    assert not torch.allclose(beyond[0].logits[0], beyond[1].logits[0], atol=1e-3)


def test_the_angles_are_the_target_s(model: LanguageModel) -> None:
    """The factor that YaRN puts on them is in them."""
    keys = target_kv.find(model.model, model.name)
    cos, sin = keys.angles(torch.arange(100))
    size = (cos**2 + sin**2).sqrt()
    scaling = model.model.model.rotary_emb.attention_scaling
    torch.testing.assert_close(size, torch.full_like(size, scaling))
    assert (scaling > 1.01) == ("yarn" in str(model.config.rope_parameters))
    assert keys.layer == 2


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("mistral", "has no layer of full attention: all of its 3 layers see a window of 5 positions"),
        ("gpt2", "is of type 'gpt2': the angles of its keys are not known"),
        ("cohere2", "is of type 'cohere2'"),
    ],
)
def test_targets_that_do_not_fit_are_refused(family: str, message: str, tmp_path: Path) -> None:
    target = load(save_model(family, tmp_path), device="cpu")
    with pytest.raises(UnsupportedArchitecture, match=message):
        random_part(LongSpec, target)
    with pytest.raises(UnsupportedArchitecture, match=message):  # before a head is missed
        LongSpecDrafter(LongSpecDrafter.Config(), target)


def test_the_last_layer_of_full_attention_is_read(tmp_path: Path) -> None:
    target = load(save_model("qwen3_window", tmp_path), device="cpu")
    assert target_kv.find(target.model, "it").layer == 1


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    ours, other = (load(save_model("llama", tmp_path / str(seed), seed=seed), device="cpu") for seed in range(2))
    untrained(LongSpec, other, tmp_path / "head", window=WINDOW)
    with pytest.raises(MismatchError, match="train one with 'foretoken train longspec --target"):
        find(LongSpec, str(tmp_path / "head"), ours)
    with pytest.raises(ModelError, match=r"no LongSpec head for .* make one with 'foretoken train longspec"):
        find(LongSpec, None, ours)


def damage(place: Path, what: str) -> None:
    settings = json.loads((place / "config.json").read_text())
    weights = load_file(place / "model.safetensors")
    if what == "a field":
        settings["window"] = 0
    elif what == "a tensor":
        del weights["far_q_proj.weight"]
    elif what == "a shape":
        weights["o_proj.weight"] = weights["o_proj.weight"][:-1]
    elif what == "a layer":
        settings["layer"] = 0
    elif what == "cut":
        (place / "model.safetensors").write_bytes((place / "model.safetensors").read_bytes()[:-100])
        return
    (place / "config.json").write_text(json.dumps(settings))
    save_file(weights, place / "model.safetensors")


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("a field", ModelError, "window=0"),
        ("a tensor", ModelError, "cannot be read"),
        ("a shape", ModelError, "cannot be read"),
        ("cut", ModelError, "cannot be read"),
        ("a layer", MismatchError, "layer is 0, but that of .* is 2"),
    ],
)
def test_damaged_folders_are_named(what: str, kind: Any, message: str, tmp_path: Path) -> None:
    target = load(save_model("llama", tmp_path / "model"), device="cpu")
    untrained(LongSpec, target, tmp_path / "head", window=WINDOW)
    damage(tmp_path / "head", what)
    with pytest.raises(kind, match=message):
        LongSpecDrafter(LongSpecDrafter.Config(head=str(tmp_path / "head")), target)


def test_a_cache_without_keys_is_refused(model: LanguageModel, head: Path) -> None:
    drafter = LongSpecDrafter(LongSpecDrafter.Config(head=str(head)), model)
    cache = model.new_cache(1)
    cache.keeps_keys = False
    with pytest.raises(ConfigError, match="keeps a state instead"):
        drafter.attach(cache)


@pytest.mark.parametrize("options", [{"max_depth": 0}, {"width": 65}, {"tree": 1}, {"head": 5}, {"max_depth": True}])
def test_bad_options_are_named(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        LongSpecDrafter.Config(**options)


def test_nothing_is_drafted_where_the_head_was_never_trained(model: LanguageModel, tmp_path: Path) -> None:
    """Positions beyond those of the training: a draft ends before them."""
    place = Path(untrained(LongSpec, model, tmp_path, window=WINDOW, levels=LEVELS, max_length=PROMPT + 2))
    assert len(Drafting(model, place).draft()) == 2
    assert len(Drafting(model, place, length=PROMPT + 2).draft()) == 0


def test_reads_of_the_target_s_cache_are_checked(model: LanguageModel, head: Path) -> None:
    if model.native_decoder is None:
        pytest.skip("native code is next to a fused target")
    drafting = Drafting(model, head)
    native, ring = drafting.drafter._runner._native, drafting.drafter.ring
    assert native is not None
    batch, cache = PackedBatch(), drafting.session.cache
    batch.add_chunk(ring.acquire(), 0, [5], wanted=1)
    for prefixes, message in (
        ([TargetPrefix(drafting.request.slot, PROMPT)], f"prefix.length={PROMPT}: 0 to {PROMPT - 1}"),
        ([TargetPrefix(99, 1)], "prefix.slot=99"),
        ([TargetPrefix(-1, 1)], "prefix.slot=-1"),
        ([], "0 of 1 segments"),
    ):
        with pytest.raises(ValueError, match=message):
            native.passes(batch, ring.cache, prefixes, cache, top=1)
    with pytest.raises(ValueError, match=r"run by CrossAttentionDecoder\.passes"):
        native.forward(batch, NativePlan(ring.cache), Span(0, 2), top=1)
    other = LongSpec.load(head)
    other.config = replace(other.config, layer=9)
    with pytest.raises(ValueError, match="layer=9: 0 to 2"):
        drafting.drafter._runner._described(other, model.native_decoder)


def test_a_prompt_of_one_token_sees_no_keys(model: LanguageModel, head: Path) -> None:
    """Nothing to see gives zeros, natively as it is written out."""
    native, written_out = (Drafting(model, head, length=1) for _ in range(2))
    written_out.drafter._runner._native = None
    drafts = native.draft(), written_out.draft()
    assert drafts[0].tree.tokens == drafts[1].tree.tokens
    torch.testing.assert_close(torch.stack(native.logits), torch.stack(written_out.logits), rtol=1e-4, atol=1e-5)
