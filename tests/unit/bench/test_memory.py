"""Memory: tensors are counted once, and those of others not at all."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from foretoken.bench.memory import tensor_bytes
from foretoken.forward.cache import KVCache
from foretoken.models.memory import peak_resident_bytes
from helpers.zoo_llms import with_config


def test_shared_memory_counts_once_and_that_of_others_not():
    weight = torch.zeros(10)
    tied = nn.Linear(5, 2, bias=False)
    tied.weight = nn.Parameter(weight.view(2, 5))
    assert tensor_bytes([weight, weight[:3], {"again": tied}]) == 40
    assert tensor_bytes([weight, np.zeros(4)], apart_from=[tied]) == 32
    assert tensor_bytes(["text", 3, None, lambda: weight]) == 0
    assert tensor_bytes(weight.view(2, 5).to_sparse()) == 40  # a tensor without a storage counts by its size


def test_shared_cache_tensors_are_counted_once():
    cache = KVCache(2, 1, 16)
    cache.keys, cache.values = [torch.zeros(1, 2, 16, 4)] * 2, [torch.zeros(1, 2, 16, 4), None]
    assert tensor_bytes(cache) == 2 * 512  # one tensor stands for both layers


def test_a_draft_model_holds_its_weights_and_one_that_copies_nothing():
    drafting = with_config({"method": "draft_model", "model": "zoo:draft"})
    copying = with_config({"method": "ngram"})
    weights = sum(each.nbytes for each in drafting.recipe.drafter.model.model.parameters())
    apart = (drafting.target, drafting.engine.cache)
    assert tensor_bytes(drafting.recipe.drafter, apart_from=apart) >= weights > 10**6
    assert tensor_bytes(copying.recipe.drafter, apart_from=apart) == 0


def test_the_process_has_held_something():
    assert (peak_resident_bytes() or 0) > 10**7
