"""Tokens per second of our trainer against the Trainer of transformers: the same model, blocks, batch and precision.

    python benchmarks/training.py --data DATA [--steps 6] [--repeats 3] [--threads 2] [--json OUT]

Each arm runs in a process of its own, by turns. The first step is not counted. Ours trains with Muon and AdamW, which
costs more than AdamW alone; ``ours (AdamW)`` leaves Muon out, so that the loops alone are compared. Needs
``pip install accelerate`` for the other arm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ARMS = ("ours", "ours (AdamW)", "transformers Trainer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps({"rate": _rate(options.arm, options)}))
        return
    rates: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(options.repeats):
        for arm in ARMS:
            rates[arm].append(_measure(arm, options))
            print(f"{arm}: {rates[arm][-1]:,.0f} tokens/s", flush=True)
    found = {}
    for arm in ARMS:
        ratios = [ours / theirs for ours, theirs in zip(rates[arm], rates[ARMS[-1]], strict=True)]
        found[arm] = {
            "tokens_per_second": [round(rate) for rate in rates[arm]],
            "ratio": [round(ratio, 3) for ratio in sorted(ratios)],
        }
        print(f"{arm}: {statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}) of the Trainer")
    if options.json:
        from foretoken.core.provenance import provenance

        record = {"arms": found, "provenance": provenance(sys.argv, threads=options.threads, steps=options.steps)}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _measure(arm: str, options: argparse.Namespace) -> float:
    command = [sys.executable, __file__, "--arm", arm, "--data", str(options.data)]
    command += ["--steps", str(options.steps), "--threads", str(options.threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{arm} failed:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["rate"])


def _rate(arm: str, options: argparse.Namespace) -> float:
    import torch

    from foretoken.models.load import load_tokenizer
    from foretoken.train.mixture import Mixture
    from foretoken.train.recipe import build
    from foretoken.train.recipes import find
    from foretoken.train.rendering import encoder

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    recipe = find("base")
    tokenizer = load_tokenizer("zoo:base")
    model = build(recipe, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        sources = recipe.sources(options.data)
        mixture = Mixture(sources, encoder(tokenizer), Path(folder) / "tokens", recipe.block, len(tokenizer), 0)
        blocks = mixture.next(recipe.schedule.batch * options.steps)
        if arm == ARMS[-1]:
            times = _with_trainer(model, blocks, recipe, folder)
        else:
            mixture.resume({"number": 0, "given": {source.name: 0 for source in sources}})
            times = _with_ours(model, mixture, recipe, options.steps, Path(folder), muon=arm == "ours")
    per_step = recipe.schedule.batch * recipe.block
    return per_step * (len(times) - 1) / (times[-1] - times[0])


def _with_ours(model, mixture, recipe, steps, folder, muon):
    from foretoken.train import trainer
    from foretoken.train.objectives import NextToken

    schedule = recipe.schedule if muon else replace(recipe.schedule, rates=replace(recipe.schedule.rates, muon=None))
    times: list[float] = []
    bounds = trainer.Bounds(tokens=steps * recipe.schedule.batch * recipe.block)
    trainer.fit(
        model,
        NextToken(),
        mixture,
        schedule,
        bounds,
        folder / "checkpoints",
        report=lambda progress: times.append(time.perf_counter()),
    )
    return times


def _with_trainer(model, blocks, recipe, folder):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        times: list[float] = []  # noqa: RUF012

        def on_step_end(self, *arguments, **keywords):
            self.times.append(time.perf_counter())

    rows = [{"input_ids": block, "labels": block} for block in blocks]
    micro = recipe.schedule.micro_batch
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=recipe.schedule.batch // micro,
        num_train_epochs=1,
        learning_rate=2e-3,
        weight_decay=0.1,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Clock()]).train()
    return Clock.times


if __name__ == "__main__":
    main()
