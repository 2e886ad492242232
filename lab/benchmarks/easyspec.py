"""EasySpec: what fuzzy groups cost in acceptance, measured, and what devices would make of them, simulated.

    python benchmarks/easyspec.py --model zoo:base --draft zoo:base-ee --json OUT.json

Acceptance: one run for each N, with and without calibration, of the same prompts at temperature 0, a fixed number of
tokens drafted; by thirds of the answer, since without calibration errors add up.

Simulated clock: attention, MLP and head of a draft's row are timed on this machine, one thread, median of many rows at
the stated context. A drafted level of groups then takes the slowest attention of each group, an exchange and all MLPs;
a step takes the exact pass, n - 1 such levels and the target's verification as measured here. **No device is
involved**: the figures show the limit of the arithmetic, with layers that cost as much as here, in proportion.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import nn

from foretoken import LLM, SamplingParams
from foretoken.core.provenance import provenance
from foretoken.forward import anatomy
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.models.fuzzy import groups_of
from foretoken.models.language_model import LanguageModel
from foretoken_lab.peers.versions import command

PROMPTS = (
    "Tom has 12 marbles. He buys 30 more. How many marbles does he have now?",
    "Write a Python function that returns the sum of a list of numbers.",
    "Tell me a short story about a dog who finds a key.",
    "Explain in simple words why the sky is blue.",
)


def acceptance(llm: LLM, tokens: int) -> dict[str, Any]:
    """Tokens per step, whole and by thirds of the answers."""
    steps, emitted = [0, 0, 0], [0, 0, 0]
    for prompt in PROMPTS:
        (request,) = llm.new_requests(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
        llm.engine.add(request)
        while not request.finished:
            before = request.num_output
            llm.engine.step()
            if before:
                third = min(2, 3 * before // tokens)
                steps[third] += 1
                emitted[third] += request.num_output - before
    return {
        "tokens_per_step": sum(emitted) / sum(steps),
        "by_thirds": [got / max(1, count) for got, count in zip(emitted, steps, strict=True)],
    }


class Clock:
    """Seconds inside of modules, by name."""

    def __init__(self, modules: dict[str, list[nn.Module]]) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in modules}
        self._began = 0.0
        self._handles = [
            handle
            for name, found in modules.items()
            for module in found
            for handle in (
                module.register_forward_pre_hook(self._begin),
                module.register_forward_hook(lambda *_, name=name: self._end(name)),
            )
        ]

    def _begin(self, *_: Any) -> None:
        self._began = perf_counter()

    def _end(self, name: str) -> None:
        self.seconds[name].append(perf_counter() - self._began)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def parts_of_a_row(model: LanguageModel, context: int, repeats: int) -> dict[str, float]:
    """Median seconds of one attention, one MLP (each with its norm) and the head, for one row after a prefix."""
    parts = anatomy.find(model.model)
    layers: list[Any] = list(parts.layers)
    cache = model.new_cache(1)
    slot = cache.acquire()
    cache.reserve(slot, context + 1)
    batch = PackedBatch()
    batch.add_chunk(slot, 0, [5 + place % 90 for place in range(context)], wanted=1)
    model.forward(batch, DensePlan(cache, batch))
    cache.commit(slot, range(context))
    clock = Clock(
        {
            "attention": [layer.self_attn for layer in layers],
            "mlp": [layer.mlp for layer in layers],
            "norm": [layer.input_layernorm for layer in layers],
            "head": [parts.head],
        }
    )
    for _ in range(repeats):
        batch = PackedBatch()
        batch.add_chunk(slot, context, [7], wanted=1)
        plan = DensePlan(cache, batch)
        plan.native = None
        model.forward(batch, plan)
    clock.close()
    median = {name: statistics.median(found) for name, found in clock.seconds.items()}
    return {
        "attention": median["attention"] + median["norm"],
        "mlp": median["mlp"] + median["norm"],
        "head": median["head"],
    }


def level(row: dict[str, float], layers: int, size: int, devices: int, link: float) -> float:
    """Seconds of a drafted level: its phases of attention, an exchange for each group, all MLPs and the head."""
    phases = exchanges = 0
    for group in groups_of(layers, min(size, devices)):
        phases += 1
        exchanges += len(group) > 1
    return phases * row["attention"] + exchanges * link + layers * row["mlp"] + row["head"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="zoo:base")
    parser.add_argument("--draft", default="zoo:base-ee")
    parser.add_argument("--length", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--sizes", default="1,2,3,4,5")
    parser.add_argument("--contexts", default="128,1024")
    parser.add_argument("--link", type=float, default=8.0, help="microseconds of an exchange")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    base = LLM(arguments.model, dtype="float32", device="cpu", threads=1, seed=0, speculative_config=None)
    sizes = [int(each) for each in arguments.sizes.split(",")]
    accepted, draft = [], None
    for size in sizes:
        for calibrate in (True, False) if size > 1 else (True,):
            config = {"method": "easyspec", "model": arguments.draft, "parallel": size, "calibrate": calibrate}
            llm = base.with_method({**config, "num_speculative_tokens": arguments.length})
            row = {"parallel": size, "calibrate": calibrate, **acceptance(llm, arguments.tokens)}
            accepted.append(row)
            draft = llm.recipe.drafter.model  # type: ignore[attr-defined]
            print(json.dumps(row))
    assert draft is not None
    per_step = {row["parallel"]: row["tokens_per_step"] for row in accepted if row["calibrate"]}
    simulated = []
    for context in (int(each) for each in arguments.contexts.split(",")):
        row, target = (parts_of_a_row(each, context, arguments.repeats) for each in (draft, base.target))
        one = level(row, draft.num_layers, 1, 1, 0.0)
        verify = level(target, base.target.num_layers, 1, 1, 0.0)
        rates = {}
        for devices in (1, 2, 4, 8):
            for size in sizes:
                if size > devices:
                    continue
                drafted = level(row, draft.num_layers, size, devices, 1e-6 * arguments.link)
                rates[devices, size] = per_step[size] / (one + (arguments.length - 1) * drafted + verify)
                found = {
                    "simulated": True,
                    "context": context,
                    "devices": devices,
                    "parallel": size,
                    "attention_share": draft.num_layers * row["attention"] / one,
                    "level_speedup": one / drafted,
                    "speed_over_one_device": rates[devices, size] / rates[1, 1],
                }
                simulated.append(found)
                print(json.dumps(found))
    if arguments.json is not None:
        facts = provenance([], model=arguments.model, draft=arguments.draft, threads=1)
        facts["command"] = command("easyspec.py")
        results = {"provenance": facts, "acceptance": accepted, "simulated": simulated}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
