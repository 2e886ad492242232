"""Tokens per second of our trainer against the Trainer of transformers: the same model, blocks, batch and precision.

    python benchmarks/training.py --data DATA [--steps 6] [--repeats 3] [--threads 2] [--compile] [--against CHECKOUT]
        [--json OUT]

With --against, ours stands next to ours of another checkout, as that one's own script measures it. They train the same
model on the same blocks as long as both checkouts make these in the same way; compare the loss of the last step. With
--compile, the layers of ours are compiled, as by ``foretoken train base --compile on``; those of the other are not.

Each arm runs in a process of its own, by turns. The first step is not counted. Ours trains with Muon and AdamW, which
costs more than AdamW alone; ``ours (AdamW)`` leaves Muon out, so that the loops alone are compared. Transformers' arm
needs ``pip install accelerate``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ARMS = ("ours", "ours (AdamW)", "transformers Trainer")
THERE = "ours, the other checkout"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout of this repository")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        rate, loss = _rate(options.arm, options)
        print(json.dumps({"rate": rate, "loss": loss}))
        return
    from foretoken_lab.measurement import Measurement  # not above: the arms of another checkout may lack it

    measurement = Measurement("training.py", options.json, threads=None)
    if options.against and not (options.against / "src" / "foretoken").is_dir():
        raise SystemExit(f"--against {options.against}: no src/foretoken in it")
    arms = (ARMS[0], THERE) if options.against else ARMS
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for turn in range(options.repeats):
        for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            found[arm].append(_measure(arm, options))
            print(f"{arm}: {found[arm][-1]['rate']:,.0f} tokens/s, loss {found[arm][-1]['loss']:.3f}", flush=True)
    told = {}
    for arm in arms:
        ratios = [ours["rate"] / theirs["rate"] for ours, theirs in zip(found[arm], found[arms[-1]], strict=True)]
        told[arm] = {
            "tokens_per_second": [round(each["rate"]) for each in found[arm]],
            "last_loss": [None if math.isnan(each["loss"]) else round(each["loss"], 4) for each in found[arm]],
            "ratio": [round(ratio, 3) for ratio in sorted(ratios)],
        }
        print(f"{arm}: {statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}) of {arms[-1]}")
    settings = {"threads": options.threads, "steps": options.steps, "compiled": options.compile}
    if options.against:
        settings["against"] = _commit(options.against)
    measurement.write({"arms": told}, **settings)


def _commit(checkout: Path) -> str:
    done = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _measure(arm: str, options: argparse.Namespace) -> dict[str, float]:
    """One run of an arm in a process of its own; that of another checkout is its own script and package."""
    root = options.against if arm == THERE else Path(__file__).parents[1]
    command = [sys.executable, str(root / "benchmarks" / "training.py"), "--arm", ARMS[0] if arm == THERE else arm]
    command += ["--data", str(options.data), "--steps", str(options.steps), "--threads", str(options.threads)]
    command += ["--compile"] if options.compile and arm.startswith(ARMS[0]) and arm != THERE else []
    paths = {**os.environ, "PYTHONPATH": str(root / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=paths)
    if done.returncode:
        raise SystemExit(f"{arm} failed:\n{done.stderr[-2000:]}")
    return {"loss": math.nan, **json.loads(done.stdout.splitlines()[-1])}  # older scripts say the rate alone


def _rate(arm: str, options: argparse.Namespace) -> tuple[float, float]:
    """Tokens per second, and the loss of the last step."""
    import torch

    from foretoken.forward import anatomy
    from foretoken.models.load import load_tokenizer
    from foretoken.train import attention
    from foretoken.train.mixture import Mixture
    from foretoken.train.recipe import build
    from foretoken.train.rendering import encoder
    from foretoken_lab.recipes import find

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
            times, loss = _with_trainer(model, blocks, recipe, folder)
        else:
            attention.use(model)  # as foretoken train does
            for layer in anatomy.find(model).layers if options.compile else ():
                layer.compile(dynamic=False)
            mixture.resume({"number": 0, "given": {source.name: 0 for source in sources}})
            times, loss = _with_ours(model, mixture, recipe, options.steps, Path(folder), muon=arm == "ours")
    per_step = recipe.schedule.batch * recipe.block
    return per_step * (len(times) - 1) / (times[-1] - times[0]), loss


def _with_ours(model, mixture, recipe, steps, folder, muon):
    from foretoken.train import trainer
    from foretoken.train.objectives import NextToken

    schedule = recipe.schedule if muon else replace(recipe.schedule, rates=replace(recipe.schedule.rates, muon=None))
    times: list[float] = []
    losses: list[float] = []

    def report(progress):
        times.append(time.perf_counter())
        losses.append(progress.loss)

    bounds = trainer.Bounds(tokens=steps * recipe.schedule.batch * recipe.block)
    trainer.fit(model, NextToken(), mixture, schedule, bounds, folder / "checkpoints", report=report)
    return times, losses[-1]


def _with_trainer(model, blocks, recipe, folder):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        times: list[float] = []  # noqa: RUF012
        losses: list[float] = []  # noqa: RUF012

        def on_step_end(self, *arguments, **keywords):
            self.times.append(time.perf_counter())

        def on_log(self, arguments, state, control, logs=None, **keywords):
            self.losses += [logs["loss"]] if "loss" in logs else []

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
        logging_steps=1,
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Clock()]).train()
    return Clock.times, Clock.losses[-1]


if __name__ == "__main__":
    main()
