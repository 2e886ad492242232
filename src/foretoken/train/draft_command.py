"""``foretoken train draft``: its options, the run, and its messages; without torch until it runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from foretoken.options.option import Option
from foretoken.train.command import Command, Compiling, Judged, Session, shown_loss


@dataclass(frozen=True, kw_only=True)
class DraftConfig(Compiling, Judged):
    """Distil a small draft model from a target, on text that the target writes.

    At the end the engine measures tokens per step and acceptance by position on held-out prompts, greedy and at
    temperature 1; with --from also before the training.
    """

    target: Annotated[str, Option("The model to draft for: zoo:NAME, folder or hub id.", "-t", metavar="MODEL")]
    start: Annotated[str | None, Option("A draft to go on from; default: a new one of 2 thin layers.", name="from")] = (
        None
    )
    loss: Annotated[
        str,
        Option("Distance to the target's distribution that is made small: kl, reverse_kl, tv or neg_log_acceptance."),
    ] = "kl"
    own_words: Annotated[float, Option("Share of the text that the target writes itself.")] = 0.75
    on_policy: Annotated[float, Option("Share of the text that the draft in training writes.")] = 0.0
    num_drafts: Annotated[int, Option("Chain length to judge by.", name="num-speculative-tokens", above=0)] = 6


def train_draft(config: DraftConfig, session: Session) -> dict[str, Any]:
    """Distil a draft, and measure what the engine accepts of it."""
    from foretoken.train import acceptance
    from foretoken.train.distil import distil
    from foretoken.train.recipe import run
    from foretoken.train.run_folder import add_to_record

    prompts = session.prompts(config.suite)
    recipe = distil(config.target, config.start, config.loss, config.own_words, config.on_policy)
    sources = config.sources(recipe.sources)
    chain = {"method": "draft_model", "num_speculative_tokens": config.num_drafts}
    before = None
    if config.start:
        before = acceptance.measure(config.target, {**chain, "model": config.start}, prompts)
    with session.training("training a draft") as report:
        run(
            recipe,
            sources,
            config.out,
            compiled=config.compiled.holds(config.device),
            **config.loop(recipe.bounds, report, session),
        )
    after = acceptance.measure(config.target, {**chain, "model": str(config.out)}, prompts)
    return add_to_record(config.out, {"acceptance": {"before": before, "after": after}})


def say_draft(record: dict[str, Any], out: Path) -> list[str]:
    """The loss of the trained draft model, and the acceptance of its drafts."""
    before, after = record["acceptance"]["before"], record["acceptance"]["after"]
    lines = [
        f"{out}: {record['tokens'] / 1e6:.2f} M tokens in {record['minutes']} minutes, held-out "
        f"{record['objective']} {shown_loss(record)}"
    ]
    for mode, found in after.items():
        was = f" (before: {before[mode]['tokens_per_step']:.2f})" if before else ""
        positions = ", ".join(f"{share:.2f}" for share in found["acceptance_by_position"])
        lines.append(f"{mode}: {found['tokens_per_step']:.2f} tokens per step{was}; accepted by position: {positions}")
    return [
        *lines,
        f"try: foretoken generate PROMPT --model {record['teacher']} --method draft_model --set model={out}",
    ]


COMMAND = Command(
    name="draft",
    example="foretoken train draft --target zoo:base --from zoo:draft --corpus chats.jsonl --minutes 30 --out my-draft",
    config=DraftConfig,
    run=train_draft,
    say=say_draft,
)
