"""One linear unit followed by a sigmoid, as in the heads of SPRINTER and Judge Decoding.

    x [M, D] ── w.x + b ── sigmoid ── a probability a row

Letters: M rows, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from foretoken.core.errors import MismatchError
from foretoken.drafting.learned_part import LearnedConfig, LearnedPart
from foretoken.models.language_model import LanguageModel

Head = TypeVar("Head", bound="LogisticHead")


class Logistic:
    """w and b.

    Args:
        weight_D, bias: kept as float32.
    """

    def __init__(self, weight_D: Tensor, bias: float) -> None:
        self.weight_D = weight_D.detach().float()
        self.bias = bias

    def probabilities(self, x_MD: Tensor) -> Tensor:
        """The sigmoid of w.x + b, float32 [M]."""
        # in float64: the order of summation depends on the number of rows, a row's result must not
        return torch.sigmoid(x_MD.double() @ self.weight_D.double().to(x_MD.device) + self.bias).float()


@dataclass(frozen=True, kw_only=True)
class LogisticConfig(LearnedConfig):
    """Input of a logistic head, and the models that it was trained for.

    Attributes:
        width: of the states that it reads.
    """

    width: int

    @property
    def num_inputs(self) -> int:
        """Inputs of the unit: the elements of a state, and those that a subclass adds."""
        return self.width


class LogisticHead(LearnedPart):
    """A learned part that is one logistic unit; saved as ``weight`` [inputs] and ``bias`` [1].

    Args:
        config: its models and input.
        unit: w and b for states as a model gives them; the scaling of training is folded in.
    """

    def __init__(self, config: Any, unit: Logistic) -> None:
        self.config = config
        self.unit = unit

    def judge(self, hidden_MD: Tensor) -> Tensor:
        """Return the probability of each row, float32 [M], from states [M, D] of any float type."""
        return self.unit.probabilities(hidden_MD)

    def tensors(self) -> dict[str, Tensor]:
        """w and b."""
        return {"weight": self.unit.weight_D, "bias": torch.tensor([self.unit.bias])}

    @classmethod
    def of(cls: type[Head], config: LogisticConfig, tensors: Mapping[str, Tensor]) -> Head:
        """Build the head that a config and saved weights describe.

        Raises:
            ValueError, KeyError: they do not fit each other.
        """
        weight_D, bias = tensors["weight"], tensors["bias"]
        if weight_D.shape != (config.num_inputs,) or bias.shape != (1,):
            raise ValueError(f"width={config.width!r} with weights {list(weight_D.shape)} and {list(bias.shape)}")
        return cls(config, Logistic(weight_D, float(bias)))

    @classmethod
    def how(cls, target: str, draft: str, config: Any = None) -> str:
        """Return the command that trains one, which needs a draft, too."""
        return f"foretoken train {cls.algorithm} --target {target} --draft-model {draft} --out DIR"

    def check_shape(self, model: LanguageModel) -> None:
        """Refuse a model with states of another width.

        Raises:
            MismatchError: the widths differ.
        """
        width = model.config.get_text_config(decoder=True).hidden_size
        if self.config.width != width:
            raise MismatchError(
                f"the {self.title} reads {self.config.width} numbers, but '{model.name}' has states of {width}"
            )
