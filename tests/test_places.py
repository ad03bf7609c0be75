"""Places on the wire; oracle: the places, and their bytes counted by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsefusion.places import bytes_of_places, decode_places, encode_places


@given(st.data(), st.integers(1, 5_000_000))
def test_they_come_back(data, numel):
    """Of several ranks, some of them several times, as padding is."""
    k = data.draw(st.integers(1, 50))
    rows = data.draw(
        st.lists(st.lists(st.integers(0, numel - 1), min_size=k, max_size=k).map(sorted), min_size=1, max_size=3)
    )
    places = torch.tensor(rows)
    encoded = torch.stack([encode_places(row, numel) for row in places])
    assert encoded.shape[1] == bytes_of_places(k, numel)
    assert torch.equal(decode_places(encoded, k, numel), places)


@pytest.mark.parametrize(
    "k, numel, nbytes", [(1, 1, 6), (3, 65_536, 10), (3, 65_537, 14), (37_000, 3_700_000, 74_000 + 4 * 57)]
)
def test_bytes(k, numel, nbytes):
    assert bytes_of_places(k, numel) == nbytes
    places = torch.arange(k) * (numel // k)
    assert encode_places(places, numel).dtype == torch.uint8 and len(encode_places(places, numel)) == nbytes


def test_more_numbers_than_an_index_of_32_bits_has():
    places = torch.tensor([0, 2**31 - 1, 2**31, 2**32 + 5])
    assert torch.equal(decode_places(encode_places(places, 2**32 + 6)[None], 4, 2**32 + 6)[0], places)
