"""A tree that is grown in one native call equals that of its levels, so drafts do not depend on the implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretoken.core.errors import InputError
from foretoken.core.protocols import Budget
from foretoken.core.tree import ROOT
from foretoken.drafting.feature_heads.native.checks import Extent
from foretoken.drafting.feature_heads.runner import NativeNetwork, Runner
from foretoken.drafting.reranked_tree import RerankedBuilder
from foretoken.forward.batch import PackedBatch
from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.methods.eagle.drafter import EagleDrafter
from foretoken.models.language_model import LanguageModel
from foretoken.options.sampling import SamplingParams
from helpers.golden import tokens_of
from helpers.pairs import DTYPES, HEADS, Hashed, Read
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.untrained import random_part, untrained
from helpers.zoo_llms import with_config


def recorded(read: Read, draft: int, extent: Extent, width: int, top: int) -> RerankedBuilder:
    """One draft, a forward for each level: as drafting/feature_heads/drafter.py grows it, but alone."""
    budget = Budget(extent.most, extent.deepest, least_reach=extent.least)
    builder = RerankedBuilder(SimpleNamespace(laws=SimpleNamespace(trivial=True)), budget)  # type: ignore[arg-type]
    segment = read.first.segments[draft]
    batch, rows = PackedBatch(), slice(segment.start, segment.start + segment.num_rows)
    batch.add_chunk(draft, segment.prefix, read.first.tokens[rows], wanted=1)
    g_TW, place = read.g_TW[rows], dict[int, int]()
    while True:
        output, following_MW = read.run.forward(batch, read.cache, g_TW, top=top)
        if builder.frontier == [ROOT]:
            read.cache.commit(draft, range(segment.num_rows))
        builder.record_level(output, 0, width=width, name="it")
        if not builder.frontier:
            break
        row_of = {node: row for row, node in enumerate(builder.expanded)}
        batch, tail = PackedBatch(), len(place)
        batch.add_level(
            draft,
            read.cache.lengths[draft],
            [builder.tokens[node] for node in builder.frontier],
            depths=[builder.depths[node] - 1 for node in builder.frontier],
            tail=tail,
            tail_depths=[builder.depths[node] - 1 for node in place],
            ancestors=[[place[each] for each in builder.ancestors(node)] for node in builder.frontier],
        )
        place |= {node: tail + row for row, node in enumerate(builder.frontier)}
        g_TW = following_MW[[row_of[builder.parents[node]] for node in builder.frontier]]
    builder.rerank()
    return builder


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(HEADS)),
    dtype=st.sampled_from(DTYPES),
    table=st.booleans(),
    drafts=st.lists(
        st.tuples(
            st.integers(0, 40),
            st.integers(1, 5),
            st.builds(Extent, st.integers(1, 24), st.integers(1, 5), st.sampled_from([0.0, 0.0, 1e-4, 0.01])),
        ),
        min_size=1,
        max_size=3,
    ),
    width=st.integers(1, 6),
    narrower=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_a_tree_is_that_of_its_levels(
    name: str,
    dtype: str,
    table: bool,
    drafts: list[tuple[int, int, Extent]],
    width: int,
    narrower: int,
    seed: int,
    runners: dict[tuple[str, str, bool], Runner],
) -> None:
    run, top = runners[name, dtype, table], max(1, width - narrower)
    prefixes, rows, extents = zip(*drafts, strict=True)
    levels, whole = (Read(run, prefixes, rows, seed) for _ in range(2))
    found = run.several.trees(whole.first, whole.cache, whole.g_TW, extents=extents, width=width, top=top)
    for draft, (tree, extent) in enumerate(zip(found, extents, strict=True)):
        expected = recorded(levels, draft, extent, width, top)
        assert (list(tree.tokens), list(tree.parents)) == (expected.tokens, expected.parents)
        assert list(tree.shares) == expected.confidence
        assert not tree.damaged
    for ours, theirs in zip(whole.kept(whole.ends), levels.kept(levels.ends), strict=True):
        assert torch.equal(ours, theirs)
    # nothing is left of the trees: other rows in their places have the same bits as without them
    never = Read(run, prefixes, rows, seed)
    run.forward(never.first, never.cache, never.g_TW, top=0)
    batch = PackedBatch()
    for draft, end in enumerate(never.ends):
        batch.add_chunk(draft, end, tokens_of(seed + 50 + draft, 25, 100), wanted=1)
    others_TW = torch.randn(len(batch), 64, generator=torch.Generator().manual_seed(seed))
    after, without = (run.forward(batch, each.cache, others_TW, top=0)[0] for each in (whole, never))
    assert torch.equal(after.logits_MV, without.logits_MV)


def test_of_equal_paths_the_elder_stands(models: dict[str, LanguageModel]) -> None:
    """Every token has a twin of the same rows, so that all paths come in equal pairs, and budgets cut through them."""
    head = random_part(Eagle, models["float32"]).with_rows_of(models["float32"].model)
    assert head.lm_head is not None
    assert head.embed_tokens is not None
    with torch.no_grad():
        for table in (head.lm_head, head.embed_tokens):
            table.weight[50:100] = table.weight[:50]
    run = Runner(models["float32"], head)
    for most in range(1, 25):
        extent = Extent(most, 4, 0.0)
        levels, whole = (Read(run, [5], [2], most % 4) for _ in range(2))
        (tree,) = run.several.trees(whole.first, whole.cache, whole.g_TW, extents=[extent], width=4, top=4)
        expected = recorded(levels, 0, extent, 4, 4)
        assert (list(tree.tokens), list(tree.parents)) == (expected.tokens, expected.parents)
        assert most == 1 or len(set(expected.reach)) < most


@pytest.mark.parametrize("case", ["no rule", "rules", "few tokens", "penalties", "drawn"])
def test_drafts_are_those_of_one_level_after_the_other(
    case: str, models: dict[str, LanguageModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, parents, confidences and calls of the stop rule, in a batch."""
    model = models["bfloat16"]
    place = untrained(Eagle, model, tmp_path / "head", **({"draft_vocab_size": 60} if case == "few tokens" else {}))
    found: list[Any] = []
    at_once, grow = list[int](), NativeNetwork.trees

    def counted(self: NativeNetwork, batch: PackedBatch, *arguments: Any, **named: Any) -> Any:
        at_once.append(len(batch.segments))
        return grow(self, batch, *arguments, **named)

    monkeypatch.setattr(NativeNetwork, "trees", counted)
    for prefetch in (True, False):
        if not prefetch:
            monkeypatch.setattr(Runner, "several", None)
        drafter = EagleDrafter(EagleDrafter.Config(head=place, tree=True, width=4, max_depth=4), model)
        propose, seen = drafter.propose, list[Any]()

        def recording(contexts: Sequence[Any], budgets: Sequence[Any], propose: Any = propose, seen: Any = seen) -> Any:
            rules = [Hashed(None) if case == "rules" else None for _ in budgets]
            ruled = [replace(budget, stop_rule=rule) for budget, rule in zip(budgets, rules, strict=True)]
            drafts = propose(contexts, ruled)
            seen.append([(each.tree.tokens, each.tree.parents, each.confidence) for each in drafts])
            seen.append([rule and rule.asked for rule in rules])
            return drafts

        monkeypatch.setattr(drafter, "propose", recording)
        llm = with_config({"method": drafter, "num_speculative_tokens": 9}, target=model, max_num_seqs=3)
        params = SamplingParams(
            max_tokens=20,
            temperature=float(case == "drawn"),
            repetition_penalty=1.3 if case == "penalties" else 1.0,
            seed=3,
            ignore_eos=True,
        )
        prompts = [{"prompt_token_ids": tokens_of(seed, 5 + 9 * seed, 100)} for seed in range(4)]
        outputs = llm.generate(prompts, params)
        found.append((seen, [each.token_ids for each in outputs]))
    assert found[0] == found[1]
    nodes = [len(tokens) for drafts in found[0][0][::2] for tokens, *_ in drafts]
    assert sum(nodes) > 40
    assert (max(at_once, default=0) > 1) == (case in ("no rule", "rules", "few tokens"))


