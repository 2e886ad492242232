"""A draft network over pairs (a target's state, the token after it), as data.

    taps      which of the target's hidden states are read
    fuse      norms and a product that make one feature g of them
    entry     how a pair (g_i, embedding e of token i + 1) enters the first layer
    layers    decoder layers over the pairs
    recycle   the replacement of g at the next position while drafting, because the target has not computed it yet
    masks     or mask rows in place of recycling: the draft's tokens do not follow each other
    lm_head   the final norm, and which rows score the tokens

The remaining properties are the same for all: the cache holds keys and values of the network's own rows, a draft grows
row by row, and committed rows are read again from the target's states.

Each method declares its description in ``methods/NAME/network.py``, next to the plain forward of its paper. From it
are built the forward of packed rows, native or by torch (runner.py), and the unrolled forward of training (unroll.py);
tests compare both with the plain forward. Strings are names of the network's modules.

Letters: W width.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Taps:
    """Which hidden states of the target are read.

    Attributes:
        depths: numbers of target layers that have run, in the order in which their states are fused; empty: those of
            EAGLE-3, (2, L // 2, L - 3) of L layers.
        final: the state after the last layer is read after the target's final norm; without depths nothing else is.
    """

    depths: tuple[int, ...] = ()
    final: bool = False

    @property
    def count(self) -> int:
        """States of one row."""
        return len(self.depths) or (1 if self.final else 3)

    def of(self, num_layers: int) -> tuple[int, ...]:
        """The depths in a target of so many layers."""
        return self.depths or ((num_layers,) if self.final else (2, num_layers // 2, num_layers - 3))


def spread_depths(count: int, num_layers: int) -> tuple[int, ...]:
    """Return the depths at which DFlash reads a target of so many layers; fewer than ``count`` of a small one."""
    depths = (2 + round(number * (num_layers - 4) / max(1, count - 1)) for number in range(count))
    return tuple(sorted({min(max(1, depth), num_layers) for depth in depths}))


@dataclass(frozen=True, slots=True)
class Fuse:
    """How the states become the feature g. Without anything, g is the one state that is read.

    Attributes:
        norm: over all states side by side.
        tap_norms: a list of norms, one for each state.
        product: from all states side by side to W.
        first_copy: of a target that was grown (models/made.py): the width of the original; its state is twice the
            first columns.
    """

    norm: str | None = None
    tap_norms: str | None = None
    product: str | None = None
    first_copy: int | None = None


@dataclass(frozen=True, slots=True)
class Concatenated:
    """x = product([e; g]) enters the first layer; each side may have a norm.

    Attributes:
        product: from 2 W to W, perhaps with a bias.
    """

    product: str
    token_norm: str | None = None
    feature_norm: str | None = None


@dataclass(frozen=True, slots=True)
class Stacked:
    """The first layer's attention reads [token_norm(e); feature_norm(g)], 2 W wide; its residual begins with g.

    Attributes:
        normed_residual: the residual begins with feature_norm(g) instead.
    """

    token_norm: str
    feature_norm: str
    normed_residual: bool = False


@dataclass(frozen=True, slots=True)
class Gated:
    """x = s h1 + (1 - s) h2 enters.

    h1 = feature(g), h2 = SiLU(token(token_norm(e))), s = sigmoid(gate([h1; h2])).
    """

    feature: str
    token: str
    gate: str
    token_norm: str


Entry = Concatenated | Stacked | Gated


@dataclass(frozen=True, slots=True)
class Layers:
    """The decoder layers.

    Attributes:
        count: ``layers.0`` and so on, see block.py.
        first_norm: the first layer has a norm before attention, as all others do; a stacked entry has its own.
        library: the name of the one layer if it is a module of transformers; it attends by forward/attention.py.
    """

    count: int = 1
    first_norm: bool = True
    library: str | None = None


@dataclass(frozen=True, slots=True)
class Recycle:
    """The feature after a row, taken from the row's own output h.

    Attributes:
        normed: the final norm of h; else h.
    """

    normed: bool = False


@dataclass(frozen=True, slots=True)
class LmHead:
    """The LM head, which scores a row's output.

    Attributes:
        norm: the final norm; None: the rows read h as it is.
        own_rows: the name of the rows that the checkpoint may bring; messages mention it.
        copied: its rows are used even where they equal the target's; else the target's LM head scores, with whatever
            the target does to logits.
    """

    norm: str | None = "norm"
    own_rows: str = "lm_head"
    copied: bool = False


@dataclass(frozen=True, slots=True)
class Masks:
    """A whole chain is drafted in one pass: its further rows are of a mask token, and see the rows before them.

    Attributes:
        token: the mask token.
        states: the name of the parameter that takes the place of the target's states, one row.
    """

    token: int
    states: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkDescription:
    """One draft network; see above."""

    taps: Taps
    fuse: Fuse = Fuse()
    entry: Entry
    layers: Layers = Layers()
    recycle: Recycle = Recycle()
    masks: Masks | None = None
    lm_head: LmHead = LmHead()
