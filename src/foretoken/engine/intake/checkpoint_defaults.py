"""The settings of a checkpoint's ``generation_config.json`` as the defaults of requests without params.

transformers' ``generate`` and vLLM follow that file by default; a repetition penalty or a list of suppressed tokens
changes greedy text, too. Lengths and end tokens are not read here: a request has its own length, and end tokens always
count (models/language_model.py).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from foretoken.core.errors import ConfigError
from foretoken.options.sampling import SamplingParams

_WHEN_SAMPLED = ("temperature", "top_p", "top_k", "min_p")
_NEUTRAL = {"repetition_penalty": 1.0, "num_beams": 1, "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0}
_NOT_HONOURED = (
    *("num_beams", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "no_repeat_ngram_size", "bad_words_ids"),
    *("stop_strings", "encoder_repetition_penalty", "begin_suppress_tokens", "sequence_bias", "forced_bos_token_id"),
    *("forced_eos_token_id", "exponential_decay_length_penalty", "guidance_scale", "watermarking_config"),
)


@dataclass(frozen=True, slots=True)
class CheckpointDefaults:
    """The sampling settings of a checkpoint.

    Attributes:
        params: as sampling params.
        settings: those of them that are not neutral, by their names in the file.
        not_honoured: its other settings, which are not supported.
    """

    params: SamplingParams
    settings: dict[str, Any]
    not_honoured: dict[str, Any]

    @classmethod
    def of(cls, config: Any, name: str) -> "CheckpointDefaults":
        """Read a generation config of transformers.

        Args:
            config: None if the model has none.
            name: what the user called the model, for messages.
        Raises:
            ConfigError: a value is out of range.
        """
        stated = {}
        sampled = getattr(config, "do_sample", None)
        if not isinstance(sampled, bool | None):
            raise ConfigError(
                f"generation_config.json of model '{name}': do_sample={sampled!r:.60} must be true or false; "
                "generation_config='none' leaves it out"
            )
        if sampled:
            stated = {"temperature": 1.0, **_stated(config, _WHEN_SAMPLED)}
        stated |= _stated(config, ("repetition_penalty", "suppress_tokens"))
        settings = dict(stated)
        suppressed = settings.pop("suppress_tokens", ())
        try:
            params = SamplingParams(**settings)
            if suppressed:
                params = replace(params, logit_bias=dict.fromkeys(suppressed, -math.inf))
        except (ConfigError, TypeError) as error:
            raise ConfigError(
                f"generation_config.json of model '{name}': {error}; generation_config='none' leaves it out"
            ) from None
        return cls(params, stated, _stated(config, _NOT_HONOURED))

    @property
    def in_words(self) -> str:
        """The settings and the unsupported settings for a message; empty if there are none."""
        parts = []
        if self.settings:
            parts.append(f"asks for {_list(self.settings)}")
        if self.not_honoured:
            parts.append(f"asks for {_list(self.not_honoured)}, which is not supported")
        return " and ".join(parts)


def _stated(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    found = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in found.items() if value not in (None, [], _NEUTRAL.get(name))}


def _list(settings: dict[str, Any]) -> str:
    shown = {name: f"{len(each)} tokens" if isinstance(each, list) else each for name, each in settings.items()}
    return ", ".join(f"{name}={each}" for name, each in shown.items())
