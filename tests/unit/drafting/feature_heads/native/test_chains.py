"""Passes that are made in one native call have the bits of passes made one by one, and drafts do not depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretoken.core.errors import InputError
from foretoken.core.randomness import Streams
from foretoken.core.stop_rule import NO_LIMIT, Outlook
from foretoken.drafting.feature_heads.native.chains import Prefetch
from foretoken.drafting.feature_heads.runner import Runner
from foretoken.forward.batch import PackedBatch
from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.methods.eagle.drafter import EagleDrafter
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.golden import tokens_of
from helpers.pairs import DTYPES, HEADS, Hashed, Read
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.untrained import random_part, untrained
from helpers.zoo_llms import with_config


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(HEADS)),
    dtype=st.sampled_from(DTYPES),
    table=st.booleans(),
    drafts=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=3),
    top=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_a_chain_has_the_bits_of_its_passes(
    name: str,
    dtype: str,
    table: bool,
    drafts: list[tuple[int, int, int]],
    top: int,
    seed: int,
    runners: dict[tuple[str, str, bool], Runner],
) -> None:
    run = runners[name, dtype, table]
    prefixes, rows, most = zip(*drafts, strict=True)
    one, many = (Read(run, prefixes, rows, seed) for _ in range(2))
    prefetch = [Prefetch(count, (1.0,) * 10, -1.0, -1.0, 0) for count in most]
    made = run.several.passes(many.first, many.cache, many.g_TW, top=top, prefetch=prefetch)
    assert len(made) == max(most)
    batch, g_TW, active = one.first, one.g_TW, list(range(len(drafts)))
    for number, found in enumerate(made):
        assert list(found.drafts) == active
        output, following_MW = run.forward(batch, one.cache, g_TW, top=top)
        assert torch.equal(found.output.logits_MV, output.logits_MV)
        assert torch.equal(found.following_MW, following_MW)
        assert list(found.output.best) == list(output.best)
        assert list(found.output.top_ids) == list(output.top_ids)
        assert list(found.output.top_shares) == list(output.top_shares)
        assert number == 0 or list(found.tokens) == batch.tokens
        rows_on = [row for row, draft in enumerate(active) if number + 1 < most[draft]]
        batch, active = PackedBatch(), [active[row] for row in rows_on]
        for row, draft in zip(rows_on, active, strict=True):
            batch.add_chunk(draft, one.ends[draft] + number, [output.best[row]], wanted=1)
        g_TW = following_MW[rows_on]
    lengths = [end + count - 1 for end, count in zip(one.ends, most, strict=True)]
    for ours, theirs in zip(many.kept(lengths), one.kept(lengths), strict=True):
        assert torch.equal(ours, theirs)
    # nothing is left of a rejected draft: other rows in its places have the same bits as without it
    never = Read(run, prefixes, rows, seed)
    run.forward(never.first, never.cache, never.g_TW, top=0)
    batch = PackedBatch()
    for draft, end in enumerate(never.ends):
        batch.add_chunk(draft, end, tokens_of(seed + 50 + draft, 25, 100), wanted=1)
    others_TW = torch.randn(len(batch), 64, generator=torch.Generator().manual_seed(seed))
    after, expected = (run.forward(batch, each.cache, others_TW, top=0)[0] for each in (many, never))
    assert torch.equal(after.logits_MV, expected.logits_MV)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_draft_ends_where_its_rule_is_going_to_end_it(
    dtype: str, runners: dict[tuple[str, str, bool], Runner]
) -> None:
    """Of every pass: a node that its rule refuses is the last thing that is read."""
    run = runners["eagle3", dtype, True]
    all_of = Read(run, [9], [2], 5)
    whole = run.several.passes(
        all_of.first, all_of.cache, all_of.g_TW, top=1, prefetch=[Prefetch(6, (1.0,) * 10, -1.0, -1.0, 0)]
    )
    shares = [each.output.top_shares[0] for each in whole]
    tenths = tuple(0.5 + 0.05 * tenth for tenth in range(10))
    for free in (0, 2):
        for first, later in ((0.0, 0.0), (0.0, shares[0] * 0.6), (2.0, 0.0), (0.0, shares[0] * shares[1] * 0.6)):
            outlook, reach, expected = Outlook(tenths, first, later, free), 1.0, 1
            for node, share in enumerate(shares[:-1]):
                least = outlook.later if node else outlook.first
                if node >= free and not reach * tenths[min(9, int(share * 10))] > least:
                    break
                reach *= share
                expected += 1
            read = Read(run, [9], [2], 5)
            made = run.several.passes(
                read.first, read.cache, read.g_TW, top=1, prefetch=[Prefetch(6, tenths, first, later, free)]
            )
            assert len(made) == expected


OUTLOOKS: dict[str, Outlook | None] = {
    "everything": NO_LIMIT,
    "nothing": replace(NO_LIMIT, first=2.0, later=2.0),
    "some": Outlook((0.5,) * 10, 0.0, 0.01, 1),
    "none given": None,
}


@pytest.mark.parametrize("vocab_size", [101, 4500])
def test_tokens_are_foreseen_as_they_will_be_drawn(vocab_size: int, tmp_path: Path) -> None:
    """Pass by pass the column that the stream then draws, of one block and of several; the stream itself stays."""
    options = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128, "vocab_size": vocab_size}
    model = load(str(save_model("llama", tmp_path, **options)), dtype="bfloat16", device="cpu")
    run, others = Runner(model, random_part(Eagle, model)), 0
    for seed in range(8):
        streams, temperature = Streams(seed), 0.4 + 0.2 * seed
        before = streams.generator("draft").get_state()
        uniforms = streams.foreseen("draft", vocab_size, 5)
        assert torch.equal(streams.generator("draft").get_state(), before)
        read = Read(run, [7], [2], seed)
        prefetch = Prefetch(6, (1.0,) * 10, -1.0, -1.0, 0, temperature, uniforms)
        made = run.several.passes(read.first, read.cache, read.g_TW, top=1, prefetch=[prefetch])
        assert len(made) == 6
        for each, behind in pairwise(made):
            q_V = torch.softmax(each.output.logits_MV[0] / temperature, dim=-1)
            assert list(behind.tokens) == [streams.categorical("draft", q_V)]
            others += behind.tokens[0] != each.output.best[0]
    assert others > 20


@pytest.mark.parametrize("case", [*OUTLOOKS, "no rule", "penalties", "drawn", "drawn from few"])
def test_drafts_are_those_of_one_pass_after_the_other(
    case: str, models: dict[str, LanguageModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, confidences and calls of the stop rule, in a batch; whatever was prefetched."""
    model = models["bfloat16"]
    place = untrained(Eagle, model, tmp_path / "head", draft_vocab_size=60)
    found: list[Any] = []
    forwards, forward = list[int](), Runner.forward

    def counted(*arguments: Any, **named: Any) -> Any:
        forwards.append(named["top"])
        return forward(*arguments, **named)

    monkeypatch.setattr(Runner, "forward", counted)
    for prefetch in (True, False):
        if not prefetch:
            apart = sum(forwards)
            monkeypatch.setattr(Runner, "several", None)
        drafter = EagleDrafter(EagleDrafter.Config(head=place), model)
        propose, seen = drafter.propose, list[Any]()

        def recorded(contexts: Sequence[Any], budgets: Sequence[Any], propose: Any = propose, seen: Any = seen) -> Any:
            rules = [Hashed(OUTLOOKS[case]) if case in OUTLOOKS else None for _ in budgets]
            ruled = [replace(budget, stop_rule=rule) for budget, rule in zip(budgets, rules, strict=True)]
            drafts = propose(contexts, ruled)
            seen.append([(each.tree.tokens, each.confidence) for each in drafts])
            seen.append([rule and rule.asked for rule in rules])
            return drafts

        monkeypatch.setattr(drafter, "propose", recorded)
        llm = with_config({"method": drafter, "num_speculative_tokens": 5}, target=model, max_num_seqs=3)
        params = SamplingParams(
            max_tokens=20,
            temperature=0.8 if case.startswith("drawn") else 0.0,
            top_k=9 if case == "drawn from few" else 0,
            repetition_penalty=1.3 if case == "penalties" else 1.0,
            seed=3,
            ignore_eos=True,
        )
        outputs = llm.generate([{"prompt_token_ids": tokens_of(seed, 5 + 9 * seed, 100)} for seed in range(4)], params)
        found.append((seen, [each.token_ids for each in outputs]))
    assert found[0] == found[1]
    if case in ("everything", "no rule", "drawn"):
        assert not apart  # every token was foreseen
    assert sum(len(tokens) for drafts in found[0][0][::2] for tokens, _ in drafts) > 20


