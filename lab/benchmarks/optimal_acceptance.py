"""Milliseconds per position of the optimal acceptance rate, over vocabularies, numbers of drafts and schemes.

    python benchmarks/optimal_acceptance.py [--positions 8] [--repeats 5]

One thread. Distributions are softmaxes of Gaussian logits (float32), the draft's with its own noise; a figure is the
fastest of the repeats over all positions, which is what the machine can do when nothing else runs.
"""

from __future__ import annotations

import argparse
import time

import torch

from foretoken_lab.studies.acceptance.optimal import optimal_acceptance

VOCABULARIES = (32_000, 152_000)
NUM_DRAFTS = (2, 3, 4, 8)
SPREADS = {"peaked": 4.0, "flat": 2.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'laws':<8}{'V':>8}{'n':>4}{'scheme':>22}{'ms/position':>13}{'slowest':>9}{'mean optimum':>14}")
    for kind, spread in SPREADS.items():
        for vocab_size in VOCABULARIES:
            generator = torch.Generator().manual_seed(0)
            logits_BV = spread * torch.randn(options.positions, vocab_size, generator=generator)
            noise_BV = torch.randn(options.positions, vocab_size, generator=generator)
            p_BV, q_BV = torch.softmax(logits_BV, -1), torch.softmax(logits_BV + noise_BV, -1)
            for scheme in ("iid", "without_replacement"):
                for num_drafts in NUM_DRAFTS:
                    best, alphas = [], []
                    for p_V, q_V in zip(p_BV, q_BV, strict=True):
                        times = []
                        for _ in range(options.repeats):
                            begun = time.perf_counter()
                            alpha = optimal_acceptance(p_V, q_V, num_drafts, scheme)
                            times.append(time.perf_counter() - begun)
                        best.append(1e3 * min(times))
                        alphas.append(float(alpha))
                    mean = sum(best) / len(best)
                    print(
                        f"{kind:<8}{vocab_size:>8}{num_drafts:>4}{scheme:>22}{mean:>13.1f}{max(best):>9.1f}"
                        f"{sum(alphas) / len(alphas):>14.4f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
