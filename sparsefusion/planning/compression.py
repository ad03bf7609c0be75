"""The compression of gradients: the user's settings, and their bytes compared with dense gradients."""

from dataclasses import dataclass

from sparsefusion.selection.indices import INDEX_BYTES

from .plan import filled_values, value_bytes

GUARD_INDEX_BYTES = 4  # bytes of an index, for the decision whether a density is worth it (2 are sent)


@dataclass(frozen=True)
class CompressionSettings:
    """The user's settings of compression.

    budget: "bytes" or "paper", see `compensated_density`. exchange: all_gather or sparse_all_reduce, see `SparseFusion`.
    """

    density: float
    sparsifier: str = "dgc"
    wire: str = "fp32"
    budget: str = "bytes"
    exchange: str = "all_gather"

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

        filled: how many values they occupy if they belong to several units (see `filled`). It leaves out the 4 bytes
        that indices take for each 65,536 elements from which they are selected.
        """
        values = value_bytes("fp32" if self.sparsifier == "randomk" else self.wire, max(k, filled), itemsize)
        return values if self.sparsifier == "randomk" else values + bytes_per_index * k

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

    It counts 4 bytes for an index, though 2 are sent, to make up for the time of the selection. itemsize: bytes of an
    element of a gradient. sent_itemsize: the same in the framework's own messages. reduce_scatters: the framework uses
    reduce-scatter, which sends half as much. than_fp16: compare with an all-reduce in float16 as well.
    """
    if ranks == 1:
        return False
    dense_bytes = (1 if reduce_scatters else 2) * sent_itemsize
    return compression.density * bytes_per_element(ranks, compression, itemsize) < (
        min(dense_bytes, 2 * 2) if than_fp16 else dense_bytes
    )


def bytes_per_element(ranks: int, compression: CompressionSettings, itemsize: int) -> float:
    """Bytes that a selected element costs on these ranks, to compare with 2 x the bytes of a dense element."""
    each = compression.sent_bytes(1 << 20, itemsize, bytes_per_index=GUARD_INDEX_BYTES) / (1 << 20)
    return each * (2 if compression.sparsifier == "randomk" or compression.reduces_sparsely else ranks)
