"""Networks of several decoder layers over the output of a target's final norm: Scylla's and Dovetail's.

Letters: K draft vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor

from foretoken.core.errors import MismatchError
from foretoken.drafting.feature_heads.block import BlockConfig
from foretoken.drafting.feature_heads.description import Fuse, Taps
from foretoken.drafting.feature_heads.pair_network import LayeredNetwork
from foretoken.models.language_model import LanguageModel

LAYERS = 2
MOST_LAYERS = 32


@dataclass(frozen=True, kw_only=True)
class StackConfig(BlockConfig):
    """The sizes of a network, and its target.

    Attributes:
        layers: D.
        window: positions that a row sees, itself included: the length of the texts that it was trained on; None: all.
    """

    layers: int = LAYERS
    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers > MOST_LAYERS:
            raise ValueError(f"layers={self.layers}: {MOST_LAYERS} at most")
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise ValueError(f"window={self.window!r}: a number of positions, or null")

    @property
    def taps(self) -> Taps:
        return Taps(final=True)

    @property
    def fuse(self) -> Fuse:
        """The state is the feature; of a grown target, which divides it among copies, the first in full."""
        return Fuse(first_copy=None if self.target_width == self.width else self.width)


class StackNetwork(LayeredNetwork):
    """Files and beginnings of such networks; a subclass makes the weights.

    Args:
        config: its sizes, and its target.
        ids_K, own_head, own_embedding: see :class:`LayeredNetwork`.
    """

    config: StackConfig

    def original(self, states_SF: Tensor) -> Tensor:
        """The states of the target as the plain forward reads them; of a grown one those of the original."""
        width = self.config.width
        return states_SF if self.config.target_width == width else 2 * states_SF[..., :width]

    def check_shape(self, model: LanguageModel) -> None:
        super().check_shape(model)
        if self.config.width != self.config.target_width and self.lm_head is None:
            raise MismatchError(
                f"the {self.title} is {self.config.width} wide and reads {self.config.target_width} columns: without "
                "tables of its own it must be as wide as its target"
            )
