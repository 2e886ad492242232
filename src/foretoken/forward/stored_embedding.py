"""A token embedding that stays in the blocks of a GGUF file; rows are decoded when they are looked up.

Dense, the table of a vocabulary of 128k takes more memory than all other weights of a model of 1 B parameters.
"""

import torch
from torch import Tensor, nn

from foretoken.forward.stored_weight import StoredWeight


class StoredEmbedding(nn.Module):
    """``nn.Embedding`` over a weight in its file's blocks, in float32.

    Args:
        weight: V rows of D elements, on the CPU.
        embed_scale: by which embeddings are multiplied, a tensor of one element; None: 1.
    """

    def __init__(self, weight: StoredWeight, embed_scale: Tensor | None = None) -> None:
        super().__init__()
        self.stored, self.embed_scale = weight, embed_scale
        self.num_embeddings, self.embedding_dim = weight.shape

    @property
    def weight(self) -> Tensor:
        """[V, D], dense, made anew at each look: for drafters that share the table."""
        return self.stored.dense()

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [...] -> float32 [..., D]"""
        rows_TD = self.stored.rows(tokens.flatten()).dense()
        if self.embed_scale is not None:
            rows_TD = rows_TD * self.embed_scale.to(torch.float32)
        return rows_TD.view(*tokens.shape, self.embedding_dim)


def dtype_of(embedding: nn.Module) -> torch.dtype:
    """Of the numbers that tokens become."""
    if isinstance(embedding, StoredEmbedding):
        return torch.float32
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    return weight.dtype


def is_plain_embedding(module: nn.Module) -> bool:
    """Whether a row of the weight, perhaps scaled, is all that a token becomes."""
    if isinstance(module, StoredEmbedding):
        return True
    if type(module) is nn.Embedding:
        return module.max_norm is None
    scaled = type(module).__module__.startswith("transformers.models.") and hasattr(module, "embed_scale")
    return isinstance(module, nn.Embedding) and scaled and module.max_norm is None
