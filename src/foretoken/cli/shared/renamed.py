"""Options that had another name, or meant something else elsewhere: the error says how it is written now."""

from __future__ import annotations

from collections.abc import Sequence

_RUN = ("generate", "chat", "serve", "batch", "eval", "bench")
_ELSEWHERE = {  # as vLLM, transformers and llama.cpp call it: command lines of theirs are tried here first
    "--num-speculative-tokens": "--set num_speculative_tokens=N",
    "--num_speculative_tokens": "--set num_speculative_tokens=N",
    "--speculative-config": "--method NAME with --set key=value",
    "--speculative-model": "--draft-model",
    "--assistant-model": "--draft-model",
    "--model-draft": "--draft-model",
    "--max-new-tokens": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--temp": "--temperature",
    "--verifier": "--set verifier=NAME",
}
_ANALYZE = ("analyze acceptance", "analyze tradeoff", "analyze scaling")
_HEADS = tuple(f"train {name}" for name in ["kangaroo", "eagle", "scylla", "dovetail", "diffuspec", "longspec"])
_RENAMED: dict[tuple[str, ...], dict[str, str]] = {
    _ANALYZE: {"--target": "--model", "--draft": "--draft-model"},
    ("analyze scaling", "calibrate scylla"): {"--batches": "--batch-size"},
    ("calibrate scylla",): {"--tokens": "--max-tokens"},
    ("calibrate sparse",): {"--data": "--corpus"},
    ("calibrate vocabulary",): {"--text": "--writer", "--draft": "--draft-model"},
    ("bench serve",): {"--model": "--served-model-name", "--prompts": "--suite"},
    ("eval", "analyze tradeoff"): {"--context": "--prompt-tokens"},
    ("train base", "train draft"): {"--start": "--from"},
    _HEADS: {"--from": "--start"},
    ("train",): {"--prompts": "--suite"},
    ("train features",): {"--layers": "--depths", "--dtype": "--state-dtype"},
    ("train sprinter",): {"--draft": "--draft-model", "--steps": "--draft-length"},
    ("train judge",): {"--draft": "--draft-model", "--tasks": "--task"},
}


def remedy(command: str, arguments: Sequence[str]) -> str | None:
    """What to write in place of the first old name among arguments that could not be parsed; None: there is none.

    Args:
        command: as it was typed, the program's name in front.
        arguments: everything behind the program's name.
    """
    path = command.partition(" ")[2]
    if path == "serve" and any(argument.partition("=")[0] in ("--model", "-m") for argument in arguments):
        return "the model of 'foretoken serve' is written without --model: foretoken serve MODEL"
    for commands, names in _RENAMED.items():
        if any(f"{path} ".startswith(f"{each} ") for each in commands):
            for argument in arguments:
                old = argument.partition("=")[0]
                if old in names:
                    return f"{old} of 'foretoken {path}' is called {names[old]}"
    if path in _RUN:
        for argument in arguments:
            old = argument.partition("=")[0]
            if old in _ELSEWHERE:
                return f"{old} is written {_ELSEWHERE[old]} here"
    return None
