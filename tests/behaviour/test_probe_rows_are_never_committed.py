"""Rows that a verifier probes: computed in the same forward, never committed, without effect on others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from foretoken.core.needs import HiddenLayers, Needs, Offers
from foretoken.core.protocols import Verifier
from foretoken.core.tree import ROOT, TokenTree
from foretoken.engine.executors.serial import SerialExecutor
from foretoken.models.load import load
from foretoken.native import build
from foretoken.options.sampling import SamplingParams
from foretoken.verifiers.match import MatchVerifier
from foretoken_lab import testing as stubs
from helpers.golden import Session, random_tree, tokens_of
from helpers.small_llms import PROMPTS, assert_idle, greedy, ids, prompt_ids, target, truth, with_config, with_drafter
from helpers.tiny_models import VOCAB_SIZE, save_model

LENGTH = 32
PARAMS = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
fused = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: the native path is off")


def with_probes(tree: TokenTree, vocab_size: int, count: int = 3) -> TokenTree:
    """Chains of ``count`` nodes after the root and after the last node."""
    tokens, parents = list(tree.tokens), list(tree.parents)
    for parent in (ROOT, len(tree) - 1):
        for step in range(count):
            parents.append(parent if not step else len(tokens) - 1)
            tokens.append((7 * len(tokens) + 3) % vocab_size)
    return TokenTree(tokens, parents)


class Probing(MatchVerifier):
    """The rule `match`, with probes that it looks at and does not use."""

    name = "probing"
    offers = Offers()

    def __init__(self, vocab_size: int, count: int = 3) -> None:
        self.vocab_size = vocab_size
        self.count = count
        self.seen: list[bool] = []  # of every draft that was decided: whether its probes were computed

    def probe(self, draft, context):
        return with_probes(draft.tree, self.vocab_size, self.count)

    def verify(self, draft, target, rng):
        if len(draft):
            self.seen.append(target.probe_logits_PV is not None)
            if target.probe_logits_PV is not None:
                assert target.probe_logits_PV.shape == (2 * self.count, self.vocab_size)
        return super().verify(draft, target, rng)


class Counting(SerialExecutor):
    """The serial order, with the number of rows of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def step(self, engine):
        before = engine.pack

        def pack(work, drafts):
            current = before(work, drafts)
            self.rows.append(len(current.batch))
            return current

        engine.pack = pack
        try:
            return super().step(engine)
        finally:
            del engine.pack


def drafter(kind: str) -> stubs.Stub:
    made: dict[str, Callable[[], stubs.Stub]] = {
        "chain": lambda: stubs.Scripted(truth(), 0.6),
        "tree": lambda: stubs.OracleTree(truth()),
        "random tree": lambda: stubs.Random(8192, tree=True),
    }
    return made[kind]()


@pytest.mark.covering(1)
@pytest.mark.parametrize("max_rows", [7, 40, 512])
@pytest.mark.parametrize("kind", ["chain", "tree", "random tree"])
def test_probes_change_no_token_and_never_exceed_the_budget_of_rows(kind: str, max_rows: int) -> None:
    rule = Probing(target().vocab_size)
    llm = with_drafter(drafter(kind), verifier=rule, max_num_seqs=4, max_rows_per_step=max_rows)
    llm.engine.executor = counting = Counting()
    assert ids(llm.generate(PROMPTS, PARAMS)) == [greedy(prompt, LENGTH) for prompt in PROMPTS]
    assert max(counting.rows) <= max_rows
    assert any(rule.seen) or max_rows == 7
    assert max_rows == 512 or not all(rule.seen)
    assert_idle(llm)


def test_seeded_samples_are_the_same() -> None:
    params = [
        SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, seed=seed) for seed in range(len(PROMPTS))
    ]
    rules: tuple[Verifier, ...] = (MatchVerifier(), Probing(target().vocab_size))
    plain, probed = (ids(with_drafter(drafter("chain"), verifier=rule).generate(PROMPTS, params)) for rule in rules)
    assert plain == probed


class Judging(Probing):
    """Its decision may follow from its probes, so a seed's must not depend on the other requests."""

    promise = "approximate"
    offers = Offers(probes=True)


@pytest.mark.parametrize(("seed", "count", "probed"), [(4, 1, True), (4, 2, False), (None, 2, True)])
def test_probes_of_a_seeded_request_use_its_own_rows(seed: int | None, count: int, probed: bool) -> None:
    """Six rows for each of two: a root, two drafted ones, and three more, although the request is alone."""
    rule = Judging(target().vocab_size, count)
    llm = with_drafter(drafter("chain"), num_nodes=2, verifier=rule, max_num_seqs=2, max_rows_per_step=12)
    llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, seed=seed, max_tokens=6, ignore_eos=True))
    assert rule.seen[0] is probed


