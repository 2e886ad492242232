"""Declarations of a method about itself, with defaults for everything: no capability is looked up with ``hasattr``.

``Needs`` and ``Offers`` belong to an instance and are matched once, when a recipe is composed (engine/compose.py).
``Declared`` belongs to its class and is collected: by the command line, the certificates, the trade-off and the tests.

    drafter.needs.hidden_layers     states it gets of every forward of the target      drafter.on_forward
    verifier.needs.last_state       the state it gets of every row of a draft          Laws.hidden_MD
    verifier.needs.evidence     ◄── drafter.offers.evidence                             Draft.evidence
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretoken.core.draft import Evidence, Law


@dataclass(frozen=True, slots=True)
class HiddenLayers:
    """Which hidden states of the target a drafter asks for, after every forward.

    Attributes:
        depths: depths of the residual stream, increasing; depth e is what e layers give.
        last: only so many last rows of a prompt are wanted; None: all of them.
    """

    depths: tuple[int, ...]
    last: int | None = None


@dataclass(frozen=True, slots=True)
class LastState:
    """The last hidden state of each row of a draft, which a verifier asks for; it comes as ``Laws.hidden_MD``.

    Attributes:
        normed: True asks for the state as the target's head reads it, after the final norm; False for that before it.
    """

    normed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What an instance must be given next to tokens and distributions.

    Attributes:
        hidden_layers: hidden states of the target, for a drafter. They may change from step to step; None: never any.
        last_state: the target's last hidden state of every row, for a verifier.
        evidence: the kind of evidence that a verifier decides by, which the drafter must offer.
        dense: a verifier is shown rows next to the draft's, which no sparse plan knows how to compute.
    """

    hidden_layers: HiddenLayers | None = None
    last_state: LastState | None = None
    evidence: type[Evidence] | None = None
    dense: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """What an instance can do beyond the members that every one of its kind has.

    Attributes:
        evidence: the kinds of evidence that a drafter's drafts can carry.
        length: a drafter's own number of draft nodes per step, at most: it decides itself when to stop, so the
            adaptive controller leaves the length to it. None: it has no rule of its own.
        may_skip_drafting: whether the controller may leave requests without its drafts where plain decoding is faster;
            not where a drafter's options say how many tokens every step is to draft.
        resumes: whether a drafter's drafts go on from inside of the target: rows after them were not begun there, so
            that nothing can be hung on them.
        batches: whether a verifier decides many requests in one go.
        takes_turns: whether a verifier may emit a draft's tokens without one of the target's after them. Then every
            token may be the drafter's: it drafts the first and the last, too, whatever other requests run, and observes
            steps without a draft.
        probes: whether a verifier asks for rows after drafts (``Verifier.probe``) by which it decides.
        portfolio: of a drafter that copies, and calls another one where that pays: "", or the code of why there is no
            other one, see docs/methods/auto.md; None: it is no such drafter.
        keeps_seeds: whether its drafts for requests with a seed are point masses, so that under `match` the seed gives
            the tokens of plain decoding.
        ahead: whether a drafter can propose while the target computes, on another thread and for tokens that are not
            committed yet: its drafts follow from tokens alone, and whatever it was shown before changes nothing.
        foretells: whether a look-up gives the confidence in a drafter's first node (``Drafter.first_confidence``), so
            that it is called only where that node is expected to pay.
    """

    evidence: tuple[type[Evidence], ...] = ()
    length: int | None = None
    may_skip_drafting: bool = True
    resumes: bool = False
    batches: bool = False
    takes_turns: bool = False
    probes: bool = False
    ahead: bool = False
    portfolio: str | None = None
    keeps_seeds: bool = False
    foretells: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """How a lossy rule enters a trade-off by default.

    Attributes:
        option: the option that varies, the rule's or its drafter's.
        values: its values, from strict to loose.
        drafter: the method that drafts for it; None: the study's, which exact verification has, too.
        baselines: options with which the rule enters the study once more, as a baseline.
    """

    option: str
    values: tuple[Any, ...]
    drafter: str | None = None
    baselines: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A shape of a method: options under which its drafts are of another kind.

    Attributes:
        options: its options.
        laws, branches: its proposals with these options, as an instance declares them (core/protocols.py); None: as
            the class says. A test makes the instance and compares.
        one_rule: for the exactness tests: the distribution of the drafts is that of another variant, so one lossless
            rule is enough.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    laws: tuple[type[Law], ...] | None = None
    branches: bool | None = None
    one_rule: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What others need to know of a method before there is an instance of it; an attribute of its class.

    Attributes:
        draft_model: whether the option ``model`` names a second checkpoint of the target's vocabulary.
        finds_model: whether it does without that, or takes a model at hand.
        datastore: whether the option ``datastore`` names texts in the target's tokens to retrieve from.
        own_verifier: the rule that a drafter brings; None: the strongest lossless one.
        learned_part: "module:Class" of its trained part (drafting/learned_part.py); None: it has none.
        brought: whether the target's checkpoint brings the weights that draft.
        knob: how a lossy rule enters a trade-off; None: it stays out of it.
        variants: its shapes; the planner and drafters around another one choose among them, and the exactness tests run
            them, with further ones for methods with a learned part.
    """

    draft_model: bool = False
    finds_model: bool = False
    datastore: bool = False
    own_verifier: str | None = None
    learned_part: str | None = None
    brought: bool = False
    knob: Knob | None = None
    variants: tuple[Variant, ...] = (Variant(),)
