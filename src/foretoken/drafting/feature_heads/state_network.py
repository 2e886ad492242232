"""Draft networks made of decoder layers over a target's hidden states: weights, files, and the tables of the target.

Letters: T rows, W width, H query heads, G key/value heads, d head width, V vocabulary, K draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from foretoken.core.errors import MismatchError, UnsupportedArchitecture
from foretoken.drafting.feature_heads.block import Block, BlockConfig, Norm, fields_for
from foretoken.drafting.feature_heads.description import Taps, spread_depths
from foretoken.drafting.feature_heads.draft_ids import IDS, checked_ids
from foretoken.drafting.learned_part import LearnedPart
from foretoken.forward import anatomy
from foretoken.models.language_model import LanguageModel

_Network = TypeVar("_Network", bound="StateNetwork")


class NetworkConfig(Protocol):
    """The part of a network's configuration that a training run reads."""

    @property
    def draft_vocab_size(self) -> int: ...

    @property
    def mlp_width(self) -> int: ...

    @property
    def taps(self) -> Taps: ...


class TrainableNetwork(nn.Module):
    """A draft network over a target's states that train/feature_heads/run.py can train.

    Attributes:
        config: see :class:`NetworkConfig`; a network of decoder layers has a BlockConfig.
        ids_K: int64, increasing: the tokens that it scores; None: all.
    """

    config: Any
    ids_K: Tensor | None

    @classmethod
    @abstractmethod
    def check_place(cls, folder: Path) -> None:
        """Refuse an output folder that holds another model, before anything is trained."""

    @abstractmethod
    def embedding_of(self, model: Any) -> Tensor:
        """The table in which its tokens are looked up, [V, W]."""

    @abstractmethod
    def lm_head_of(self, model: Any) -> Tensor:
        """The rows that score its tokens, [K, W]."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the weights."""


