"""Whether two models have the same tokens."""

from typing import Any


def different_vocabulary(target: Any, draft: Any) -> str | None:
    """Why the draft's tokens cannot be the target's tokens, given both tokenizers; None if they can.

    Equal ids must mean equal text. Embedding tables may be padded to different sizes (as within the Qwen family), so
    it is the tokenizers that are compared.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return None
    odd = (text for text, index in ours.items() if theirs.get(text) != index)
    differing = min(odd, key=ours.__getitem__, default=None)
    detail = f"{len(ours)} and {len(theirs)} entries"
    if differing is not None:
        detail += f"; '{differing}' is {ours[differing]} and {theirs.get(differing, 'absent')}"
    return detail
