"""What the arithmetic of each verifier costs, beside the target's forward, at a large vocabulary.

    python benchmarks/verification.py [--vocab 151936] [--nodes 32] [--drafts 4] [--requests 1,8] [--json OUT]

A tree of so many nodes with so many children each is drawn by the rule's own scheme from a draft law that resembles the
target's, and verified from raw logits: processing (temperature, and in a second column top-p), the rule, the draws.
The forward that it is compared with is that of a small model (0.5 billion parameters, of which the vocabulary's table
has a quarter): its matrix products alone, timed here on random weights in bfloat16. Times are medians; requests abreast
are verified by ``verify_batch``, and one after the other for comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from foretoken import catalog
from foretoken.core.draft import Draft, HubPair, PointMass, Sampled, TopThenSampled, WithoutReplacement
from foretoken.core.laws import LawMaker, Laws
from foretoken.core.provenance import provenance
from foretoken.core.randomness import Streams
from foretoken.core.sampling import SamplingParams
from foretoken.core.siblings import draw_siblings
from foretoken.core.tree import TokenTree

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--requests", default="1,8")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    forward = _forward_seconds(options.vocab, options.nodes + 1, options.repeats)
    found = [
        {"rule": rule, "top_p": top_p, "requests": requests, **_measure(rule, top_p, requests, options)}
        for rule in SCHEMES
        for top_p in (1.0, 0.95)
        for requests in map(int, options.requests.split(","))
    ]
    _show(found, forward, options)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "forward_seconds": forward,
            "results": found,
            "provenance": provenance(sys.argv, threads=options.threads),
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


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


def _measure(rule: str, top_p: float, requests: int, options: argparse.Namespace) -> dict[str, Any]:
    verifier = catalog.find(rule, "verifier").load()()
    params = SamplingParams(temperature=1.0, top_p=top_p, seed=0)
    maker = LawMaker(params, [], options.vocab)
    cases = [_case(rule, seed, maker, options) for seed in range(requests)]

    def laws() -> list[Laws]:
        return [
            Laws(
                logits_MV,
                greedy=False,
                positions=(9, *(9 + depth for depth in draft.tree.depths)),
                process=lambda rows, x=logits_MV, tree=draft.tree: maker.process(
                    x[rows.start : rows.stop], tree, range(rows.start - 1, rows.stop - 1)
                ),
            )
            for draft, logits_MV in cases
        ]

    drafts = [draft for draft, _ in cases]
    accepted: list[int] = []

    def one_by_one() -> None:
        for number, (draft, target) in enumerate(zip(drafts, laws(), strict=True)):
            accepted.append(len(verifier.verify(draft, target, Streams(next(seeds) + number)).path))

    def abreast() -> None:
        verifier.verify_batch(drafts, laws(), [Streams(next(seeds) + number) for number in range(requests)])

    seeds = iter(range(0, 10**9, 1000))
    seconds = _median(one_by_one, options.repeats)
    batched = _median(abreast, options.repeats) if hasattr(verifier, "verify_batch") else None
    return {
        "seconds_per_request": seconds / requests,
        "abreast_seconds_per_request": None if batched is None else batched / requests,
        "accepted": sum(accepted) / len(accepted),
    }


def _case(rule: str, seed: int, maker: LawMaker, options: argparse.Namespace) -> tuple[Draft, Tensor]:
    """A draft of the rule's scheme, breadth first, and raw target logits that resemble its laws."""
    rng = Streams(seed)
    generator = torch.Generator().manual_seed(seed)
    count = 1 if rule in CHAINS else 2 if rule == "spechub" else options.drafts
    base_V = 3.0 * torch.randn(options.vocab, generator=generator)
    tokens: list[int] = []
    parents: list[int] = []
    q_rows, row_of, frontier = [], [], [-1]
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


def _show(found: Sequence[dict[str, Any]], forward: float, options: argparse.Namespace) -> None:
    table = Table(
        title=f"V = {options.vocab}, {options.nodes} nodes, {options.drafts} children: "
        f"forward of {options.nodes + 1} rows {forward * 1e3:.0f} ms"
    )
    for column in ("rule", "top-p", "requests", "accepted", "ms a request", "abreast", "% of forward + rule"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for each in found:
        abreast = each["abreast_seconds_per_request"]
        best = min(each["seconds_per_request"], abreast or float("inf"))
        table.add_row(
            each["rule"],
            f"{each['top_p']:g}",
            str(each["requests"]),
            f"{each['accepted']:.1f}",
            f"{each['seconds_per_request'] * 1e3:.2f}",
            "-" if abreast is None else f"{abreast * 1e3:.2f}",
            f"{100 * best / (best + forward):.1f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