class StateNetwork(LearnedPart, TrainableNetwork):
    """Decoder layers over a target's states; a subclass makes ``norm``, ``layers`` and the modules before them.

    Args:
        config: its sizes, and its target.
        ids_K: int64, increasing: the tokens that it scores; None: all.
        own_head: whether it has an LM head of its own.
        own_embedding: whether it has an embedding of its own.

    Attributes:
        norm: the final norm; None: the LM head reads the last layer's output as it is.
    """

    size_names: ClassVar[dict[str, str]] = {"width": "target_width", "vocabulary": "vocab_size"}
    config: BlockConfig
    norm: Norm | None
    layers: nn.ModuleList

    def __init__(
        self, config: BlockConfig, *, ids_K: Tensor | None = None, own_head: bool = False, own_embedding: bool = False
    ) -> None:
        super().__init__()
        self.config, self.ids_K = config, ids_K
        self.norm = None
        self.lm_head = nn.Linear(config.width, config.draft_vocab_size, bias=False) if own_head else None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width) if own_embedding else None

    # ------------------------------------------------------------------ the layers

    @property
    def num_layers(self) -> int:
        """D."""
        return len(self.layers)

    def layer(self, number: int) -> Block:
        """One of the layers."""
        found = self.layers[number]
        assert isinstance(found, Block)
        return found

    def rates(self) -> tuple[Tensor, float]:
        """Rotary frequencies, float64 [d / 2], in radians a position, and the factor of cos and sin."""
        half = self.config.head_dim // 2
        return float(self.config.rope_theta) ** (-torch.arange(half, dtype=torch.float64) / half), 1.0

    def rotary_at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of rotary positions, float32 [T, d / 2]."""
        rates, gain = self.rates()
        angles = positions_T.to(torch.float64)[:, None] * rates.to(positions_T.device)
        return (gain * angles.cos()).float(), (gain * angles.sin()).float()

    # ------------------------------------------------------------------ tables that are shared with the target

    def embedding_of(self, model: Any) -> Tensor:
        """The table in which its tokens are looked up, [V, W]: its own, or the target's.

        Args:
            model: of transformers.
        """
        if self.embed_tokens is not None:
            return self.embed_tokens.weight
        return self._shared(anatomy.find(model).embedding, model, "embedding")

    def lm_head_of(self, model: Any) -> Tensor:
        """The rows that score its tokens, [K, W]: its own, or those of the target's LM head."""
        if self.lm_head is not None:
            return self.lm_head.weight
        weight_VW = self._shared(anatomy.find(model).head, model, "head")
        return weight_VW if self.ids_K is None else weight_VW[self.ids_K.to(weight_VW.device)]

    def with_rows_of(self: _Network, model: Any) -> _Network:
        """The same network with copies of the shared tables, so that it can run without the target."""
        found = type(self)(self.config, ids_K=self.ids_K, own_head=True, own_embedding=True)
        rows = {"lm_head.weight": self.lm_head_of(model), "embed_tokens.weight": self.embedding_of(model)}
        found.take({**self.state_dict(), **{name: each.detach() for name, each in rows.items()}})
        return found.eval()

    def get_output_embeddings(self) -> nn.Linear | None:
        """Its own LM head, which is trained as embeddings are (train/optimiser.py)."""
        return self.lm_head

    def _shared(self, module: nn.Module, model: Any, what: str) -> Tensor:
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            raise UnsupportedArchitecture(
                f"{type(model).__name__}: its {what} is no table that an {self.title} could share"
            )
        return weight[: self.config.vocab_size]

    # ------------------------------------------------------------------ beginnings

    @torch.no_grad()
    def draw(self, generator: torch.Generator | None = None, *, spread: float = 0.0) -> None:
        """Draw all weights; products into the residual stream begin small.

        Args:
            generator: None: torch's own.
            spread: of the norms' weights around 1.
        """
        for name, weight in self.named_parameters():
            if weight.dim() < 2 and not spread:
                continue
            noise = torch.randn(weight.shape, generator=generator)
            gain = 0.3 if "o_proj" in name or "down_proj" in name else 1.0
            weight.copy_(1 + spread * noise if weight.dim() < 2 else noise * gain / weight.shape[-1] ** 0.5)

    # ------------------------------------------------------------------ files, and the target

    def begin_near(self, model: Any) -> None:
        """Begin where the network drafts best untrained; here nothing is changed."""

    def tensors(self) -> dict[str, Tensor]:
        """All weights, bf16, and the ids of the tokens that it scores."""
        found = {name: value.to(torch.bfloat16) for name, value in self.state_dict().items()}
        return found if self.ids_K is None else {**found, IDS: self.ids_K}

    @classmethod
    def of(cls: type[_Network], config: Any, tensors: Mapping[str, Tensor]) -> _Network:
        """The network of a config and saved weights, float32.

        Raises:
            ValueError: they do not fit each other; the tensor is named.
        """
        found = dict(tensors)
        network = cls(config, ids_K=checked_ids(config, found.pop(IDS, None)))
        network.take(found)
        return network.eval()

    @classmethod
    def config_for(
        cls,
        config: Any,
        target: str,
        fingerprint: str,
        *,
        draft_vocab_size: int | None = None,
        mlp_width: int | None = None,
        taps: int | None = None,
        **fields: Any,
    ) -> Any:
        """A config that fits a model of transformers; see ``fields_for``.

        Args:
            config: the target's configuration.
            draft_vocab_size: None: all of the vocabulary.
            taps: depths that are read, spread over the target's layers; None: as many as the method reads.
            fields: others of the config.
        Raises:
            UnsupportedArchitecture: the target does not say its sizes.
        """
        found = fields_for(
            config, target, fingerprint, title=cls.title, draft_vocab_size=draft_vocab_size, mlp_width=mlp_width
        )
        num_layers = config.get_text_config(decoder=True).num_hidden_layers
        shape = cls.shape_for(num_layers)
        if taps is not None:
            shape["depths"] = spread_depths(taps, num_layers)
        return cls.Config(**{**found, **shape, **fields})

    @classmethod
    def shape_for(cls, num_layers: int) -> dict[str, Any]:
        """Fields of the config of an untrained network, apart from its sizes, for a target of so many layers."""
        return {}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take saved weights, as float32.

        Raises:
            ValueError: one is missing, of another shape, or not of such a head; it is named.
        """
        expected = self.state_dict()
        for name in sorted(expected.keys() | tensors.keys()):
            if name not in tensors:
                raise ValueError(f"the tensor {name} is missing")
            if name not in expected:
                raise ValueError(f"the tensor {name} is not of such a head")
            found, described = list(tensors[name].shape), list(expected[name].shape)
            if found != described:
                raise ValueError(f"{name} is {found}, but {described} is described")
            kind = tensors[name].dtype
            if not kind.is_floating_point or kind.itemsize < 2:  # its scales would be needed, too
                raise ValueError(f"{name} is {kind}: bfloat16, float16 or float32 are known")
        self.load_state_dict({name: value.float() for name, value in tensors.items()})

    def check_shape(self, model: LanguageModel) -> None:
        """Refuse a target of another width or vocabulary.

        Raises:
            MismatchError: it is one; the field of ``config.json`` is named.
        """
        config = self.config
        width = model.config.get_text_config(decoder=True).hidden_size
        for name, ours, theirs in (
            (self.size_names["width"], config.target_width, width),
            (self.size_names["vocabulary"], config.vocab_size, model.vocab_size),
        ):
            if ours != theirs:
                raise MismatchError(f"the {self.title}'s {name} is {ours}, but that of '{model.name}' is {theirs}")
