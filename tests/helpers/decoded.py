"""Small models that decode token by token."""

from collections import OrderedDict

import torch

from hf import save_hf

IDS = torch.arange(18).view(2, 9) % 61


def saved(directory, family, **changes):
    """The directory of a small model."""
    save_hf(directory, family, num_hidden_layers=2, **changes)
    return directory


@torch.no_grad()
def one_by_one(model, cached, first=4):
    """Logits of a prompt, then of one token after the other, by `model`, with a cache of `cached`'s."""
    cache = cached.new_cache(2)
    parts = [model(IDS[:, :first], cache=cache)]
    return torch.cat(parts + [model(IDS[:, t : t + 1], cache=cache) for t in range(first, IDS.shape[1])], dim=1)


def counted(kind, patch=setattr):
    """One entry, from now on, for each block in each call of a kind's objects."""
    count, called = [], kind.__call__
    patch(kind, "__call__", lambda *given: (count.extend([1] * len(given[0])), called(*given))[1])
    return count


def hooked(model):
    """A layer has a hook."""
    model.layers[1].norm.register_forward_hook(lambda _, __, y: 2 * y)


def hooked_anew(model):
    """As some remove all hooks of a layer, before another one comes."""
    model.layers[1].norm._forward_hooks = OrderedDict()
    hooked(model)
