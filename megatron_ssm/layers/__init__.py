"""The operators of the models (Mamba-1, Mamba-2, gated delta nets, attention, MLPs, experts), units, states and the cache.

In: hidden states, the same on every rank, and this rank's part of the states.
Out: hidden states; the states are advanced in place. Tapes are lists of operations that one call of C runs for all layers;
`tapes.py` decides which calls have one, and `cuda_graphs.py` records graphs that decode a token.
"""

from commfabric.foundation.lazy import lazy_exports

_HOME = {
    "Operator": ".operator",
    "Partial": ".operator",
    "Place": ".operator",
    "Call": ".call",
    "State": ".state",
    "Cache": ".cache",
    "AttentionSpec": ".attention",
    "Mamba1Spec": ".mamba1",
    "Mamba2Spec": ".mamba2",
    "MlpSpec": ".mlp",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _HOME)