def test_logits_that_are_no_numbers_end_a_request(models: dict[str, LanguageModel], tmp_path: Path) -> None:
    model = models["float32"]
    head = random_part(Eagle, model)
    with torch.no_grad():
        head.norm.weight[3] = torch.nan
    run = Runner(model, head)
    read = Read(run, [3], [2], 1)
    (tree,) = run.several.trees(read.first, read.cache, read.g_TW, extents=[Extent(5, 3, 0.0)], width=4, top=4)
    assert (tree.damaged, list(tree.tokens)) == (True, [])
    drafter = EagleDrafter(EagleDrafter.Config(head=untrained(Eagle, model, tmp_path / "head"), tree=True), model)
    drafter._runner = run
    llm = with_config({"method": drafter, "num_speculative_tokens": 5}, target=model)
    (output,) = llm.generate(
        [{"prompt_token_ids": tokens_of(1, 9, 100)}], SamplingParams(max_tokens=9, ignore_eos=True)
    )
    assert "its logits are NaN" in str(output.error)


def test_what_does_not_fit_is_refused(runners: dict[tuple[str, str, bool], Runner]) -> None:
    """Before anything native is called."""
    run = runners["eagle3", "float32", True]
    assert run._native is not None
    pairs = run._native.pairs
    assert pairs is not None
    small = Extent(4, 3, 0.0)

    def refused(message: str, error: type[Exception] = ValueError, **changes: Any) -> None:
        read = Read(run, [4], [2], 1)
        read.first.tokens[0] = changes.pop("token", read.first.tokens[0])
        if changes.pop("no wanted", False):
            read.first.wanted.clear()
        fields: dict[str, Any] = {"extents": [small], "width": 4, "top": 4, **changes}
        with pytest.raises(error, match=message):
            pairs.trees(read.first, read.cache, fields.pop("features", read.g_TW), **fields)

    refused("token 9999 is not in the embedding", InputError, token=9999)
    refused("ids_C is", ids_C=torch.arange(40))
    refused("trees of 5 of 4", top=5)
    refused("trees of 0 of 4", top=0)
    refused("2 trees", extents=[small] * 2)
    refused("grow from rows", **{"no wanted": True})
    refused("growth.most=0", extents=[small._replace(most=0)])
    refused("growth.deepest=0", extents=[small._replace(deepest=0)])
    refused("the capacity of the cache is 96", extents=[small._replace(deepest=24)])
    refused("entering_TD", features=torch.randn(2, 32))