@pytest.mark.parametrize(
    "config", [{"method": "kangaroo", "adapter": "random:1", "threshold": 0.1}, {"method": "del"}], ids=str
)
def test_drafts_that_resume_inside_the_target_are_verified_without_probes(config: dict[str, object]) -> None:
    rule = Probing(target().vocab_size)
    llm = with_config({**config, "verifier": rule, "num_speculative_tokens": 4})
    assert ids(llm.generate(PROMPTS, PARAMS)) == [greedy(prompt, LENGTH) for prompt in PROMPTS]
    assert rule.seen
    assert not any(rule.seen)
    assert_idle(llm)


class Watching(stubs.Scripted):
    """Asks for hidden states, and keeps how many rows it was promised and shown of each draft."""

    needs = Needs(hidden_layers=HiddenLayers((1, 2), last=3))

    def __init__(self, texts: stubs.Texts) -> None:
        super().__init__(texts, 0.6)
        self.shown: list[tuple[int, int, int]] = []

    def on_forward(self, features):
        for each in features:
            if len(each.draft):
                self.shown += [(1 + len(each.draft), len(rows), len(each.best)) for rows in each.hidden.values()]


def test_a_drafter_does_not_receive_probe_rows() -> None:
    rule, watching = Probing(target().vocab_size), Watching(truth())
    llm = with_drafter(watching, verifier=rule)
    assert ids(llm.generate(PROMPTS, PARAMS)) == [greedy(prompt, LENGTH) for prompt in PROMPTS]
    assert any(rule.seen)
    assert watching.shown
    assert all(rows == hidden == best for rows, hidden, best in watching.shown)


@fused
def test_committed_rows_are_bit_for_bit_those_without_probes() -> None:
    """Two engines side by side; the caches of both are compared after every step."""
    plain = with_drafter(drafter("tree"), verifier=MatchVerifier())
    probed = with_drafter(drafter("tree"), verifier=Probing(target().vocab_size))
    both = (plain, probed)
    streams = [[llm.stream(prompt, PARAMS) for prompt in PROMPTS[:3]] for llm in both]
    compared = 0
    for _ in range(4):
        chunks = [[next(stream).token_ids for stream in of_one] for of_one in streams]
        assert chunks[0] == chunks[1]
        assert plain.engine.cache.lengths == probed.engine.cache.lengths
        for slot, length in enumerate(plain.engine.cache.lengths):
            if not length:
                continue
            for a, b in zip(*((*llm.engine.cache.keys, *llm.engine.cache.values) for llm in both), strict=True):
                assert a is not None
                assert b is not None
                assert torch.equal(a[slot, :, :length], b[slot, :, :length])
                compared += length
    assert compared
    for of_one in streams:
        for stream in of_one:
            stream.close()


@fused
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_rows_of_a_draft_have_the_same_bits_with_probes_after_them(family, tmp_path) -> None:
    model = load(save_model(family, tmp_path), device="cpu")
    for seed in range(6):
        found = []
        tree = random_tree(seed, VOCAB_SIZE) if seed % 2 else TokenTree(tokens_of(seed, 5, VOCAB_SIZE))
        for each in (tree, with_probes(tree, VOCAB_SIZE)):
            session = Session(model)
            slot = session.cache.acquire()
            session.chunk(slot, tokens_of(seed, 9, VOCAB_SIZE))
            found.append(session.draft(slot, 7, each)[: 1 + len(tree)])
        assert torch.equal(*found)


def test_no_probes_where_the_context_ends(tmp_path) -> None:
    """The last tokens of a context are drafted; probes after them would not fit into the cache."""
    model = load(save_model("llama", tmp_path), device="cpu")
    rule = Probing(VOCAB_SIZE, count=2)
    llm = with_drafter(stubs.Random(VOCAB_SIZE, tree=False, full=True), num_nodes=4, verifier=rule, target=model)
    prompt = {"prompt_token_ids": tokens_of(1, model.max_length - 12, VOCAB_SIZE)}
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = ids(with_config(None, target=model).generate([prompt], params))
    assert ids(llm.generate([prompt] * 2, params)) == expected * 2
    assert rule.seen[0]
    assert not rule.seen[-1]
    assert_idle(llm)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda tree: TokenTree([1, *tree.tokens]), "probes another draft"),
        (lambda tree: TokenTree([*tree.tokens, 8192]), "tokens from 8192 to 8192: they must be below 8192"),
        (lambda tree: TokenTree([*tree.tokens, -1]), "tokens from -1 to -1"),
        (lambda tree: 1 / 0, "division by zero"),
    ],
    ids=["other draft", "beyond the vocabulary", "negative", "raises"],
)
def test_a_wrong_probe_ends_its_request_only(wrong, message) -> None:
    class Wrong(Probing):
        def probe(self, draft, context):
            culprit = list(context.tokens[: context.num_prompt]) == prompt_ids(PROMPTS[1])
            return wrong(draft.tree) if culprit else super().probe(draft, context)

    llm = with_drafter(drafter("chain"), verifier=Wrong(target().vocab_size))
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [output.error is None for output in outputs] == [index != 1 for index in range(len(PROMPTS))]
    assert message in outputs[1].error
    assert [each.token_ids for i, each in enumerate(outputs) if i != 1] == [
        greedy(prompt, LENGTH) for i, prompt in enumerate(PROMPTS) if i != 1
    ]
    assert_idle(llm)
