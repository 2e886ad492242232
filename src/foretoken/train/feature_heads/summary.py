"""The summary of a training run, printed at its end; without torch, as help imports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def summary(record: dict[str, Any], out: Path, called: str) -> list[str]:
    """Size, text, and accepted tokens: those that the engine measured, and those that training expected.

    Args:
        record: with ``acceptance``.
        called: the network, as in "CALLED of 1.2 M parameters".
    """
    lines = [
        f"{out}: {called} of {record['parameters'] / 1e6:.2f} M parameters for {record['target']}, "
        f"{record['draft_vocab_size']} tokens scored, {record['tokens'] / 1e6:.2f} M tokens read in "
        f"{record['minutes']} minutes"
    ]
    if not record["replies_only"]:
        lines.append("the tokenizer has no chat template: prompts were learnt from like replies")
    for mode, each in record["acceptance"].items():
        expected = record["walked"][mode]
        positions = ", ".join(f"{share:.2f}" for share in each["acceptance_by_position"])
        lines.append(
            f"{mode}: {each['tokens_per_step']:.2f} tokens per step (training expected {expected['after']:.2f}; "
            f"before it {expected['before']:.2f}); accepted by position: {positions}"
        )
    return lines
