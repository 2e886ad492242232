"""What generate gives, under the names that code for vLLM imports from here."""

from __future__ import annotations

import foretoken
from foretoken.engine.output import Completion as CompletionOutput
from foretoken.engine.output import RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]


__getattr__ = foretoken.__getattr__  # says what takes the place of other names
