"""``foretoken train judge``: the head that says of a draft's token whether it is fine where it stands."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.console import emit_json, note, quiet_transformers
from foretoken.cli.training import check_device, check_positive, counting, terminating

DEFAULT_TASKS = "profiles,code,arithmetic,json"


def judge(
    context: typer.Context,
    target: Annotated[str, typer.Option("--target", "-t", help="The model that verifies: zoo:NAME, folder or hub id.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to make.")],
    draft: Annotated[
        str | None,
        typer.Option("--draft", "-d", help="The model that drafts, of the target's vocabulary; for --tasks."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            metavar="A,B,…",
            help=f"Tasks to mine labels from; default: {DEFAULT_TASKS}, or none with --triples.",
            show_default=False,
        ),
    ] = None,
    examples: Annotated[int, typer.Option("--examples", metavar="N", help="Questions to ask.")] = 1000,
    minutes: Annotated[float, typer.Option("--minutes", help="Stop asking after so many minutes.")] = 5.0,
    triples: Annotated[
        Path | None,
        typer.Option(
            "--triples", metavar="FILE.jsonl", help="Annotations: question, correct, wrong, error as [BEGIN, END]."
        ),
    ] = None,
    tail: Annotated[
        str, typer.Option("--tail", help="Tokens behind an annotated error: mask (no label) or negative.")
    ] = "mask",
    false_accepts: Annotated[
        float,
        typer.Option(
            "--false-accepts", metavar="F", help="Share of bad tokens that the threshold may let pass, held out."
        ),
    ] = 0.02,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Of questions and split.")] = 0,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option("--threads", min=1, metavar="N", help="CPU threads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record of the run as JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Let the libraries talk.")] = False,
) -> None:
    """Train a judge: it reads the target's last hidden state of a draft's token and says whether the token is fine.

    Target and draft stay as they are. The labels are mined from tasks that can be checked: the draft's token is put
    into the target's answer, the target goes on by itself, and the token is fine if the answer is still the same. Or
    they come from annotations. Reported for questions held out of the training: ROC AUC, and what the threshold lets
    pass of the fine and of the bad tokens.
    """
    import torch

    from foretoken.methods.judge import train as training
    from foretoken.methods.judge.mining import Mining

    quiet_transformers(verbose)
    for name, value in (("--examples", examples), ("--minutes", minutes)):
        check_positive(name, value)
    check_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    if tasks is None and triples is None:
        tasks = DEFAULT_TASKS
    mining = None
    if tasks is not None:
        names = tuple(name.strip() for name in tasks.split(","))
        mining = Mining(tasks=names, count=examples, seconds=60 * minutes, seed=seed)
    asking = nullcontext(_nothing) if mining is None else counting("asking questions", examples)
    with terminating(), asking as report:
        record = training.run(
            target,
            draft,
            out,
            mining,
            triples=triples,
            tail=tail,
            false_accepts=false_accepts,
            seed=seed,
            device=device,
            report=report,
            arguments=context.obj,
        )
    if as_json:
        emit_json(record)
    _say(record, out)


def _nothing(number: int) -> None:
    """Nobody is asked."""


def _say(record: dict[str, Any], out: Path) -> None:
    labels, held = record["labels"], record["held_out"]
    note(
        f"{out}: {record['parameters']} numbers from {labels['not_the_targets_own']:,} tokens that the target would "
        f"not say itself, {labels['fine']:,} of them fine"
    )
    for name, each in (*held["by_source"].items(), ("all", held)):
        area = "unknown" if each["auc"] is None else f"{each['auc']:.3f}"
        fine, bad = (
            f"{'none' if each[share] is None else f'{each[share]:.1%}'} of {each[kind]} {kind}"
            for share, kind in (("fine_accepted", "fine"), ("false_accepts", "bad"))
        )
        note(f"held out, {name}: ROC AUC {area}; above {record['threshold']:.3f} are {fine} and {bad} tokens")
