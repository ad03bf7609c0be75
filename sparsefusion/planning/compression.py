"""The compression of gradients: the user's settings, and their bytes compared with dense gradients."""

from collections.abc import Iterable
from dataclasses import dataclass

from sparsefusion.selection.indices import INDEX_BYTES

from .plan import Buffer, Plan, filled_values, value_bytes

GUARD_INDEX_BYTES = 4  # bytes per index that `sends_less` counts (2 are sent)


@dataclass(frozen=True)
class CompressionSettings:
    """The user's settings of compression; see `SparseFusion`, which explains them."""

    density: float
    sparsifier: str = "dgc"
    wire: str = "fp32"
    budget: str = "none"
    exchange: str = "all_gather"

    def plan(self, mode: str, ranks: int, buffers: Iterable[Buffer] = ()) -> Plan:
        """The plan of these buffers with these settings."""
        return Plan(mode, self.sparsifier, self.density, self.wire, ranks, tuple(buffers), exchange=self.exchange)

    @property
    def reduces_sparsely(self) -> bool:
        """True if selected elements are exchanged by `SparseAllReduce`."""
        return self.exchange == "sparse_all_reduce" and self.sparsifier != "randomk"

    def messages(self, nbytes: int, ranks: int) -> list[tuple[str, int]]:
        """[(collective, bytes)] that send selected elements of this many bytes, as `Fabric.time` counts them."""
        if self.sparsifier == "randomk":
            return [("all_reduce", nbytes)]
        if self.reduces_sparsely:
            return [("all_to_all", nbytes), ("all_gather", -(-nbytes // ranks))]
        return [("all_gather", nbytes)]

    def sent_bytes(self, k: int, itemsize: int, filled: int = 0, bytes_per_index: int = INDEX_BYTES) -> int:
        """Bytes of k elements selected from gradients of that itemsize: values and indices, or with randomk values only.

        It leaves out the 4 bytes that indices take per 65,536 elements of the gradients. filled: the number of values that
        they occupy if they belong to several units (see the method `filled`).
        """
        if self.sparsifier == "randomk":
            return value_bytes("fp32", max(k, filled), itemsize)
        return value_bytes(self.wire, max(k, filled), itemsize) + bytes_per_index * k

    def filled(self, k: int) -> int:
        """The number of values that the k elements of a unit occupy in a message (see `plan.filled_values`)."""
        return k if self.sparsifier == "randomk" else filled_values(self.wire, k)


def sends_less(
    compression: CompressionSettings,
    ranks: int,
    itemsize: int,
    sent_itemsize: int,
    reduce_scatters: bool = False,
    than_fp16: bool = False,
) -> bool:
    """Return True if sparse messages are much smaller than dense ones: density (value + index bytes) ranks < 2 dense bytes.

    It counts 4 bytes per index, though 2 are sent, to account for the time of the selection.

    Args:
        compression, ranks: The settings and the number of ranks.
        itemsize, sent_itemsize: Bytes of an element of a gradient, and in the framework's own messages.
        reduce_scatters: True if the framework uses reduce-scatter, which sends half as much as an all-reduce.
        than_fp16: Compare with an all-reduce in float16 as well.
    """
    if ranks == 1:
        return False
    element = compression.sent_bytes(1 << 20, itemsize, bytes_per_index=GUARD_INDEX_BYTES) / (1 << 20)
    element *= 2 if compression.sparsifier == "randomk" or compression.reduces_sparsely else ranks
    dense_bytes = (1 if reduce_scatters else 2) * sent_itemsize
    return compression.density * element < (min(dense_bytes, 2 * 2) if than_fp16 else dense_bytes)
