"""What a verifier decides about one draft."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted path and the one token that every step adds.

    Attributes:
        path: accepted node indices from a child of the root downwards; may be empty.
        extra: the token after the path: a correction where the draft was refused, else the bonus.
        distortion: estimated total variation between the emitted law and the target's law, summed over the emitted
            tokens; 0.0 for a lossless rule.
    """

    path: tuple[int, ...]
    extra: int
    distortion: float = 0.0