def test_what_does_not_fit_is_refused(runners: dict[tuple[str, str, bool], Runner]) -> None:
    """Before anything native is called."""
    run = runners["eagle3", "float32", True]
    assert run._native is not None
    pairs = run._native.pairs
    assert pairs is not None
    going_on = Prefetch(3, (1.0,) * 10, -1.0, -1.0, 0)

    def refused(message: str, error: type[Exception] = ValueError, **changes: Any) -> None:
        read = Read(run, [4], [2], 1)
        read.first.tokens[0] = changes.pop("token", read.first.tokens[0])
        if changes.pop("no wanted", False):
            read.first.wanted.clear()
        fields: dict[str, Any] = {"top": 1, "prefetch": [going_on], **changes}
        with pytest.raises(error, match=message):
            pairs.passes(read.first, read.cache, fields.pop("features", read.g_TW), **fields)

    refused("token 9999 is not in the embedding", InputError, token=9999)
    refused("token -1 is not in the embedding", InputError, token=-1)
    refused("ids_C is", ids_C=torch.arange(40))
    refused("ids_C is", ids_C=torch.arange(39, dtype=torch.int32))
    refused("drafts go on from rows", top=0)
    refused("drafts go on from rows", prefetch=[going_on] * 2)
    refused("drafts go on from rows", **{"no wanted": True})
    refused("prefetch.most=0", prefetch=[going_on._replace(most=0)])
    refused("the capacity of the cache is 96", prefetch=[going_on._replace(most=92)])
    refused("1 uniforms for 3 passes", prefetch=[going_on._replace(temperature=0.5, uniforms=[0.5])])
    refused("rows for a chain", prefetch=[going_on._replace(stands=())])
    refused("entering_TD", features=torch.randn(2, 32))
