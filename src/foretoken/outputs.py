"""Outputs of ``generate`` under vLLM's import names."""

import foretoken
from foretoken.engine.output import Completion as CompletionOutput
from foretoken.engine.output import RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]


__getattr__ = foretoken.__getattr__  # reports the replacement of other names
