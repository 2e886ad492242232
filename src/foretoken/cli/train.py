"""``foretoken train``: make a model of the zoo from its recipe, or a small learned part from a target."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken import zoo
from foretoken.cli import features, train_judge, train_kangaroo, train_sprinter
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

app = typer.Typer(no_args_is_help=True, help="Train the zoo's models, and small learned parts for a target of yours.")

app.command(
    "features", epilog="Example: foretoken train features --target zoo:base --corpus my.jsonl --out my-features"
)(features.features)
app.command(
    "kangaroo", epilog="Example: foretoken train kangaroo --target zoo:base --exit-layer 2 --data DATA --out my-adapter"
)(train_kangaroo.kangaroo)
app.command("judge", epilog="Example: foretoken train judge --target zoo:base --draft zoo:draft --out my-judge")(
    train_judge.judge
)
app.command(
    "sprinter", epilog="Example: foretoken train sprinter --target zoo:base --draft zoo:draft --data DATA --out my-head"
)(train_sprinter.sprinter)


class When(str, Enum):
    """When to compile: ``auto`` is where there is a GPU, since that is where it pays."""

    auto = "auto"
    yes = "yes"
    no = "no"

    def on(self, device: str) -> bool:
        return device != "cpu" if self is When.auto else self is When.yes


Compile = Annotated[
    When, typer.Option("--compile", help="Compile the layers first, half a minute; auto: only where there is a GPU.")
]


@app.command("base", epilog="Example: foretoken train base --recipe base --data DATA --out my-base --minutes 10")
def base(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe", "-r", help="base, base-tasks, base-tasks-2, draft, moe, hybrid, mamba, diffusion, long."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to make; default: where zoo:NAME is found, if it is not bundled."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of the corpora; default: $FORETOKEN_DATA.")
    ] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option("--corpus", help="FILE or FILE=SHARE: train on your own JSON Lines or text instead. Repeatable."),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", help="zoo:NAME or folder whose weights to start from; default: the recipe's."),
    ] = None,
    minutes: Annotated[float | None, typer.Option("--minutes", help="Stop after so many minutes of training.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Stop after so many tokens.")] = None,
    checkpoint_every: CheckpointEvery = None,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Of weights, order and masks.")] = 0,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    compiled: Compile = When.auto,
    rate: Rate = 1.0,
    threads: Annotated[int | None, typer.Option("--threads", min=1, metavar="N", help="CPU threads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record of the run as JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Let the libraries talk.")] = False,
) -> None:
    """Make one model of the zoo: tokenizer, data, training, and an ordinary Hugging Face folder.

    The recipe decides everything; its file is the documentation. Killed at any moment, the same command goes on
    from the last checkpoint. The data is the folder of public corpora, or files of your own: JSON Lines with
    messages, prompt + response, or text; or plain text.
    """
    import torch

    from foretoken.data.corpora import data_root
    from foretoken.train import sources
    from foretoken.train.recipe import copy_all, run
    from foretoken.train.recipes import find
    from foretoken.train.trainer import CHECKPOINT_SECONDS

    quiet_transformers(verbose)
    chosen = find(recipe)
    out = out or _place(recipe)
    if start is not None:
        chosen = replace(chosen, start=start, tokenizer=start, adopt=chosen.adopt or copy_all)
    end = bounds(chosen.bounds, minutes, tokens)
    check_positive("--rate", rate)
    check_device(device)
    if checkpoint_every is not None:
        check_positive("--checkpoint-every", checkpoint_every)
    if threads is not None:
        torch.set_num_threads(threads)
    mixture = sources.parse_all(corpus) if corpus else chosen.sources(data_root(data))
    with terminating(), progress(f"training {chosen.name}") as report:
        record = run(
            chosen,
            mixture,
            out,
            bounds=end,
            seed=seed,
            device=device,
            report=report,
            arguments=context.obj,
            checkpoint_every=checkpoint_every or CHECKPOINT_SECONDS,
            compiled=compiled.on(device),
            rate=rate,
        )
    if as_json:
        emit_json(record)
    note(
        f"{out}: {record['parameters'] / 1e6:.1f} M parameters, {record['tokens'] / 1e6:.2f} M tokens in "
        f"{record['minutes']} minutes, held-out loss {_loss(record)}"
    )
    if record["objective"] != "masked_diffusion":  # which fills masks, and cannot go on from a prompt
        note(f'try: foretoken generate "Tom has 12 marbles. He buys 30 more. How many has he now?" --model {out}')


@app.command(
    "draft", epilog="Example: foretoken train draft --target zoo:base --from zoo:draft --data DATA --out my-draft"
)
def draft(
    context: typer.Context,
    target: Annotated[str, typer.Option("--target", help="The model to draft for: zoo:NAME, folder or hub id.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to make; give it again to go on after a stop.")],
    start: Annotated[
        str | None, typer.Option("--from", help="A draft to go on from; default: a new one of 2 thin layers.")
    ] = None,
    loss: Annotated[str, typer.Option("--loss", help="kl, reverse_kl, tv or neg_log_acceptance.")] = "kl",
    own_words: Annotated[
        float, typer.Option("--own-words", help="Share of the text that the target writes itself.")
    ] = 0.75,
    on_policy: Annotated[
        float, typer.Option("--on-policy", help="Share of the text that the draft in training writes.")
    ] = 0.0,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of the corpora; default: $FORETOKEN_DATA.")
    ] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            "--corpus", help="FILE or FILE=SHARE: your own text, or stored outputs of the target. Repeatable."
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Held-out prompts to judge by; default: the bundled suite.")
    ] = None,
    num_drafts: Annotated[int, typer.Option("--num-speculative-tokens", help="Chain length to judge by.")] = 6,
    minutes: Annotated[float | None, typer.Option("--minutes", help="Stop after so many minutes of training.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Stop after so many tokens.")] = None,
    checkpoint_every: CheckpointEvery = None,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Of weights, order and sampling.")] = 0,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    compiled: Compile = When.auto,
    rate: Rate = 1.0,
    threads: Annotated[int | None, typer.Option("--threads", min=1, metavar="N", help="CPU threads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record of the run as JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Let the libraries talk.")] = False,
) -> None:
    """Distil a small draft model from a target, on the target's own words, and say what the engine accepts of it.

    The number that matters is measured by the real engine on held-out prompts: tokens per step and acceptance by
    position, greedy and at temperature 1, after the training and (with --from) before it.
    """
    import torch

    from foretoken.bench.workloads import BUNDLED_SUITE, read_prompts
    from foretoken.data.corpora import data_root
    from foretoken.train import acceptance, sources
    from foretoken.train.recipe import add_to_record, run
    from foretoken.train.recipes import draft as recipes
    from foretoken.train.trainer import CHECKPOINT_SECONDS

    quiet_transformers(verbose)
    end = bounds(recipes.RECIPE.bounds, minutes, tokens)
    check_positive("--num-speculative-tokens", num_drafts)
    check_positive("--rate", rate)
    check_device(device)
    if checkpoint_every is not None:
        check_positive("--checkpoint-every", checkpoint_every)
    if threads is not None:
        torch.set_num_threads(threads)
    judges = [prompt.text for prompt in read_prompts(prompts or BUNDLED_SUITE)]
    recipe = recipes.distil(target, start, loss, own_words, on_policy)
    mixture = sources.parse_all(corpus) if corpus else recipe.sources(data_root(data))
    chain = {"method": "draft_model", "num_speculative_tokens": num_drafts}
    before = acceptance.measure(target, {**chain, "model": start}, judges) if start else None
    with terminating(), progress("training a draft") as report:
        record = run(
            recipe,
            mixture,
            out,
            bounds=end,
            seed=seed,
            device=device,
            report=report,
            arguments=context.obj,
            checkpoint_every=checkpoint_every or CHECKPOINT_SECONDS,
            compiled=compiled.on(device),
            rate=rate,
        )
    after = acceptance.measure(target, {**chain, "model": str(out)}, judges)
    record = add_to_record(out, {"acceptance": {"before": before, "after": after}})
    if as_json:
        emit_json(record)
    note(
        f"{out}: {record['tokens'] / 1e6:.2f} M tokens in {record['minutes']} minutes, held-out {loss} {_loss(record)}"
    )
    for mode, found in after.items():
        was = f" (before: {before[mode]['tokens_per_step']:.2f})" if before else ""
        positions = ", ".join(f"{share:.2f}" for share in found["acceptance_by_position"])
        note(f"{mode}: {found['tokens_per_step']:.2f} tokens per step{was}; accepted by position: {positions}")
    note(f"try: foretoken generate PROMPT --model {target} --method draft_model --set model={out}")


def _loss(record: dict[str, Any]) -> str:
    loss = record["held_out_loss"]
    return "unknown (no document was held out of a corpus this small)" if loss is None else f"{loss} a token"


def _place(name: str) -> Path:
    if name not in zoo.MODELS:  # a stage of one
        raise ConfigError(f"the recipe '{name}' makes no model of the zoo: name a folder with --out DIR")
    if zoo.find(name).bundled:
        raise ConfigError(f"zoo:{name} is bundled: name a folder for your own with --out DIR")
    return zoo.home() / name
