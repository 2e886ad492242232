"""What may be asked of a request, under the names that code for vLLM imports from here."""

from __future__ import annotations

import foretoken
from foretoken.options.sampling import SamplingParams
from foretoken.options.structured import StructuredOutputs as StructuredOutputsParams

__all__ = ["SamplingParams", "StructuredOutputsParams"]


__getattr__ = foretoken.__getattr__  # says what takes the place of other names
