"""How good a draft is, in the unit that matters: what the engine accepts of it on prompts that training never saw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.core.metrics import Metrics
from foretoken.core.sampling import SamplingParams
from foretoken.engine.llm import LLM

MAX_TOKENS = 64


def measure(
    target: str, draft: str, prompts: Sequence[str], num_drafts: int = 6, temperatures: Sequence[float] = (0.0, 1.0)
) -> dict[str, dict[str, Any]]:
    """Draft for real and count.

    Args:
        target: zoo name or folder.
        draft: likewise.
        prompts: user messages; answered with the chat template if the target has one.
        num_drafts: length of the chain.
        temperatures: greedy verification at 0, else the exact token-wise ratio test.
    Returns:
        for each temperature ("greedy", "T=1"): ``tokens_per_step`` (bonus included), ``accepted_length`` (without it),
        ``acceptance_by_position``.
    """
    found = {}
    for temperature in temperatures:
        config = {"method": "draft_model", "model": draft, "num_speculative_tokens": num_drafts}
        llm = LLM(target, speculative_config={**config, "verifier": "ratio" if temperature else "greedy"})
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=0)
        total = Metrics()
        if llm.is_chat_model:
            outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
        else:
            outputs = llm.generate(list(prompts), params)
        for output in outputs:
            total.add(output.metrics)
        found[f"T={temperature:g}" if temperature else "greedy"] = {
            "tokens_per_step": round(total.tokens_per_step, 3),
            "accepted_length": round(total.num_accepted_tokens / max(total.num_steps, 1), 3),
            "acceptance_by_position": [round(share, 3) for share in total.acceptance_by_position],
            "prompts": len(prompts),
        }
        llm.close()
    return found
