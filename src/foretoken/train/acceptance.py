"""How good a drafter is, in the unit that matters: what the engine accepts of it on prompts that training never saw."""

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.core.metrics import Metrics
from foretoken.engine.llm import LLM
from foretoken.engine.output import RequestOutput
from foretoken.options.sampling import SamplingParams

MAX_TOKENS = 64
_TEMPLATE = 32  # tokens that a chat template may add


def measure(
    target: str, config: Mapping[str, Any], prompts: Sequence[str], temperatures: Sequence[float] = (0.0, 1.0)
) -> dict[str, dict[str, Any]]:
    """Draft for real and count.

    Args:
        target: zoo name or folder.
        config: a ``speculative_config`` without its verifier, of a method that drafts chains.
        prompts: user messages; answered with the chat template if the target has one. Those that its context does
            not hold are left out.
        temperatures: greedy verification at 0, else the exact token-wise ratio test.
    Returns:
        for each temperature ("greedy", "T=1"): ``tokens_per_step`` (bonus included), ``accepted_length`` (without it),
        ``acceptance_by_position``. Empty if no prompt fits.
    """
    found = {}
    for temperature in temperatures:
        outputs = written(target, {**config, "verifier": "ratio" if temperature else "greedy"}, prompts, temperature)
        if not outputs:
            break
        total = Metrics()
        for output in outputs:
            total.add(output.metrics)
        found[f"T={temperature:g}" if temperature else "greedy"] = {
            "tokens_per_step": round(total.tokens_per_step, 3),
            "accepted_length": round(total.num_accepted_tokens / max(total.num_steps, 1), 3),
            "acceptance_by_position": [round(share, 3) for share in total.acceptance_by_position],
            "prompts": len(outputs),
        }
    return found


def written(target: str, config: Mapping[str, Any], prompts: Sequence[str], temperature: float) -> list[RequestOutput]:
    """What a target answers, in MAX_TOKENS tokens at most.

    Args:
        config: a whole ``speculative_config``.
        prompts: as for :func:`measure`.
    """
    llm = LLM(target, speculative_config=dict(config))
    try:
        return answers(llm, prompts, temperature)
    finally:
        llm.close()


def answers(llm: LLM, prompts: Sequence[str], temperature: float) -> list[RequestOutput]:
    """As :func:`written`, of a loaded target."""
    room = llm.target.max_length - MAX_TOKENS - _TEMPLATE
    fitting = [prompt for prompt in prompts if len(llm.tokenizer(prompt)["input_ids"]) <= room]
    if not fitting:
        return []
    # of one seed, all prompts would share their draws, and a mean over them would err as one prompt's does
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=number) for number in range(len(fitting))
    ]
    if llm.is_chat_model:
        return llm.chat([[{"role": "user", "content": prompt}] for prompt in fitting], params)
    return llm.generate(fitting, params)
