"""An adapter for a request, as vLLM spells it."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.core.errors import ConfigError


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA folder that corrects the base model for one request, or for several.

    Attributes:
        lora_name: for messages; requests with the same name and folder share prefixes.
        lora_int_id: vLLM's number of it; not used here.
        lora_path: the folder, with ``adapter_config.json`` and ``adapter_model.safetensors``.
        draft_lora: such a folder for the draft model, which then drafts for the corrected model; empty: the folder
            ``draft`` in ``lora_path``, if it has one and the method has a draft model.
    Raises:
        ConfigError: name or folder is empty.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    draft_lora: str = ""

    def __post_init__(self) -> None:
        for field in ("lora_name", "lora_path"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value.strip():
                raise ConfigError(f"LoRARequest: {field}={value!r:.60} must be a text that is not empty")
