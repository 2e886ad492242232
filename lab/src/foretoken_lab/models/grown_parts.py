"""Learned parts of a model for a model that was grown from it (grown.py): the same drafts, or the same decisions."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch
from typing import Any, cast

import torch
import torch.nn.functional as F

from foretoken.core.errors import MismatchError
from foretoken.drafting.feature_heads.stack import StackNetwork
from foretoken.drafting.logistic import Logistic
from foretoken.forward import anatomy
from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.methods.eagle.config import EAGLE2
from foretoken.methods.judge.network import JudgeHead
from foretoken.methods.kangaroo.network import Adapter, AdapterConfig
from foretoken.methods.longspec.network import LongSpec
from foretoken.methods.sprinter.network import SprinterHead
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.language_model import LanguageModel
from foretoken_lab.models.origin import Origin, before_head, widened

_LM_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@singledispatch
def grown(part: Any, target: LanguageModel, origin: Origin) -> Any:
    """The part of the original for the grown model.

    Args:
        part: of the original; parts of other kinds than the ones below do not grow.
        target: the grown model.
    Raises:
        MismatchError: this one cannot serve it.
    """
    raise MismatchError(f"the {part.title} of '{origin.folder.name}' does not serve '{target.name}'; train one for it")


def grows(kind: type) -> bool:
    """Whether parts of this kind serve grown models."""
    return grown.dispatch(kind) is not grown.dispatch(object)


@grown.register
def _stack(part: StackNetwork, target: LanguageModel, origin: Origin) -> StackNetwork:
    """A network with the same drafts for a model that was grown from its target, at the same cost.

    It reads the first copy in the residual stream, which is the original's, and has tables of the original's width.
    """
    origin.check_shared(part.title, target.name)
    parts, width = anatomy.find(target.model), part.config.width
    wide, mark = target.config.get_text_config(decoder=True).hidden_size, fingerprint_of(target.source)
    config = replace(part.config, target=target.name, target_fingerprint=mark, target_width=wide)
    network = type(part)(config, ids_K=part.ids_K, own_head=True, own_embedding=True)
    rows_VW, table_VW = (cast(Any, each).weight.detach()[:, :width].cpu() for each in (parts.head, parts.embedding))
    kept_KW = rows_VW if part.ids_K is None else rows_VW[part.ids_K]
    network.take({**part.state_dict(), "lm_head.weight": kept_KW, "embed_tokens.weight": table_VW})
    return network.eval()


@grown.register
def _eagle(part: Eagle, target: LanguageModel, origin: Origin) -> Eagle:
    """Return a network with the same drafts for a model that was grown from its target, at the same cost.

    It reads the first copy in the residual stream, which equals the original's stream, after the layers that
    correspond to the original depths, and its embedding and LM head have the original's width.

    Raises:
        MismatchError: its states are normed before they are fused, or it is EAGLE-2's network.
    """
    origin.check_shared(part.title, target.name)
    config = part.config
    if config.algorithm == EAGLE2 or config.norm_before_fc or config.fc_norm:
        raise MismatchError(
            f"the EAGLE head of '{config.target}' does not fit '{target.name}': only EAGLE-3 heads without norms "
            "before the fusion can be grown; train one for it"
        )
    parts, width = anatomy.find(target.model), config.target_width
    wide = target.config.get_text_config(decoder=True).hidden_size
    depths = tuple(origin.depth(each) for each in config.taps.of(origin.layers))
    mark = fingerprint_of(target.source)
    network = Eagle(
        replace(config, target=target.name, target_fingerprint=mark, target_width=wide, depths=depths),
        ids_K=part.ids_K,
        own_head=True,
        own_embedding=True,
    )
    fused_WNF = part.fc.weight.detach().unflatten(1, (config.taps.count, width))
    rows_VW, table_VW = (cast(Any, each).weight.detach()[:, :width].cpu() for each in (parts.head, parts.embedding))
    found = {
        **part.state_dict(),
        "fc.weight": F.pad(fused_WNF, (0, wide - width)).flatten(1),
        _LM_HEAD: rows_VW if part.ids_K is None else rows_VW[part.ids_K],
        _EMBEDDING: table_VW,
    }
    for name, own in ((_LM_HEAD, part.lm_head), (_EMBEDDING, part.embed_tokens)):
        if own is not None:
            found[name] = own.weight.detach()
    network.take(found)
    return network.eval()


@grown.register
def _judge(part: JudgeHead, target: LanguageModel, origin: Origin) -> JudgeHead:
    """Return a judge with the same decisions for a grown model: it reads the first copy of the original's
    stream.
    """
    mark, wide = fingerprint_of(target.source), origin.width * origin.copies
    config = replace(part.config, target=target.name, target_fingerprint=mark, width=wide)
    share = origin.first_share if config.normed else 1.0
    weight_D = F.pad(part.unit.weight_D / share, (0, wide - origin.width))
    return JudgeHead(config, Logistic(weight_D, part.unit.bias))


@grown.register
def _kangaroo(part: Adapter, target: LanguageModel, origin: Origin) -> Adapter:
    """Return an adapter with the same drafts for a model that was grown from its target.

    It grows in the same way as the target's layers, so drafting costs as much as for a target of this size.
    """
    origin.check_shared(part.title, target.name)
    depth, copies = origin.depth(part.config.exit_layer), origin.copies
    config = AdapterConfig.for_target(target.config, depth, target.name, fingerprint_of(target.source))
    weights = {name: widened(weight, copies) for name, weight in part.state_dict().items()}
    weights["norm_out.weight"] = before_head(part.norm_out.weight.detach(), copies)
    return Adapter.of(config, weights)


@grown.register
def _longspec(part: LongSpec, target: LanguageModel, origin: Origin) -> LongSpec:
    """Return a head with the same drafts, at the same cost, for a model that was grown from its target.

    It reads the keys of the first copy of the original's heads, in the layer that corresponds to the original one.
    Embedding and LM head are the original's.
    """
    origin.check_shared(part.title, target.name)
    parts, width = anatomy.find(target.model), part.config.width
    layer = origin.depth(part.config.layer)  # copies of the layer follow it
    mark = fingerprint_of(target.source)
    head = LongSpec(replace(part.config, target=target.name, target_fingerprint=mark, layer=layer))
    head.load_state_dict(part.state_dict())
    with torch.no_grad():
        head.own_head = cast(Any, parts.head).weight.detach()[:, :width].clone()
    return head.eval()


@grown.register
def _sprinter(part: SprinterHead, target: LanguageModel, origin: Origin) -> SprinterHead:
    """Return the same head: a grown model has the original's distributions, and the draft's states are the same."""
    mark = fingerprint_of(target.source)
    return SprinterHead(replace(part.config, target=target.name, target_fingerprint=mark), part.unit)
