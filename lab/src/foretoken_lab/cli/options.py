"""Options that several commands of the lab have, each in a panel of the help, as in ``seed_option("Sampling")``."""

from __future__ import annotations

from typing import Any

import typer


def temperature_option(panel: str) -> Any:
    """``--temperature`` with a single value."""
    return typer.Option("--temperature", help="Sampling temperature; 0 is greedy decoding.", rich_help_panel=panel)


def seed_option(panel: str) -> Any:
    """``--seed`` with a default."""
    return typer.Option("--seed", help="Seed of the sampling.", rich_help_panel=panel)


def corpus_option(panel: str | None = None) -> Any:
    """``--corpus``, the user's own text."""
    return typer.Option(
        "--corpus",
        metavar="FILE",
        help="JSON Lines of chats or texts, or plain text. Repeatable.",
        rich_help_panel=panel,
    )


def answer_length_option(panel: str) -> Any:
    """``--max-tokens`` for tasks with a default length."""
    return typer.Option(
        "--max-tokens", help="Maximum tokens of an answer.", show_default="the task's", rich_help_panel=panel
    )


def prompt_length_option(panel: str) -> Any:
    """``--prompt-tokens``, for tasks that cut their prompts to a length."""
    return typer.Option(
        "--prompt-tokens",
        min=1,
        metavar="N",
        help="Tokens per prompt, for keys and qmsum.",
        show_default="the task's",
        rich_help_panel=panel,
    )
