"""Sampling parameters under vLLM's import names."""

import foretoken
from foretoken.options.sampling import SamplingParams
from foretoken.options.structured import StructuredOutputs as StructuredOutputsParams

__all__ = ["SamplingParams", "StructuredOutputsParams"]


__getattr__ = foretoken.__getattr__  # reports the replacement of other names
