"""How fast the matrix products of a training step of ``base`` are, next to large square ones, and what share they have.

    python benchmarks/products.py [--json OUT]

One thread, and its processor time: other work on the machine takes caches away from it, no more. Operands are those of
a step in shape and layout, bfloat16, and taken in turns, so that they come from memory as in a step. A step is compiled
and measured in the same run, on random tokens. Letters: M tokens of a micro-batch, and the widths of the model.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import torch

from foretoken_lab.measurement import Measurement

SECONDS = 0.4  # for each product
TURNS = 6  # sets of operands
SQUARES = (512, 1024, 2048)
STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measurement = Measurement("products.py", options.json, threads=1)
    from foretoken.train.memory import keep_freed_memory
    from foretoken.train.processor import tiny_numbers_ignored

    keep_freed_memory()
    with tiny_numbers_ignored(), torch.no_grad():
        peak = max(2e-9 * size**3 / _product((size, size, size), "NT", turns=1) for size in SQUARES)
        rows = [_row(*product) for product in _products()]
        rows += [_muon(*matrices) for matrices in _matrices()]
    step = _step()
    print(
        f"squares: {peak:.0f} GFLOP/s; a step: {step:.2f} s\n\n| product | shape | in a step | GFLOP/s | s |\n|"
        + "---|" * 5
    )
    for row in rows:
        print(f"| {row['product']} | {row['shape']} | {row['count']} | {row['rate']:.0f} | {row['seconds']:.3f} |")
    seconds, work = (sum(row[key] for row in rows) for key in ("seconds", "gflop"))
    least = f"{work:.0f} GFLOP, which take {work / peak:.2f} s at the rate of the squares"
    print(f"\nproducts: {seconds:.2f} s, {seconds / step:.0%} of a step; {least}")
    measurement.write({"squares": peak, "step": step, "rows": rows})


def _recipe():
    from foretoken.models.load import load_tokenizer
    from foretoken_lab.recipes import find

    recipe = find("base")
    return recipe, recipe.config(load_tokenizer("zoo:base"))


def _products():
    """Name, (rows, inner, columns), layout, batch and number in a step, of every product but Muon's."""
    from foretoken.train import attention, head_loss

    recipe, config = _recipe()
    width, mlp = config.hidden_size, config.intermediate_size
    head_width = width // config.num_attention_heads
    keys, shared = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    micro = recipe.schedule.batch // recipe.schedule.micro_batch
    tokens, layers = recipe.schedule.micro_batch * recipe.block, config.num_hidden_layers * micro
    linear = {
        "q, o": (tokens, width, width, 2 * layers),
        "k, v": (tokens, keys * head_width, width, 2 * layers),
        "gate, up": (tokens, mlp, width, 2 * layers),
        "down": (tokens, width, mlp, layers),
        "head": (head_loss.WIDER_ROWS, config.vocab_size, width, micro * tokens // head_loss.WIDER_ROWS),
    }
    for name, (rows, out, into, count) in linear.items():
        yield f"{name}: X W'", (rows, into, out), "NT", 1, count
        yield f"{name}: dY W", (rows, out, into), "NN", 1, count
        yield f"{name}: dY' X", (out, rows, into), "TN", 1, count
    batch, queries = recipe.schedule.micro_batch * keys, shared * attention.BLOCK
    for last in range(attention.BLOCK, recipe.block + 1, attention.BLOCK):
        yield f"attention to {last}: Q K', dO V'", (queries, head_width, last), "NT", batch, 2 * layers
        yield f"attention to {last}: P V, dS K", (queries, last, head_width), "NN", batch, 2 * layers
        yield f"attention to {last}: P' dO, dS' Q", (last, queries, head_width), "TN", batch, 2 * layers


def _matrices():
    """Shape and number of the matrices that Muon moves."""
    _, config = _recipe()
    width, mlp, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    keys = width // config.num_attention_heads * config.num_key_value_heads
    return ((width, width), 2 * layers), ((keys, width), 2 * layers), ((mlp, width), 2 * layers), ((width, mlp), layers)


def _row(name, shape, layout, batch, count):
    gflop = 2e-9 * batch * shape[0] * shape[1] * shape[2]
    told = " x ".join(map(str, shape)) + (f", {batch} of them" if batch > 1 else "")
    return _told(name, told, gflop, count, _product(shape, layout, batch))


def _muon(shape, count):
    from foretoken.train.muon import orthogonalised

    matrices = [torch.randn(shape) for _ in range(TURNS)]
    short, long = min(shape), max(shape)
    gflop = 5e-9 * (4 * short * short * long + 2 * short**3)
    seconds = _seconds(lambda turn: orthogonalised(matrices[turn]), TURNS)
    return _told("Muon, five iterations", f"{shape[0]} x {shape[1]}", gflop, count, seconds)


def _told(product, shape, gflop, count, seconds):
    rate, all_of_them = gflop / seconds, {"seconds": seconds * count, "gflop": gflop * count}
    return {"product": product, "shape": shape, "count": count, "rate": rate, **all_of_them}


def _product(shape, layout, batch=1, turns=TURNS):
    """Seconds of one; ``layout`` says which operand is transposed in memory."""
    rows, inner, columns = shape
    operands = []
    for _ in range(turns):
        a = torch.randn((batch, inner, rows) if layout[0] == "T" else (batch, rows, inner)).bfloat16()
        b = torch.randn((batch, columns, inner) if layout[1] == "T" else (batch, inner, columns)).bfloat16()
        a, b = (a.mT if layout[0] == "T" else a), (b.mT if layout[1] == "T" else b)
        operands.append((a[0], b[0]) if batch == 1 else (a, b))
    return _seconds(lambda turn: torch.matmul(*operands[turn]), turns)


def _seconds(run, turns):
    times, until = [], time.perf_counter() + SECONDS
    while time.perf_counter() < until or len(times) < 2 * turns:
        turn = len(times) % turns
        before = time.thread_time()
        run(turn)
        times.append(time.thread_time() - before)
    return statistics.median(times)


def _step():
    """Seconds of a whole one, compiled."""
    from foretoken.forward import anatomy
    from foretoken.models.load import load_tokenizer
    from foretoken.train import attention, trainer
    from foretoken.train.objectives import NextToken
    from foretoken.train.recipe import build

    recipe, config = _recipe()
    model = build(recipe, load_tokenizer("zoo:base"))
    attention.use(model)
    for layer in anatomy.find(model).layers:
        layer.compile(dynamic=False)

    class Drawn:
        block = recipe.block

        def next(self, count):
            return torch.randint(config.vocab_size, (count, recipe.block))

        def state(self):
            return {}

    times = [0.0]
    bounds = trainer.Bounds(tokens=STEPS * recipe.schedule.batch * recipe.block)
    with tempfile.TemporaryDirectory() as folder:
        schedule, told = recipe.schedule, lambda progress: times.append(time.process_time())
        trainer.fit(model, NextToken(), Drawn(), schedule, bounds, Path(folder), report=told)
    return statistics.median(late - soon for soon, late in itertools.pairwise(times[1:]))  # the first one compiles


if __name__ == "__main__":
    main()
