"""What a checkpoint's ``generation_config.json`` asks for, as the defaults of requests that bring no params.

transformers' ``generate`` and vLLM follow that file unless they are told otherwise; a repetition penalty or a list of
suppressed tokens changes greedy text, too. Lengths and end tokens are not taken from here: a request has a length of
its own, and end tokens always count (models/language_model.py).
"""

from __future__ import annotations

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
    """What a checkpoint asks for.

    Attributes:
        params: as sampling params.
        asked: the settings among them that are not the neutral ones, by their names in the file.
        not_honoured: what it asks for next to them, and does not get.
    """

    params: SamplingParams
    asked: dict[str, Any]
    not_honoured: dict[str, Any]

    @classmethod
    def of(cls, config: Any, name: str) -> CheckpointDefaults:
        """Read a generation config of transformers.

        Args:
            config: None if the model has none.
            name: what the user called the model, for messages.
        Raises:
            ConfigError: a value is out of range.
        """
        asked = {}
        sampled = getattr(config, "do_sample", None)
        if not isinstance(sampled, bool | None):
            raise ConfigError(
                f"generation_config.json of model '{name}': do_sample={sampled!r:.60} must be true or false; "
                "generation_config='none' leaves it out"
            )
        if sampled:
            asked = {"temperature": 1.0, **_stated(config, _WHEN_SAMPLED)}
        asked |= _stated(config, ("repetition_penalty", "suppress_tokens"))
        settings = dict(asked)
        suppressed = settings.pop("suppress_tokens", ())
        try:
            params = SamplingParams(**settings)
            if suppressed:
                params = replace(params, logit_bias=dict.fromkeys(suppressed, -math.inf))
        except (ConfigError, TypeError) as error:
            raise ConfigError(
                f"generation_config.json of model '{name}': {error}; generation_config='none' leaves it out"
            ) from None
        return cls(params, asked, _stated(config, _NOT_HONOURED))

    @property
    def in_words(self) -> str:
        """What is asked for, and what is not honoured; empty if nothing is asked for."""
        parts = []
        if self.asked:
            parts.append(f"asks for {_list(self.asked)}")
        if self.not_honoured:
            parts.append(f"asks for {_list(self.not_honoured)}, which is not supported")
        return " and ".join(parts)


def _stated(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    found = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in found.items() if value not in (None, [], _NEUTRAL.get(name))}


def _list(settings: dict[str, Any]) -> str:
    shown = {name: f"{len(each)} tokens" if isinstance(each, list) else each for name, each in settings.items()}
    return ", ".join(f"{name}={each}" for name, each in shown.items())
