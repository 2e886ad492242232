"""The catalogue: one explicit table of every drafter, verifier and plan, with its guarantee and its requirements.

A new method needs one folder and one line here; its class declares its other needs (core/needs.py). Modules are
imported on first use. Third parties may add entries through the entry-point group ``foretoken.methods`` (an object of
type :class:`Entry`).
"""

import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal

from foretoken.core.errors import ConfigError, nearest
from foretoken.core.importing import lean_imports


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One method.

    Attributes:
        name: the name for users.
        kind: "drafter" or "verifier".
        import_path: "module:Class", imported on first use.
        summary: one line.
        paper: a citation with arXiv ids or addresses.
        promise: "lossless" for drafters and plans (any of them, under a lossless verifier); a verifier, or a plan that
            changes the distribution, states its own.
        own_rule: a drafter's own approximate verifier, its default: the drafter is lossless only with another verifier.
            None: it has no such rule.
        guarantee: the promise's meaning for this entry; empty: the general meaning (scripts/tables.py).
        needs: requirements in addition to the target model.
        weights: learned parts, or "none".
        training: "module:NAME" of its ``foretoken train`` command (train/command.py), which help imports without torch;
            None: it needs no training.
    """

    name: str
    kind: Literal["drafter", "verifier", "plan"]
    import_path: str
    summary: str
    paper: str
    promise: str = "lossless"
    own_rule: str | None = None
    guarantee: str = ""
    needs: str = "nothing"
    weights: str = "none"
    training: str | None = None

    def __post_init__(self) -> None:
        if self.kind == "verifier" and self.promise == "lossless":
            raise ConfigError(f"verifier '{self.name}' lacks a promise: same text, same distribution, or approximate")

    @property
    def cited(self) -> str:
        """The paper's arXiv ids and addresses only."""
        return ", ".join(re.findall(r"arXiv:\d{4}\.\d{4,5}|https?://[^\s,;]+", self.paper)) or "-"

    @property
    def card(self) -> str:
        """The page in docs/methods/; if a drafter and its verifier share a name, the verifier's page says so."""
        shared = self.kind == "verifier" and any(other.name == self.name for other in entries("drafter"))
        return f"{self.name}_verifier" if shared else self.name

    def load(self) -> Any:
        """Import and return the class."""
        return imported(self.import_path)


def imported(place: str) -> Any:
    """Import and return the object "module:NAME"."""
    module, _, attribute = place.partition(":")
    with lean_imports():
        return getattr(importlib.import_module(module), attribute)


