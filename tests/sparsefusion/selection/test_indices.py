"""Packed indices; oracle: the indices before packing, and bytes counted by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsefusion.selection.indices import decode_indices, encode_indices, index_bytes, index_dtype


@given(st.data(), st.integers(1, 5_000_000))
def test_indices_are_decoded_exactly(data, numel):
    """The rows are those of several ranks. Indices may repeat, as padding does."""
    k = data.draw(st.integers(1, 50))
    rows = data.draw(
        st.lists(st.lists(st.integers(0, numel - 1), min_size=k, max_size=k).map(sorted), min_size=1, max_size=3)
    )
    indices = torch.tensor(rows, dtype=torch.int32)
    encoded = torch.stack([encode_indices(row, numel) for row in indices])
    assert encoded.shape[1] == index_bytes(k, numel)
    decoded = decode_indices(encoded, k, numel)
    assert decoded.dtype == torch.int32 and torch.equal(decoded, indices)


@pytest.mark.parametrize(
    "k, numel, nbytes",
    [
        (1, 1, 4),
        (3, 65_536, 10),
        (3, 65_537, 12),
        (5, 65_537, 18),
        (37_000, 3_700_000, 74_000 + 4 * 57),
        (9, 2**33, 72),
    ],
)
def test_bytes(k, numel, nbytes):
    assert index_bytes(k, numel) == nbytes
    indices = (torch.arange(k) * (numel // k)).to(index_dtype(numel))
    assert encode_indices(indices, numel).dtype == torch.uint8 and len(encode_indices(indices, numel)) == nbytes


@pytest.mark.parametrize("k", [9, 1_000_000])
@pytest.mark.parametrize("numel, dtype", [(2**31, torch.int32), (2**31 + 1, torch.int64), (2**32 + 6, torch.int64)])
def test_indices_of_32_bits_and_of_more(k, numel, dtype):
    """9 indices are sent without packing, 1,000,000 are packed."""
    indices = torch.arange(k) * (numel // k) + numel - 1 - (k - 1) * (numel // k)
    decoded = decode_indices(encode_indices(indices.to(dtype), numel)[None], k, numel)[0]
    assert decoded.dtype == dtype and torch.equal(decoded.long(), indices) and indices[-1] == numel - 1
