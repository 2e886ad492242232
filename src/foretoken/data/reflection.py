"""What a target is told before it reads a draft again: by the rule, and by the recipe that teaches it."""

BACK = " [BACK] "  # the paper's own, of its trees; its longer one is not known
INSTRUCTION = " [Reflect: re-check the continuation above for correctness and write the corrected continuation.] "
PREFIX = 8  # tokens of the answer that are repeated before the copy, at most
