"""The tree scan's kernel under Triton's interpreter, compared with the recurrence in float64; a process of its own.

    TRITON_INTERPRET=1 python -m helpers.interpreted_tree_scan

writes one JSON object: launches and the worst error of every case, relative to its largest value, and the errors of one
case for every planted bug.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from foretoken.forward.kernels import loading
from foretoken.forward.kernels import tree_scan as sound
from foretoken.forward.ssm import scan
from helpers.interpreted import planted
from helpers.stree_page import by_the_page


@dataclass(frozen=True)
class Case:
    """Random rows.

    Attributes:
        shape: H, G, N, P.
        count: rows.
        forget: every ninth row keeps e^-forget of the state.
        chain: each row is the next one's parent; otherwise a row's parent is any earlier one, and one row is ignored.
    """

    shape: tuple[int, int, int, int]
    count: int
    forget: float = 0.0
    chain: bool = False

    def run(self, kernel: Any = sound, device: str = "cpu") -> dict[str, float]:
        H, G, N, P = self.shape
        generator = torch.Generator().manual_seed(self.count)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        T = self.count
        parents = [int(torch.randint(-1, row, (1,), generator=generator)) if row else -1 for row in range(T)]
        if self.chain:
            parents = scan.chain_of(T)
        elif T > 5:
            parents[T - 1] = -2
        decay_TH = -normal(T, H).abs()
        decay_TH[::9] -= self.forget
        rows = scan.Rows(normal(T, G, N), normal(T, G, N), normal(T, H, P), decay_TH, normal(T, H).sigmoid(), False)
        state_HNP = normal(H, N, P)
        with (
            mock.patch.object(loading, "kernel", return_value=kernel),
            mock.patch.object(kernel, "tree_scan", wraps=kernel.tree_scan) as launched,
        ):
            found = scan.tree_scan(state_HNP, rows, parents)
        wide = scan.Rows(*(each.double() for each in rows[:5]), False)
        expected, _ = scan.walk(state_HNP.double(), wide, parents)
        page, _ = by_the_page(state_HNP.double(), wide, parents)
        errors = ((found - each).abs().max() / each.abs().max() for each in (expected, page))
        walked, stated = (float(error.nan_to_num(nan=torch.inf)) for error in errors)
        return {"error": walked, "from_the_page": stated, "launches": launched.call_count}


CASES = {
    "one row": Case((2, 1, 16, 16), 1),
    "a small tree": Case((4, 2, 16, 16), 9),
    "odd sizes": Case((3, 3, 20, 40), 41),
    "several tiles": Case((4, 1, 64, 64), 70),
    "a chain": Case((2, 2, 16, 32), 64, chain=True),
    "forgotten at once": Case((2, 1, 16, 16), 64, forget=3000.0, chain=True),
}
PLANTED = CASES["odd sizes"]
BUGS = {  # code of the kernel, and the planted replacement
    "all rows before one are seen": ("where(sees_IJ != 0, apart", "where(j_J[None] <= i_I[:, None], apart"),
    "the first tile only": ("range(tl.program_id(1) + 1)", "range(1)"),
    "the state does not decay": ("tl.exp(high_I + low_I)[:, None] *", "1.0 *"),
    "groups are folded wrongly": ("g = h // repeats", "g = h // repeats * 0"),
}
DIGITS = CASES["forgotten at once"]
ROUNDED = ("low_TH = (a_TH - high_TH).float()", "low_TH = torch.zeros_like(high_TH)")


def with_bug(case: Case, old: str, new: str) -> float:
    with planted(sound, old, new) as kernel:
        return case.run(kernel)["error"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {
        "sound": {name: case.run() for name, case in CASES.items()},
        "bugs": {bug: with_bug(PLANTED, *change) for bug, change in BUGS.items()},
        "rounded": with_bug(DIGITS, *ROUNDED),
    }
    print(json.dumps(found))
