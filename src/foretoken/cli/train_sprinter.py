"""``foretoken train sprinter``: the head that judges a draft's tokens in the target's place."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.console import emit_json, note, quiet_transformers
from foretoken.cli.training import check_device, check_positive, counting, terminating
from foretoken.core.errors import ConfigError


def sprinter(
    context: typer.Context,
    target: Annotated[str, typer.Option("--target", "-t", help="The model that verifies: zoo:NAME, folder or hub id.")],
    draft: Annotated[str, typer.Option("--draft", "-d", help="The model that drafts; of the target's vocabulary.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to make.")],
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of the corpora; default: $FORETOKEN_DATA.")
    ] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option("--corpus", help="FILE or FILE=SHARE: your own text. Repeatable."),
    ] = None,
    feature: Annotated[
        str, typer.Option("--feature", help="pre: judge a token before it is read, as published; post: after.")
    ] = "pre",
    examples: Annotated[int, typer.Option("--examples", metavar="N", help="Tokens to judge by, about.")] = 10_000,
    minutes: Annotated[float, typer.Option("--minutes", help="Stop collecting after so many minutes.")] = 5.0,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Draw the draft's tokens at it; 0: its greedy tokens, as published.")
    ] = 0.0,
    ratio: Annotated[float, typer.Option("--ratio", help="A token is acceptable where q <= RATIO p.")] = 1.0,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="Tokens drafted behind a document.")] = 20,
    replies: Annotated[
        bool, typer.Option("--replies", help="Draft where replies begin, not behind the first 30 % of a document.")
    ] = False,
    soft: Annotated[
        bool, typer.Option("--soft", help="Train on the chance of acceptance, min(1, p/q), not on yes or no.")
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Held-out prompts to judge by; default: the bundled suite.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Of order, split and sampling.")] = 0,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option("--threads", min=1, metavar="N", help="CPU threads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record of the run as JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Let the libraries talk.")] = False,
) -> None:
    """Train SPRINTER's head: it reads the draft's last hidden state and says whether the target would accept a token.

    Draft and target stay as they are. Behind the first 30 % of each document tokens are drafted; whether the target
    would certainly accept each of them is what the head learns. Reported on documents held out of the training: ROC AUC
    and accuracy. Then the real engine drafts for the held-out prompts, and tells what that saves and what it costs.
    """
    import torch

    from foretoken.bench.workloads import BUNDLED_SUITE, read_prompts
    from foretoken.data.corpora import data_root
    from foretoken.methods.sprinter import train as training
    from foretoken.methods.sprinter.labels import Collecting
    from foretoken.train import sources
    from foretoken.train.recipe import add_to_record
    from foretoken.train.recipes.base import mixture

    quiet_transformers(verbose)
    for name, value in (("--examples", examples), ("--minutes", minutes), ("--ratio", ratio)):
        check_positive(name, value)
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"--temperature {temperature}: must be 0 or more")
    check_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    judges = [prompt.text for prompt in read_prompts(prompts or BUNDLED_SUITE)]
    text = sources.parse_all(corpus) if corpus else mixture(data_root(data))
    how = Collecting(
        count=examples,
        steps=steps,
        replies=replies,
        temperature=temperature,
        ratio=ratio,
        seed=seed,
        seconds=60 * minutes,
    )
    with terminating(), counting("collecting examples", examples) as report:
        record = training.run(
            target,
            draft,
            text,
            out,
            how,
            feature=feature,
            soft=soft,
            device=device,
            report=report,
            arguments=context.obj,
        )
    config = {"method": "sprinter", "model": draft, "head": str(out)}
    found = training.measure(target, config, judges, device=device)
    record = add_to_record(out, {"serving": found})
    if as_json:
        emit_json(record)
    _say(record, out)
    note(f"try: foretoken generate PROMPT --model {target} --method sprinter --set model={draft} --set head={out}")


def _say(record: dict[str, Any], out: Path) -> None:
    held = record["held_out"][record["feature"]]
    area = "unknown" if held["auc"] is None else f"{held['auc']:.3f}"
    note(
        f"{out}: {record['parameters']} numbers from {record['examples']:,} examples behind {record['documents']:,} "
        f"documents, {record['acceptable']:.0%} acceptable"
    )
    note(f"held out: ROC AUC {area}, accuracy {held['accuracy']:.3f} of {held['examples']:,} examples")
    for mode, each in record["serving"].items():
        rates = ", ".join(
            f"{name} {'unknown' if each[name] is None else f'{each[name]:.2f}'}"
            for name in ("alpha", "eta_fp", "eta_tp")
        )
        note(
            f"{mode}: {each['tokens_per_step']:.2f} tokens per step, distortion {each['distortion']:.3f} a token; "
            f"{rates}"
        )
