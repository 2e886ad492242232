"""What the arithmetic of each lossless rule costs, next to the target's forward, at a small and at a large vocabulary.

A tree of so many nodes with so many children each is drawn by the rule's own scheme from a draft distribution that
resembles the target's, and verified from raw logits: processing (temperature, and in further rows top-p or top-k), the
rule, its draws. ``transport`` has a row where its linear programs decide every node, and nowhere else, where it is
``kseq``. The forward that it is compared with is that of a small model (0.5 billion parameters at the large vocabulary,
of which the vocabulary's table has a quarter): its matrix products alone, timed here on random weights in bfloat16.
Times are medians; requests abreast are verified by ``verify_batch``, and one after the other for comparison.

On the bundled pair the same rules are in the common table: there the value of a rule is its acceptance. Each gets as
many nodes, in the shape that it is for: rules of trees three children a node (pairs for ``spechub``), ``match`` a chain
drawn with its own noise. ``transport`` has no row there: its programs are solved under ``top_k`` only, and all rows
share the sampling; without it the rule would be ``kseq`` once more.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from foretoken import catalog
from foretoken.bench.suite import Column, Run, Section, Suite
from foretoken.core.draft import Draft, HubPair, PointMass, Sampled, TopThenSampled, WithoutReplacement
from foretoken.core.laws import LawMaker, Laws
from foretoken.core.randomness import Streams
from foretoken.core.siblings import draw_siblings
from foretoken.core.tree import TokenTree
from foretoken.options.sampling import SamplingParams
from foretoken.verifiers import transport

WIDTH, INNER, LAYERS = 896, 4864, 24  # the forward's shape
SCHEMES: dict[str, Any] = {
    "naive": PointMass,
    "match": PointMass,
    "ratio": Sampled,
    "block": Sampled,
    "kseq": Sampled,
    "recursive": WithoutReplacement,
    "greedy_draft": TopThenSampled,
    "spechub": HubPair,
    "transport": Sampled,
}
CHAINS = ("ratio", "block")
NODES, CHILDREN = 6, 3  # of a draft on the bundled pair
_SHAPES = {
    **dict.fromkeys(CHAINS, ""),
    "match": "+tree=coupled",
    "spechub": "",  # a tree of pairs, by its own distribution
}
FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.95}, {"top_k": 8})
_REPEATS = 9


@dataclass(frozen=True)
class Setting:
    """One size of the problem."""

    vocab: int
    nodes: int
    drafts: int
    requests: tuple[int, ...]


SETTINGS = (Setting(8192, 12, 4, (1, 16)), Setting(151_936, 32, 4, (1, 8)))


def study(run: Run) -> list[Section]:
    """Milliseconds of every rule, in a table for each vocabulary. The run's threads are used."""
    return [_table(setting) for setting in SETTINGS]


def _table(options: Setting) -> Section:
    forward = _forward_seconds(options.vocab, options.nodes + 1, _REPEATS)
    rows = [
        {"rule": rule, "filter": _named(filters), "requests": requests, "forward_seconds": forward, **figures}
        for rule in SCHEMES
        for filters in FILTERS
        for requests in options.requests
        if (figures := _measure(rule, filters, requests, options)) is not None
    ]
    title = (
        f"arithmetic alone, V = {options.vocab}, {options.nodes} nodes, {options.drafts} children: "
        f"forward of {options.nodes + 1} rows {forward * 1e3:.0f} ms"
    )
    return Section(f"vocabulary_{options.vocab}", title, COLUMNS, rows)