_TABLE = (
    Entry(
        name="none",
        kind="drafter",
        import_path="foretoken.drafters.none:NoDrafter",
        summary="plain decoding: the empty draft",
        paper="-",
        guarantee="nothing is drafted",
    ),
    Entry(
        name="auto",
        kind="drafter",
        import_path="foretoken.methods.auto.drafter:AutoDrafter",
        summary="the default: copies, or the draft model or head at hand, whichever is faster now, or nothing",
        paper="ours; what HedgeSpec, arXiv:2510.20064, calls full information decides among drafters",
        guarantee="that of the draft's default verifier; a request with a seed keeps the tokens of plain decoding",
        weights="a draft model or a head, if there is one",
    ),
    Entry(
        name="draft_model",
        kind="drafter",
        import_path="foretoken.drafters.draft_model:ModelDrafter",
        summary="a second, smaller checkpoint proposes a chain or a tree",
        paper="Leviathan et al. 2023, arXiv:2211.17192, section 2; trees of the most probable continuations as "
        "EAGLE-2, arXiv:2406.16858, section 4; sampled trees as SpecInfer, arXiv:2305.09781; other vocabularies: "
        "arXiv:2502.05202",
        needs="a checkpoint to draft with (key 'model')",
        weights="any causal LM",
    ),
    Entry(
        name="pard",
        kind="drafter",
        import_path="foretoken.drafters.pard:PardDrafter",
        summary="a draft model trained on mask tokens fills a whole chain in one forward",
        paper="PARD, arXiv:2504.18583",
        needs="a PARD checkpoint with the target's vocabulary (key 'model')",
        weights="a PARD checkpoint",
    ),
    Entry(
        name="ngram",
        kind="drafter",
        import_path="foretoken.drafters.ngram:NgramDrafter",
        summary="prompt lookup: copy what followed the last n tokens before",
        paper="Saxena 2023, prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding",
    ),
    Entry(
        name="suffix",
        kind="drafter",
        import_path="foretoken.drafters.suffix:SuffixDrafter",
        summary="a suffix automaton over prompt and output proposes frequency-scored trees",
        paper="Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975",
    ),
    Entry(
        name="suffix_first",
        kind="drafter",
        import_path="foretoken.methods.suffix_first.drafter:SuffixFirstDrafter",
        summary="copies where the text repeats itself, another drafter where it does not",
        paper="Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975, its hybrid with a model's drafts",
        needs="a checkpoint with the target's vocabulary (key 'model'), or another drafter (key 'drafter')",
        weights="any causal LM",
    ),
    Entry(
        name="rest",
        kind="drafter",
        import_path="foretoken.methods.rest.drafter:RestDrafter",
        summary="continuations of the text's end in a datastore form frequency-scored trees",
        paper="He et al. 2024, REST, arXiv:2311.08252",
        needs="a datastore of the target's tokens (key 'datastore'; foretoken datastore build)",
    ),
    Entry(
        name="rasd",
        kind="drafter",
        import_path="foretoken.methods.rasd.drafter:RasdDrafter",
        summary="a drafter's tree fused with trees from prompt and datastore, pruned by draft probabilities",
        paper="Quan et al. 2025, RASD, arXiv:2503.03434",
        guarantee="deterministic or coupled drafts, under a lossless verifier",
        needs="a checkpoint with the target's vocabulary (key 'model'), or another drafter (key 'drafter')",
        weights="any causal LM",
    ),
    Entry(
        name="easyspec",
        kind="drafter",
        import_path="foretoken.methods.easyspec.drafter:EasySpecDrafter",
        summary="a draft model with layers that run in fuzzy groups, several attentions at a time",
        paper='Wu et al. 2025, "EasySpec", arXiv:2502.02493, Algorithm 2 and section 3.1.1',
        needs="a checkpoint with the target's vocabulary (key 'model'), of four layers or more",
        weights="any causal LM",
    ),
    Entry(
        name="kangaroo",
        kind="drafter",
        import_path="foretoken.methods.kangaroo.drafter:KangarooDrafter",
        summary="the target's first layers and a trained adapter propose a chain or a tree",
        paper="Liu et al. 2024, arXiv:2404.18911, sections 3.1 (adapter, training) and 3.2 (double early exit); trees "
        "as its NeurIPS 2024 version describes them",
        needs="a target that is a plain stack of layers",
        weights="an adapter for the target (foretoken train kangaroo); bundled for zoo:base",
        training="foretoken.methods.kangaroo.command:COMMAND",
    ),
    Entry(
        name="del",
        kind="drafter",
        import_path="foretoken.methods.dynamic_exit.drafter:DynamicExitDrafter",
        summary="the target's first layers propose a chain; exit layer and length adapt to all exits",
        paper="Zarch et al. 2025, arXiv:2504.05598, section 3; on the self-speculation of LayerSkip, "
        "arXiv:2404.16710, section 4",
        needs="a target that is a plain stack of layers, best one trained for early exits (zoo:base-ee)",
    ),
    Entry(
        name="eagle",
        kind="drafter",
        import_path="foretoken.methods.eagle.drafter:EagleDrafter",
        summary="a decoder layer over the target's own hidden states proposes a chain or a dynamic tree",
        paper="EAGLE-3, arXiv:2503.01840, section 3 (head, training-time test); EAGLE-2, arXiv:2406.16858, sections "
        "4.1 and 4.2 (tree)",
        needs="a target that is a plain stack of layers",
        weights="a head for the target (foretoken train eagle, or a published EAGLE-3 folder); bundled for zoo:base",
        training="foretoken.methods.eagle.command:COMMAND",
    ),
    Entry(
        name="dflash",
        kind="drafter",
        import_path="foretoken.methods.dflash.drafter:DFlashDrafter",
        summary="a block network fills a chain in one pass over the target's states",
        paper="DFlash, arXiv:2602.06036; with a Markov head DSpark, arXiv:2607.05147",
        needs="a target that is a plain stack of layers",
        weights="a network for the target (foretoken train dflash, or a published DFlash, DSpark or DFlash2)",
        training="foretoken.methods.dflash.command:COMMAND",
    ),
    Entry(
        name="mtp",
        kind="drafter",
        import_path="foretoken.methods.mtp.drafter:MtpDrafter",
        summary="the next-token-prediction layer of a checkpoint proposes a chain or a tree",
        paper="DeepSeek-V3, arXiv:2412.19437, sections 2.2 and 5.4.3; GLM-4.5, arXiv:2508.06471",
        needs="a DeepSeek-V3, GLM-4-MoE, GLM-4.7-Flash, Qwen3-Next or Qwen3.5 checkpoint with its prediction layer",
        weights="the checkpoint's own, or one that foretoken train mtp makes",
        training="foretoken.methods.mtp.command:COMMAND",
    ),
    Entry(
        name="scylla",
        kind="drafter",
        import_path="foretoken.methods.scylla.drafter:ScyllaDrafter",
        summary="decoder layers over the target's last state propose a tree, its size by the number of requests",
        paper="Scaling Laws for Speculative Decoding, arXiv:2505.07858; the tree: EAGLE-2, arXiv:2406.16858, sections "
        "4.1 and 4.2",
        needs="a target that is a plain stack of layers",
        weights="a head for the target (foretoken train scylla)",
        training="foretoken.methods.scylla.command:COMMAND",
    ),
    Entry(
        name="dovetail",
        kind="drafter",
        import_path="foretoken.methods.dovetail.drafter:DovetailDrafter",
        summary="decoder blocks after a gate, on a separate device, propose a tree sized by the cost of verification",
        paper="Dovetail, arXiv:2412.18934; the tree: EAGLE-2, arXiv:2406.16858, section 4",
        needs="a target that is a plain stack of layers",
        weights="a head for the target (foretoken train dovetail)",
        training="foretoken.methods.dovetail.command:COMMAND",
    ),
    Entry(
        name="diffuspec",
        kind="drafter",
        import_path="foretoken.methods.diffuspec.drafter:DiffuSpecDrafter",
        summary="one pass fills a lattice of the next tokens; the draft is a path through it, searched or sampled",
        paper="DiffuSpec, arXiv:2510.02358, section 4; DFlash, arXiv:2602.06036",
        needs="a target that is a plain stack of layers, or a masked diffusion checkpoint (key 'model')",
        weights="a block network (foretoken train diffuspec); zoo:base has one. Or a masked diffusion checkpoint; "
        "zoo:diffusion for other zoo models",
        training="foretoken.methods.diffuspec.command:COMMAND",
    ),
    Entry(
        name="longspec",
        kind="drafter",
        import_path="foretoken.methods.longspec.drafter:LongSpecDrafter",
        summary="one block over the target's own last keys drafts a chain or a tree with constant memory",
        paper="LongSpec, arXiv:2502.17421, sections 3.1 (network), 3.2 (training), 3.3 (beam)",
        needs="a target with rotary positions and a layer of full attention",
        weights="a head for the target (foretoken train longspec); one is bundled with zoo:long",
        training="foretoken.methods.longspec.command:COMMAND",
    ),
    Entry(
        name="sprinter",
        kind="drafter",
        import_path="foretoken.methods.sprinter.drafter:SprinterDrafter",
        summary="a draft model and a trained judge of its tokens propose a chain as long as the judge approves",
        paper='Zhong, Teku and Tandon 2025, "SPRINTER", arXiv:2502.04557; details of head, training and loop from '
        "the released code, MeiyuZhong/SPRINTER",
        own_rule="sprinter",
        needs="a checkpoint with the target's vocabulary (key 'model') and a head for the pair (key 'head')",
        weights="a draft model and a head (foretoken train sprinter)",
        training="foretoken.methods.sprinter.command:COMMAND",
    ),
    Entry(
        name="entropy_adaptive",
        kind="drafter",
        import_path="foretoken.methods.entropy_adaptive.drafter:EntropyAdaptiveDrafter",
        summary="a small model writes while its mean entropy is low, else the target; by default by a lossy rule",
        paper='Simonds 2025, "Entropy Adaptive Decoding", arXiv:2502.06833; no code was published',
        own_rule="entropy_adaptive",
        needs="a checkpoint with the target's vocabulary (key 'model')",
        weights="any causal LM",
    ),
    Entry(
        name="greedy",
        kind="verifier",
        import_path="foretoken.verifiers.greedy:GreedyVerifier",
        summary="accept while the draft equals the target's argmax (temperature 0)",
        paper="Stern et al. 2018, arXiv:1811.03115, section 3",
        promise="same text",
    ),
    Entry(
        name="ratio",
        kind="verifier",
        import_path="foretoken.verifiers.ratio:RatioVerifier",
        summary="accept a chain token by token with probability min(1, p/q)",
        paper="Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1",
        promise="same distribution",
    ),
    Entry(
        name="block",
        kind="verifier",
        import_path="foretoken.verifiers.block:BlockVerifier",
        summary="accept a chain as a block: never shorter in expectation than token by token",
        paper="Sun et al. 2024, block verification, arXiv:2403.10444, Algorithm 2",
        promise="same distribution",
    ),
    Entry(
        name="match",
        kind="verifier",
        import_path="foretoken.verifiers.match:MatchVerifier",
        summary="sample the target with noise indexed by (seed, position) and accept what matches",
        paper="ours; the coupling is that of Daliri, Musco and Suresh 2024, arXiv:2408.07978",
        promise="same stream",
    ),
    Entry(
        name="recursive",
        kind="verifier",
        import_path="foretoken.verifiers.recursive:RecursiveVerifier",
        summary="recursive rejection over the children of each tree node, with or without replacement",
        paper="Miao et al. 2023, SpecInfer, arXiv:2305.09781, multi-step speculative sampling; Jeon et al. 2024, "
        "arXiv:2402.14160, Algorithm 1, without replacement",
        promise="same distribution",
    ),
    Entry(
        name="naive",
        kind="verifier",
        import_path="foretoken.verifiers.naive:NaiveVerifier",
        summary="draw from the target and see whether a child carries it; valid for every draft",
        paper='Miao et al. 2023, SpecInfer, arXiv:2305.09781, the "naive sampling" that they compare with',
        promise="same distribution",
    ),
    Entry(
        name="kseq",
        kind="verifier",
        import_path="foretoken.verifiers.kseq:KSeqVerifier",
        summary="K-SEQ: one test, weakened by the least exact factor, for all of n independent draws",
        paper="Sun et al. 2023, SpecTr, arXiv:2310.15141, Algorithm 2 and Theorem 2",
        promise="same distribution",
    ),
    Entry(
        name="spechub",
        kind="verifier",
        import_path="foretoken.verifiers.spechub:SpecHubVerifier",
        summary="pairs that share the draft's favourite token; the optimum of their distribution",
        paper="Sun et al. 2024, SpecHub, arXiv:2411.05289, Algorithm 1",
        promise="same distribution",
    ),
    Entry(
        name="greedy_draft",
        kind="verifier",
        import_path="foretoken.verifiers.greedy_draft:GreedyDraftVerifier",
        summary="favourites and one drawn token per node; the optimum of their distribution",
        paper='"Towards optimal multi-draft speculative decoding", ICLR 2025, arXiv:2502.18779, greedy draft sampling',
        promise="same distribution",
    ),
    Entry(
        name="transport",
        kind="verifier",
        import_path="foretoken.verifiers.transport:TransportVerifier",
        summary="the optimal coupling by linear programming, for distributions of few tokens",
        paper="the optimal-transport problem of SpecTr, arXiv:2310.15141, in the relaxed form of arXiv:2502.18779",
        promise="same distribution",
        needs="scipy (extra 'optimal')",
    ),
    Entry(
        name="typical",
        kind="verifier",
        import_path="foretoken.verifiers.typical:TypicalVerifier",
        summary="lossy: accept tokens that are probable enough given the target's uncertainty",
        paper='Cai et al. 2024, "Medusa", arXiv:2401.10774, section 2.3.1',
        promise="approximate",
    ),
    Entry(
        name="topk_relaxed",
        kind="verifier",
        import_path="foretoken.verifiers.topk_relaxed:TopkRelaxedVerifier",
        summary="lossy: accept the target's k favourites within a margin of the first",
        paper="none; relaxed acceptance of TensorRT-LLM, https://nvidia.github.io/TensorRT-LLM/llm-api/reference.html",
        promise="approximate",
    ),
    Entry(
        name="mixture",
        kind="verifier",
        import_path="foretoken.verifiers.mixture:MixtureVerifier",
        summary="lossy: verify exactly against a mixture of the target's distribution and the draft's",
        paper='Narasimhan et al. 2024, "Faster cascades via speculative decoding", arXiv:2405.19261',
        promise="approximate",
    ),
    Entry(
        name="tolerance",
        kind="verifier",
        import_path="foretoken.verifiers.tolerance:ToleranceVerifier",
        summary="lossy: accept a chain with probability min(1, (1 + tolerance) p/q)",
        paper="lenience: Leviathan et al. 2023, arXiv:2211.17192, appendix A.5, with l = 1 / (1 + tolerance)",
        promise="approximate",
    ),
    Entry(
        name="p_threshold",
        kind="verifier",
        import_path="foretoken.verifiers.p_threshold:PThresholdVerifier",
        summary="lossy: accept a chain's tokens that the target finds probable enough, test the others exactly",
        paper="none; a baseline in the manner of those that arXiv:2501.19309 (Judge Decoding) compares with",
        promise="approximate",
    ),
    Entry(
        name="kl_threshold",
        kind="verifier",
        import_path="foretoken.verifiers.kl_threshold:KlThresholdVerifier",
        summary="lossy: accept a chain's tokens where draft and target nearly agree, test the others",
        paper='"Revisiting Judge Decoding from First Principles via Training-Free Distributional Divergence", '
        "arXiv:2601.04766",
        promise="approximate",
        needs="a drafter that draws from a distribution of its own (a model)",
    ),
    Entry(
        name="judge",
        kind="verifier",
        import_path="foretoken.methods.judge.verifier:JudgeVerifier",
        summary="lossy: accept a chain's tokens if the exact test or a trained judge of the target's states does",
        paper='Bachmann et al. 2025, "Judge Decoding", arXiv:2501.19309',
        promise="approximate",
        needs="a head for the target (option 'head')",
        weights="a head for the target (foretoken train judge); bundled for zoo:base",
    ),
    Entry(
        name="sprinter",
        kind="verifier",
        import_path="foretoken.methods.sprinter.verifier:SprinterVerifier",
        summary="lossy: the drafter's own judge accepts the tokens; only the last one is tested",
        paper='Zhong, Teku and Tandon 2025, "SPRINTER", arXiv:2502.04557',
        promise="approximate",
        needs="drafts of the drafter 'sprinter'",
    ),
    Entry(
        name="entropy_adaptive",
        kind="verifier",
        import_path="foretoken.methods.entropy_adaptive.verifier:EntropyAdaptiveVerifier",
        summary="lossy: accept the small model's tokens untested while its entropy is low, else the target's",
        paper='Simonds 2025, "Entropy Adaptive Decoding", arXiv:2502.06833',
        promise="approximate",
        needs="drafts of the drafter 'entropy_adaptive'",
    ),
    Entry(
        name="diffuspec",
        kind="verifier",
        import_path="foretoken.methods.diffuspec.verifier:DiffuSpecVerifier",
        summary="lossy: a searched path is tested by min(1, p/q), as if it were sampled from the lattice",
        paper="DiffuSpec, arXiv:2510.02358, section 4",
        promise="approximate",
        needs="drafts of the drafter 'diffuspec'",
    ),
    Entry(
        name="reflective",
        kind="verifier",
        import_path="foretoken.methods.reflective.verifier:ReflectiveVerifier",
        summary="lossy: the target reads the draft twice in one forward, and a mix of both readings is verified",
        paper='"Think Before You Accept: Semantic Reflective Verification", arXiv:2505.18629; implemented from its '
        "abstract and reviews",
        promise="approximate",
        needs="drafts that do not begin inside the target",
    ),
    Entry(
        name="prefix_tree",
        kind="plan",
        import_path="foretoken.forward.prefix_tree_attention:PrefixTreePlans",
        summary="a draft is verified with no mask over the prefix: two attentions, merged by log-sum-exp",
        paper="LongSpec, 2025, arXiv:2502.17421, section 3.3: Hybrid Tree Attention",
        guarantee="the dense plan's distribution, up to rounding; the verifier's promise holds",
        needs="--set plan=prefix_tree, with any method",
    ),
    Entry(
        name="sparse_verification",
        kind="plan",
        import_path="foretoken.methods.sparse.plan:SparseVerification",
        summary="lossy: the target verifies without some blocks of the prefix, channels or experts",
        paper='"Sparse verification", December 2025, arXiv:2512.21911: sparse attention (SA, SA*), sparse FFN, '
        "sparse MoE",
        promise="approximate",
        guarantee="the output is the sparse target's; with `confirm` the recipe keeps its verifier's promise",
        needs="--set verification.attention=per_head, .ffn or .moe, with any method",
    ),
    Entry(
        name="stree",
        kind="plan",
        import_path="foretoken.methods.stree.plan:TreeScanPlans",
        summary="state-space and hybrid targets verify trees: states stay after the prefix, rows run along the tree",
        paper='Wu et al. 2025, "STree: Speculative Tree Decoding for Hybrid State-Space Models", arXiv:2505.14969',
        guarantee="the verifier's promise holds",
        needs="a target with Mamba-2 or gated-delta-net layers, for which it is chosen by itself",
    ),
)


