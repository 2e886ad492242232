"""``FORETOKEN_NATIVE`` and ``FORETOKEN_VARIANT``: whether native code computes, and which; read in one place."""

import os

from foretoken.core.errors import ConfigError

_NAME = "FORETOKEN_NATIVE"


def native_wanted() -> bool:
    """Whether the native decoder and the kernels are to be used: they are unless ``FORETOKEN_NATIVE=0``.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    value = os.environ.get(_NAME) or "1"
    if value not in ("0", "1"):
        raise ConfigError(f"{_NAME}={value}: 0 switches the native decoder off, 1 leaves it on")
    return value == "1"


def variant_wanted() -> str | None:
    """The requested variant of the decoder (native/variants.py); None: the best for this processor."""
    return os.environ.get("FORETOKEN_VARIANT") or None
