"""Products with weights of a GGUF file's K-quants: packed in the superblocks of the file, and decoded.

    python lab/benchmarks/superblocks.py [--json OUT]

One thread and its processor time, the two forms in turns, minima; the random weights are larger than any cache. Decoded
weights are what the native decoder computed before it read superblocks: Q4_K in 4 bits with two numbers of float32 for
each group of inputs, Q5_K and Q6_K in 8 bits. Letters: O outputs, K inputs, T rows.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from foretoken.forward.stored_weight import StoredWeight
from foretoken.models.gguf.blocks import kind_named
from foretoken.native import build
from foretoken.native.packing import TiledLinear
from foretoken.native.superblocks import packed_codes
from foretoken_lab.measurement import Measurement

OUTPUTS, INPUTS = 65536, 2048
ROWS = (1, 2, 4, 8, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    measurement = Measurement("superblocks.py", options.json, threads=1)
    library = build.library()
    assert library is not None, "this measures native products"
    found = []
    for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
        weight = _random(name)
        packed = {"superblocks": packed_codes(weight, library), "decoded": packed_codes(weight.decoded(), library)}
        layers = {form: TiledLinear(each, OUTPUTS, None, library) for form, each in packed.items()}
        best: dict[tuple[str, int], float] = {}
        for _ in range(options.repeats):
            for rows in ROWS:
                x_TK = torch.randn(rows, INPUTS)
                for form, layer in layers.items():
                    before = time.thread_time()
                    layer(x_TK)
                    taken = time.thread_time() - before
                    best[form, rows] = min(taken, best.get((form, rows), taken))
        for form, each in packed.items():
            bits = 8 * each.data.numel() / (OUTPUTS * INPUTS)
            row = {"kind": name, "form": form, "bits": bits, "gbytes_s": each.data.numel() / best[form, 1] / 1e9}
            row |= {f"ms_{rows}": 1e3 * best[form, rows] for rows in ROWS}
            found.append(row)
            times = ", ".join(f"{rows}: {1e3 * best[form, rows]:.1f}" for rows in ROWS)
            print(f"{name} {form}: {bits:.3f} bits, {row['gbytes_s']:.1f} GB/s; ms by rows {times}", flush=True)
    measurement.write({"outputs": OUTPUTS, "inputs": INPUTS, "rows": found})


def _random(name: str) -> StoredWeight:
    """Random bits, and scales that are finite."""
    kind = kind_named(name)
    generator = torch.Generator().manual_seed(0)
    shape = (OUTPUTS, INPUTS // kind.elements, kind.bytes)
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    for begin in kind.halves:
        halves = torch.rand(shape[:2], generator=generator).half()
        blocks[..., begin : begin + 2] = halves[..., None].view(torch.uint8)
    return StoredWeight(blocks.flatten(1), kind, name)


if __name__ == "__main__":
    main()
