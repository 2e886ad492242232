"""``foretoken train kangaroo``: the adapter with which a target drafts for itself from one of its early layers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.console import emit_json, note, quiet_transformers
from foretoken.cli.training import (
    CheckpointEvery,
    Rate,
    bounds,
    check_device,
    check_positive,
    progress,
    terminating,
)
from foretoken.core.errors import ConfigError


def kangaroo(
    context: typer.Context,
    target: Annotated[str, typer.Option("--target", "-t", help="The model to adapt: zoo:NAME, folder or hub id.")],
    exit_layer: Annotated[
        int, typer.Option("--exit-layer", metavar="E", help="Layers of the target below the adapter, 1 to L - 1.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to make; give it again to go on after a stop.")],
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of the corpora; default: $FORETOKEN_DATA.")
    ] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            "--corpus", help="FILE or FILE=SHARE: your own text, or stored outputs of the target. Repeatable."
        ),
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option("--features", metavar="DIR", help="Train from what foretoken train features stored instead."),
    ] = None,
    own_words: Annotated[
        float | None,
        typer.Option("--own-words", help="Share of the text that the target writes itself; default: 0.5."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Held-out prompts to judge by; default: the bundled suite.")
    ] = None,
    minutes: Annotated[float | None, typer.Option("--minutes", help="Stop after so many minutes of training.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Stop after so many tokens.")] = None,
    checkpoint_every: CheckpointEvery = None,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Of weights, order and sampling.")] = 0,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    rate: Rate = 1.0,
    threads: Annotated[int | None, typer.Option("--threads", min=1, metavar="N", help="CPU threads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record of the run as JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Let the libraries talk.")] = False,
) -> None:
    """Train Kangaroo's adapter: one attention layer that turns an early layer of a target into a draft of it.

    The target stays as it is. Reported on text held out of the training, before and after it: the share of drafts that
    would be accepted at temperature 1, and how often the target's favourite is among the adapter's first three. Then
    the real engine drafts for the held-out prompts, six tokens a step, and tells how many stand.
    """
    import torch

    from foretoken.bench.workloads import BUNDLED_SUITE, read_prompts
    from foretoken.data.corpora import data_root
    from foretoken.methods.kangaroo import train as training
    from foretoken.train import acceptance, sources
    from foretoken.train.recipe import add_to_record
    from foretoken.train.trainer import CHECKPOINT_SECONDS

    quiet_transformers(verbose)
    if features is not None and (data is not None or corpus or own_words is not None):
        raise ConfigError("--features holds its text already: leave out --data, --corpus and --own-words")
    share = training.OWN_WORDS if own_words is None else own_words
    recipe = training.recipe(target, exit_layer, share)
    end = bounds(recipe.bounds, minutes, tokens)
    check_positive("--rate", rate)
    check_device(device)
    if checkpoint_every is not None:
        check_positive("--checkpoint-every", checkpoint_every)
    if threads is not None:
        torch.set_num_threads(threads)
    judges = [prompt.text for prompt in read_prompts(prompts or BUNDLED_SUITE)]
    text = []
    if features is None:
        text = sources.parse_all(corpus) if corpus else recipe.sources(data_root(data))
    with terminating(), progress("training an adapter") as report:
        record = training.run(
            target,
            exit_layer,
            text,
            out,
            bounds=end,
            own_words=share,
            features=features,
            seed=seed,
            device=device,
            report=report,
            arguments=context.obj,
            checkpoint_every=checkpoint_every or CHECKPOINT_SECONDS,
            rate=rate,
        )
    config = {"method": "kangaroo", "adapter": str(out), "threshold": 0.0}
    found = acceptance.measure(target, config, judges)
    record = add_to_record(out, {"acceptance": found})
    if as_json:
        emit_json(record)
    note(
        f"{out}: adapter of {record['parameters'] / 1e6:.2f} M parameters after {exit_layer} layers of {target}, "
        f"{record['tokens'] / 1e6:.2f} M tokens in {record['minutes']} minutes"
    )
    if not record["replies_only"]:
        note("the tokenizer has none of the zoo's chat markers: prompts were learnt from like replies")
    for mode, each in found.items():
        positions = ", ".join(f"{share:.2f}" for share in each["acceptance_by_position"])
        note(f"{mode}: {each['tokens_per_step']:.2f} tokens per step; accepted by position: {positions}")
    before, after = record["held_out"]["before"], record["held_out"]["after"]
    if after is None:
        note("acceptance unknown: nothing was held out of a corpus this small")
    else:
        for measure, called in (
            ("acceptance", "expected acceptance at T=1"),
            ("top_1", "the target's favourite first"),
        ):
            note(f"{called}: {after[measure]:.3f} (untrained: {before[measure]:.3f}), {after['positions']} positions")
    note(f"try: foretoken generate PROMPT --model {target} --method kangaroo --set adapter={out}")