def _forward_seconds(vocab: int, rows: int, repeats: int) -> float:
    """The matrix products of one forward of ``rows`` rows."""
    sizes = [(WIDTH, WIDTH + 2 * 128), (WIDTH, WIDTH), (WIDTH, 2 * INNER), (INNER, WIDTH)]
    layer = [torch.randn(a, b).bfloat16() for a, b in sizes]
    head = torch.randn(WIDTH, vocab).bfloat16()
    inputs = {size: torch.randn(rows, size).bfloat16() for size in (WIDTH, INNER)}

    def forward() -> None:
        for _ in range(LAYERS):
            for weight in layer:
                inputs[weight.shape[0]] @ weight
        inputs[WIDTH] @ head

    return _median(forward, max(3, repeats // 3))


def _named(filters: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in filters.items()) or "–"


def _measure(rule: str, filters: Mapping[str, Any], requests: int, options: Setting) -> dict[str, Any] | None:
    """Seconds a request; None where another rule would decide in place of this one."""
    verifier = catalog.find(rule, "verifier").load()()
    maker = LawMaker(SamplingParams(temperature=1.0, seed=0, **filters), [], options.vocab)
    cases = [_case(rule, seed, maker, options) for seed in range(requests)]
    if rule == "transport" and not all(_solvable(draft) for draft, _ in cases):
        return None

    def process(tree: TokenTree, raw_MV: Tensor, rows: range) -> Tensor:
        return maker.process(raw_MV, tree, range(rows.start - 1, rows.stop - 1))

    def laws() -> list[Laws]:
        return [
            Laws(
                logits_MV,
                greedy=False,
                positions=(9, *(9 + depth for depth in draft.tree.depths)),
                process=partial(process, draft.tree),
            )
            for draft, logits_MV in cases
        ]

    drafts = [draft for draft, _ in cases]
    accepted: list[int] = []

    def one_by_one() -> None:
        transport.solve.cache_clear()  # in decoding no program comes twice
        for number, (draft, target) in enumerate(zip(drafts, laws(), strict=True)):
            accepted.append(len(verifier.verify(draft, target, Streams(next(seeds) + number)).path))

    def abreast() -> None:
        transport.solve.cache_clear()
        verifier.verify_batch(drafts, laws(), [Streams(next(seeds) + number) for number in range(requests)])

    seeds = iter(range(0, 10**9, 1000))
    seconds = _median(one_by_one, _REPEATS)
    batched = _median(abreast, _REPEATS) if hasattr(verifier, "verify_batch") else None
    return {
        "seconds_per_request": seconds / requests,
        "abreast_seconds_per_request": None if batched is None else batched / requests,
        "accepted": sum(accepted) / len(accepted),
    }


def _solvable(draft: Draft) -> bool:
    """Whether a linear program decides every node that has children."""
    law = draft.law
    assert isinstance(law, Sampled)
    children = Counter(draft.tree.parents)
    return all(
        transport.num_variables(Sampled, int(torch.count_nonzero(law.q_KV[row])), children[parent])
        <= transport.MAX_VARIABLES
        for row, parent in zip(law.row_of, draft.tree.parents, strict=True)
    )


def _case(rule: str, seed: int, maker: LawMaker, options: Setting) -> tuple[Draft, Tensor]:
    """A draft of the rule's scheme, breadth first, and raw target logits that resemble its distributions."""
    rng = Streams(seed)
    generator = torch.Generator().manual_seed(seed)
    count = 1 if rule in CHAINS else 2 if rule == "spechub" else options.drafts
    base_V = 3.0 * torch.randn(options.vocab, generator=generator)
    tokens: list[int] = []
    parents: list[int] = []
    q_rows: list[Tensor] = []
    row_of: list[int] = []
    frontier = [-1]
    kind = SCHEMES[rule]
    while len(tokens) < options.nodes:
        parent = frontier.pop(0)
        q_V = torch.softmax(
            maker.process((base_V + 0.7 * torch.randn(options.vocab, generator=generator))[None], TokenTree(()), [-1])[
                0
            ],
            -1,
        )
        count_here = min(count, options.nodes - len(tokens))
        if kind is PointMass:
            drawn = q_V.topk(count_here).indices.tolist()
        else:
            drawn = draw_siblings(kind, q_V, count_here, rng)
        for token in drawn:
            frontier.append(len(tokens))
            tokens.append(token)
            parents.append(parent)
            row_of.append(len(q_rows))
        q_rows.append(q_V)
    law = PointMass() if kind is PointMass else kind(torch.stack(q_rows), tuple(row_of))
    tree = TokenTree(tokens, None if rule in CHAINS else parents)
    noise_MV = 0.7 * torch.randn(options.nodes + 1, options.vocab, generator=generator)
    return Draft(tree, law), base_V + noise_MV


def _median(call: Callable[[], Any], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return median(times)


def _share(row: Mapping[str, Any]) -> float:
    best = min(row["seconds_per_request"], row["abreast_seconds_per_request"] or float("inf"))
    return 100 * best / (best + float(row["forward_seconds"]))


def _abreast(row: Mapping[str, Any]) -> float | None:
    seconds = row["abreast_seconds_per_request"]
    return None if seconds is None else 1e3 * float(seconds)


COLUMNS = (
    Column("rule", lambda row: row["rule"]),
    Column("filter", lambda row: row["filter"]),
    Column("requests", lambda row: row["requests"], "{}"),
    Column("accepted", lambda row: row["accepted"], "{:.1f}"),
    Column("ms a\nrequest", lambda row: 1e3 * row["seconds_per_request"]),
    Column("abreast", _abreast),
    Column("% of forward\n+ rule", _share, "{:.1f}"),
)

SUITE = Suite(
    name="rules",
    question="what does the arithmetic of each lossless rule cost, and what does it accept?",
    draft_model="zoo:draft",
    methods=tuple(
        f"draft_model+verifier={rule}+num_speculative_tokens={NODES}{_SHAPES.get(rule, f'+num_drafts={CHILDREN}')}"
        for rule in SCHEMES
        if rule != "transport"
    ),
    options={"temperature": 0.7},
    study=study,
)