def entries(kind: str | None = None) -> list[Entry]:
    """Return all entries: the table's, then those of installed plug-ins."""
    return [entry for entry in (*_TABLE, *_plugins()) if kind is None or entry.kind == kind]


@cache
def _plugins() -> tuple[Entry, ...]:
    # this reads the metadata of every installed package: some milliseconds
    return tuple(point.load() for point in entry_points(group="foretoken.methods"))


_DRAFT = "not available; 'draft_model' drafts with a second checkpoint"
_HEADS = "not available; 'eagle' is the nearest: a head over the target's hidden states"
_TEXT = "not available; 'ngram' and 'suffix' are the nearest: they draft from the text itself"
_LAYERS = "not available; 'kangaroo' and 'del' are the nearest: they draft with the target's own first layers"
_OF_THE_FIELD = {  # methods under their names elsewhere
    **dict.fromkeys(("medusa", "hydra", "mlp_speculator", "clover", "amphista"), _HEADS),
    **dict.fromkeys(("eagle2", "eagle3", "eagle_2", "eagle_3"), "'eagle' supports heads of all three versions"),
    **dict.fromkeys(("lookahead", "lookahead_decoding", "jacobi"), _TEXT),
    **dict.fromkeys(("prompt_lookup", "pld", "lookup"), "it is called 'ngram'"),
    **dict.fromkeys(("layerskip", "draft_and_verify", "self_speculative", "swift", "early_exit"), _LAYERS),
    **dict.fromkeys(
        ("arctic", "suffix_decoding"), "it is called 'suffix', and 'suffix_first' together with a model's drafts"
    ),
    **dict.fromkeys(("multi_token_prediction", "nextn"), "it is called 'mtp'"),
    **dict.fromkeys(("assisted", "speculative", "speculative_sampling", "sps", "draft"), "it is called 'draft_model'"),
    **dict.fromkeys(("sequoia", "specinfer", "opt_tree", "specexec"), f"{_DRAFT}, as trees with tree=topk"),
    "ngram_gpu": "it is called 'ngram'",
    "dspark": "'dflash' runs its folders",
    "custom_class": "pass your own instance instead of a name, see docs/extend.md",
    "extract_hidden_states": "'foretoken train features' stores hidden states",
    **dict.fromkeys(("pearl",), "it is an executor, combined with a method: executor='pearl'"),
}
_LABELS = {"drafter": "method", "verifier": "verifier", "plan": "plan"}  # the keys that select them


def find(name: str, kind: Literal["drafter", "verifier", "plan"]) -> Entry:
    """Return the entry of that name; the ConfigError for an unknown name has the nearest one or a replacement."""
    table = {entry.name: entry for entry in entries(kind)}
    if name not in table:
        other = next((_LABELS[entry.kind] for entry in entries() if entry.name == name), None)
        said = f"that is a {other}: write {other}={name}" if other else remedy(name, table)
        raise ConfigError(f"unknown {_LABELS[kind]} '{name}': {said}")
    return table[name]


def remedy(name: str, known: Iterable[str]) -> str:
    """Return the replacement for an unknown name: the nearest method in the catalogue, else the nearest name."""
    asked = name.lower().replace("-", "_")
    if asked.endswith("_mtp"):  # vLLM has a name for every family
        return "it is called 'mtp'"
    return _OF_THE_FIELD.get(asked) or nearest(name, known)
