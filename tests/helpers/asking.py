"""Requests that get drafts, chosen by the test and not by measurements of the machine."""

from __future__ import annotations

from collections.abc import Callable

from foretoken.engine.llm import LLM


class Always:
    """Drafts four nodes, whatever they promise."""

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        return num_nodes < 4


def asked_when(llm: LLM, asks: Callable[[int], bool]) -> list[int]:
    """Have the engine ask for a request where ``asks`` says so, by the tokens that it has emitted; counts the steps."""
    steps: list[int] = []

    def choose(requests, num_requests, *, queued):
        steps.append(num_requests)
        return [Always() if asks(each.num_output) else None for each in requests]

    llm.engine.controller.choose = choose
    return steps
