"""Results of a benchmark of two methods on two prompts, one of which fails."""

from __future__ import annotations

from typing import Any

from foretoken.bench.harness import Method, Records, Sample
from foretoken.bench.summary import summarise
from foretoken.core.metrics import Emitted, Metrics
from foretoken.data.prompts import Prompt


def results_of_three() -> list[dict[str, Any]]:
    prompts = [Prompt("p<1>", "a", "maths"), Prompt("p2", "b", "chat")]
    samples = []
    for repeat in range(2):
        for prompt in prompts:
            for label, seconds in (("none", 1.0), ("slow", 1.25), ("fast", 0.5)):
                metrics = Metrics(
                    num_tokens=4,
                    num_steps=2,
                    num_draft_tokens=4,
                    num_accepted_tokens=2,
                    drafted_at=[30, 2],
                    accepted_at=[24, 1],
                    emitted=[Emitted(0.25, 1, 0), Emitted(seconds, 2, 1)],
                )
                error = "NaN <logits>" if label == "slow" and prompt.id == "p2" else None
                samples.append(Sample(label, prompt, repeat, seconds, () if error else (1, 2), metrics, error))
    methods = [Method(name, {"method": name}) for name in ("none", "slow", "fast")]
    return summarise(Records(samples, 2), methods, dict.fromkeys(("none", "slow", "fast"), "same text"))


PROVENANCE = {
    "model": "zoo:base",
    "suite": {"num_prompts": 2, "file": "<odd>"},
    "repeats": 2,
    "dtype": "bfloat16",
    "threads": 1,
    "temperature": 0.0,
    "max_tokens": 8,
    "batch_size": 1,
    "cpu": "a & b",
    "interrupted": False,
    "command": "foretoken bench",
    "commit": None,
    "date": "2026-11-22",
}
