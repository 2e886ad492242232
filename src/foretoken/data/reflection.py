"""The instruction to a target before it reads a draft again, for the rule and for the training recipe."""

BACK = " [BACK] "  # the paper's own, for trees; its longer one is unknown
INSTRUCTION = " [Reflect: re-check the continuation above for correctness and write the corrected continuation.] "
PREFIX = 8  # maximum tokens of the answer that are repeated before the copy
