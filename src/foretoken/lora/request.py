"""An adapter for a request, under vLLM's import name."""

from foretoken.options.lora import LoRARequest

__all__ = ["LoRARequest"]
