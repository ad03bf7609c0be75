"""Memory of tensors, counted operation by operation."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Bytes of the storages that operations made, and that anything still holds."""

    def __init__(self):
        super().__init__()
        self.most, self._given, self._made = 0, {}, {}

    @property
    def nbytes(self):
        """Now."""
        self._made = {key: each for key, each in self._made.items() if not each[0].expired()}
        return sum(nbytes for _, nbytes in self._made.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for storage in storages((args, kwargs)):
            if storage._cdata not in self._made:
                self._given[storage._cdata] = StorageWeakRef(storage)
        found = function(*args, **(kwargs or {}))
        for storage in storages(found):
            if storage._cdata not in self._given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.nbytes)
        return found


def storages(tree):
    """Of the tensors in it."""
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def taken(schedule, batch, seq, heads, kv_heads, head_dim, dtype, causal):
    """(saved, forward, backward) bytes of an attention2d schedule on this rank, beside its inputs."""
    local = len(schedule.positions(seq))
    q, k, v, dout = (
        torch.randn(batch, local, count, head_dim).to(dtype) for count in (heads, kv_heads, kv_heads, heads)
    )
    inputs = [t.requires_grad_() for t in (q, k, v)]
    with Alive() as alive:
        out = schedule(*inputs, causal=causal, seq=seq)
        saved, forward = alive.nbytes, alive.most
        alive.most = 0
        gradients = torch.autograd.grad(out, inputs, dout)
        backward = alive.most
    del gradients
    return saved, forward, backward
