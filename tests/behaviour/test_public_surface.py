"""The public names are those of the kept list; ``python scripts/surface.py`` writes it after a deliberate change."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken_lab import public_surface

KEPT = Path(__file__).with_name("public_surface.txt")
REFRESH = "python scripts/surface.py writes the list; docs/stability.md says how a removal is announced"


@pytest.fixture(scope="module")
def found() -> list[str]:
    return public_surface.lines()


def test_the_public_surface_is_the_kept_one(found: list[str]) -> None:
    kept = KEPT.read_text(encoding="utf-8").splitlines()
    assert sorted(set(kept) - set(found)) == [], f"gone: {REFRESH}"
    assert sorted(set(found) - set(kept)) == [], f"new: {REFRESH}"
    assert kept == found


def test_every_kind_is_on_the_list(found: list[str]) -> None:
    for line in (
        "import foretoken.LLM",
        "field foretoken.options.sampling.SamplingParams.temperature",
        "command foretoken generate: --max-tokens VALUE",
        "http POST /v1/chat/completions: messages: list (required)",
        "metric vllm:generation_tokens_total: counter by model_name",
        "exit code 130: interrupted",
        "environment FORETOKEN_ZOO",
        "entry points foretoken.methods",
        "drafter suffix: lossless",
    ):
        assert line in found


def test_a_signature_marks_arguments_with_defaults() -> None:
    def call(self: object, a: int, b: int = 1, *, c: int, d: int = 2, **more: int) -> None: ...

    assert public_surface._parameters(call) == "(a, b=, *, c, d=, **more)"
