"""``foretoken train judge``: options, run and summary; imports torch only when it runs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from foretoken.options.option import Option
from foretoken.train.command import DRAFT, Command, Common, Session

DEFAULT_TASKS = "profiles,code,arithmetic,keys"


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """Train a judge: it reads the target's last hidden state of a draft token and decides whether the token is fine.

    Target and draft stay unchanged. Labels are mined from tasks with checkable answers: a draft token replaces one
    token of the target's answer, the target continues, and the token is fine if the answer is still right. The tasks
    are those of foretoken-lab, or your own: JSON Lines with question and answer (a number, or words). Alternatively,
    labels come from annotations (--triples). Measured on held-out questions: ROC AUC, and the shares of fine and of
    bad tokens above the threshold.
    """

    target: Annotated[str, Option("The model that verifies: zoo:NAME, folder or hub id.", "-t", metavar="MODEL")]
    draft: Annotated[str | None, DRAFT] = None
    tasks: Annotated[
        str | None,
        Option(
            f"Tasks of foretoken-lab to mine labels from, or files of your questions with their answers; default: "
            f"{DEFAULT_TASKS}, or none with --triples.",
            name="task",
            metavar="A,B,…",
            says_default=False,
        ),
    ] = None
    examples: Annotated[int, Option("Number of questions.", metavar="N", above=0)] = 1000
    labels: Annotated[
        Path | None,
        Option(
            "Store mined labels in this file; give it again to resume a stopped run or to fit again.", metavar="FILE"
        ),
    ] = None
    minutes: Annotated[float, Option("Time limit of mining in minutes.", above=0)] = 5.0
    triples: Annotated[
        Path | None, Option("Annotations: question, correct, wrong, error as [BEGIN, END].", metavar="FILE.jsonl")
    ] = None
    tail: Annotated[str, Option("Tokens after an annotated error: mask (no label) or negative.")] = "mask"
    false_accepts: Annotated[
        float, Option("Maximum share of held-out bad tokens above the threshold.", metavar="F")
    ] = 0.02
    seed: Annotated[int, Option("Seed of questions and split.", metavar="N", least=0, most=2**63 - 1)] = 0


def run(config: Config, session: Session) -> dict[str, Any]:
    """Mine or read labels, and train a head on them."""
    from foretoken_lab.judge import train as training
    from foretoken_lab.judge.mining import Mining

    tasks = DEFAULT_TASKS if config.tasks is None and config.triples is None else config.tasks
    mining = None
    if tasks is not None:
        names = tuple(name.strip() for name in tasks.split(","))
        mining = Mining(tasks=names, count=config.examples, seconds=60 * config.minutes, seed=config.seed)
    asking = nullcontext(_unheard) if mining is None else session.counting("asking questions", config.examples)
    with asking as report:
        return training.run(
            config.target,
            config.draft,
            config.out,
            mining,
            triples=config.triples,
            tail=config.tail,
            labels_file=config.labels,
            false_accepts=config.false_accepts,
            seed=config.seed,
            device=config.device,
            report=report,
            arguments=session.arguments,
        )


def _unheard(number: int) -> None:
    """Ignore the count of questions without a progress report."""


def say(record: dict[str, Any], out: Path) -> list[str]:
    """Summarise the labels, and the shares of tokens above the threshold for each source."""
    from foretoken_lab.judge import train as training

    labels, held = record["labels"], record["held_out"]
    lines = [
        f"{out}: {record['parameters']} numbers from {labels['not_the_targets_own']:,} tokens that the target would "
        f"not choose itself, {labels['fine']:,} of them fine"
    ]
    for name, each in held["by_source"].items():
        area = "unknown" if each["auc"] is None else f"{each['auc']:.3f}"
        fine, bad = (
            f"{'none' if each[share] is None else f'{each[share]:.1%}'} of {each[kind]} {kind}"
            for share, kind in (("fine_accepted", "fine"), ("false_accepts", "bad"))
        )
        best = training.best_without_head(each)
        cheap = "" if best is None else f" (without a head at most {best[1]:.3f}, {best[0]})"
        lines.append(
            f"held out, {name}: ROC AUC {area}{cheap}; above {record['threshold']:.3f} are {fine} and {bad} tokens"
        )
    macro = held["macro_auc"]
    lines.append(f"held out, mean of the ROC AUC within each: {'unknown' if macro is None else f'{macro:.3f}'}")
    return lines


COMMAND = Command(
    name="judge",
    example="foretoken train judge --target zoo:base --draft-model zoo:draft --out my-judge",
    config=Config,
    run=run,
    say=say,
)
