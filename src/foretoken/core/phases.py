"""What a long call is doing: a logger that a face may listen to; without a listener nothing is written.

loading weights ─► checking what the native decoder computes ─► loading the draft model ...
"""

import logging

PHASES = logging.getLogger("foretoken.phases")
PHASES.setLevel(logging.INFO)
PHASES.propagate = False
PHASES.addHandler(logging.NullHandler())
