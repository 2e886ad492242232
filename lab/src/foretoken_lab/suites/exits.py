"""Every fixed pair of exit layer and draft length of ``del``, next to the pair that it chooses itself.

The fastest pairs here belong next to the methods of the suite ``self_speculation``: they are chosen on other prompts
than those that they are then judged by.
"""

from __future__ import annotations

from foretoken.bench.suite import Suite
from foretoken_lab.suites.self_speculation import COLUMNS, COUNTERS

EXITS = (2, 3, 5)
LENGTHS = (1, 2)

SUITE = Suite(
    name="exits",
    question="which fixed exit layer and draft length is the fastest, and does choosing them as one goes beat it?",
    model="zoo:base-ee",
    methods=("del", *(f"del+exit_layer={e}+draft_length={n}" for e in EXITS for n in LENGTHS)),
    options={"max_tokens": 128, "repeats": 1, "dtype": "bfloat16"},
    counters=COUNTERS,
    columns=COLUMNS,
)
