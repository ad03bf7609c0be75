"""Small models that decode token by token."""

from collections import OrderedDict

import torch

from hf import save_hf

IDS = torch.arange(18).view(2, 9) % 61


def saved(directory, family, **changes):
    """Save a small model in the directory; returns the directory."""
    save_hf(directory, family, num_hidden_layers=2, **changes)
    return directory


@torch.no_grad()
def one_by_one(model, cached, first=4):
    """Logits of `model` for a prompt and then for one token at a time, with a cache that the model `cached` made."""
    cache = cached.new_cache(2)
    parts = [model(IDS[:, :first], cache=cache)]
    return torch.cat(parts + [model(IDS[:, t : t + 1], cache=cache) for t in range(first, IDS.shape[1])], dim=1)


def counted(kind, patch=setattr):
    """A list to which each later call of an object of the class `kind` adds one entry for each of its blocks."""
    count, original_call = [], kind.__call__
    patch(kind, "__call__", lambda *args: (count.extend([1] * len(args[0])), original_call(*args))[1])
    return count


def hooked(model):
    """Register a hook on a layer of the model."""
    model.layers[1].norm.register_forward_hook(lambda _, __, y: 2 * y)


def hooked_anew(model):
    """Remove all hooks of a layer by replacing their dictionary, as some users do, and register a hook."""
    model.layers[1].norm._forward_hooks = OrderedDict()
    hooked(model)
