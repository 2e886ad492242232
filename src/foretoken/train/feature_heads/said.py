"""What a person is told of a run that trained a head; without torch, as help imports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def served(record: dict[str, Any], out: Path, what: str) -> list[str]:
    """What it became, what stands of its chains, and whether training foretold that.

    Args:
        record: with ``acceptance``.
        what: the head, as in "WHAT of 1.2 M parameters".
    """
    lines = [
        f"{out}: {what} of {record['parameters'] / 1e6:.2f} M parameters for {record['target']}, "
        f"{record['draft_vocab_size']} tokens scored, {record['tokens'] / 1e6:.2f} M tokens read in "
        f"{record['minutes']} minutes"
    ]
    if not record["replies_only"]:
        lines.append("the tokenizer has none of the zoo's chat markers: prompts were learnt from like replies")
    for mode, each in record["acceptance"].items():
        walked = record["walked"][mode]
        positions = ", ".join(f"{share:.2f}" for share in each["acceptance_by_position"])
        lines.append(
            f"{mode}: {each['tokens_per_step']:.2f} tokens per step (training expected {walked['after']:.2f}; "
            f"before it {walked['before']:.2f}); accepted by position: {positions}"
        )
    return lines
