"""``foretoken train sprinter``: options, run and summary; imports torch only when it runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from foretoken.options.option import Option
from foretoken.train.command import DRAFT, Command, Judged, Session, Text


@dataclass(frozen=True, kw_only=True)
class Config(Text, Judged):
    """Train SPRINTER's head: from the draft's last state it predicts whether the target would accept a token.

    Draft and target stay unchanged. Tokens are drafted after the first 30 % of each document, and the head learns
    whether the target would certainly accept each of them. Measured on held-out documents: ROC AUC and accuracy. At the
    end the engine drafts for held-out prompts, and measures tokens per step and distortion.
    """

    target: Annotated[str, Option("The model that verifies: zoo:NAME, folder or hub id.", "-t", metavar="MODEL")]
    draft: Annotated[str, DRAFT]
    feature: Annotated[
        str,
        Option(
            "drawn: judge a token by state and distribution; pre: by the state before it, as published; post: after it."
        ),
    ] = "drawn"
    examples: Annotated[int, Option("Approximate number of tokens to learn from.", metavar="N", above=0)] = 10_000
    minutes: Annotated[float, Option("Time limit of the collection in minutes.", above=0)] = 5.0
    temperature: Annotated[
        float, Option("Temperature of the draft's tokens; 0: greedy tokens, as published.", least=0)
    ] = 0.0
    ratio: Annotated[float, Option("A token is acceptable where q <= RATIO p.", above=0)] = 1.0
    steps: Annotated[int, Option("Tokens drafted after a document.", name="draft-length", metavar="N", least=1)] = 20
    replies: Annotated[bool, Option("Draft at the beginning of replies, not after the first 30 % of a document.")] = (
        False
    )
    soft: Annotated[bool, Option("Train on the acceptance probability, min(1, p/q), not on a binary label.")] = False
    seed: Annotated[int, Option("Seed of order, split and sampling.", metavar="N", least=0, most=2**63 - 1)] = 0


def run(config: Config, session: Session) -> dict[str, Any]:
    """Collect examples, train a head, and serve the held-out prompts with it."""
    from foretoken.methods.sprinter import train as training
    from foretoken.methods.sprinter.labels import Collecting
    from foretoken.train.run_folder import add_to_record
    from foretoken.train.sources import mixture

    prompts = session.prompts(config.suite)
    text = config.sources(mixture("base"))
    how = Collecting(
        count=config.examples,
        steps=config.steps,
        replies=config.replies,
        temperature=config.temperature,
        ratio=config.ratio,
        seed=config.seed,
        seconds=60 * config.minutes,
    )
    with session.counting("collecting examples", config.examples) as report:
        training.run(
            config.target,
            config.draft,
            text,
            config.out,
            how,
            feature=config.feature,
            soft=config.soft,
            device=config.device,
            report=report,
            arguments=session.arguments,
        )
    serving = {"method": "sprinter", "model": config.draft, "head": str(config.out)}
    found = training.measure(config.target, serving, prompts, device=config.device)
    return add_to_record(config.out, {"serving": found})


def say(record: dict[str, Any], out: Path) -> list[str]:
    """Summarise the examples, the head's quality, and its effect in the engine."""
    held = record["held_out"][record["feature"]]
    lines = [
        f"{out}: {record['parameters']} numbers from {record['examples']:,} examples after {record['documents']:,} "
        f"documents, {record['acceptable']:.0%} acceptable",
        f"held out: ROC AUC {_text(held['auc'])}, accuracy {held['accuracy']:.3f} of {held['examples']:,} examples",
        "held out, ROC AUC by source, of this head and of baselines without a head (chance: 0.5):",
    ]
    for source, each in record["held_out_by_source"].items():
        areas = each["auc"]
        numbers = ", ".join(f"{name} {_text(areas[name])}" for name in (record["feature"], *record["baselines"]))
        lines.append(f"  {source}: {numbers} ({each['examples']} examples, {each['acceptable']:.0%} acceptable)")
    for mode, each in record["serving"].items():
        rates = ", ".join(
            f"{name} {'unknown' if each[name] is None else f'{each[name]:.2f}'}"
            for name in ("alpha", "eta_fp", "eta_tp")
        )
        lines.append(
            f"{mode}: {each['tokens_per_step']:.2f} tokens per step, distortion {each['distortion']:.3f} a token; "
            f"{rates}"
        )
    options = f"--method sprinter --set model={record['draft']} --set head={out}"
    return [*lines, f"try: foretoken generate PROMPT --model {record['target']} {options}"]


def _text(area: float | None) -> str:
    return "unknown" if area is None else f"{area:.3f}"


COMMAND = Command(
    name="sprinter",
    example="foretoken train sprinter --target zoo:base --draft-model zoo:draft --corpus generated --out my-head",
    config=Config,
    run=run,
    say=say,
)
