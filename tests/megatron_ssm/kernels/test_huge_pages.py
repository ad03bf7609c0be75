"""Tensors in huge pages behave like those that torch allocates."""

import sys

import pytest
import torch

import megatron_ssm
from hf import save_hf
from megatron_ssm.kernels.huge_pages import PAGE, PIECE, HugePages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for huge pages")


def test_allocation():
    """Tensors have storages of their own, side by side from the beginning of a huge page, and of zeros."""
    with HugePages():
        first, second = torch.empty(3, 5), torch.zeros(7, dtype=torch.bfloat16)
        large, empty = torch.empty(PIECE // 2), torch.empty(0, 4)
        narrow = torch.empty(2, dtype=torch.int8, device="cpu")
        other = torch.ones(2), torch.empty(3, device="meta")
    assert first.data_ptr() % PAGE == large.data_ptr() % PAGE == narrow.data_ptr() % PAGE == 0
    assert second.data_ptr() - first.data_ptr() == 64  # 60 bytes, to the next cache line
    assert (
        first.shape == (3, 5)
        and empty.shape == (0, 4)
        and second.dtype == torch.bfloat16
        and narrow.dtype == torch.int8
    )
    assert other[0].sum() == 2 and other[1].is_meta
    for tensor in (first, second, narrow):
        assert not tensor.any() and tensor.untyped_storage().nbytes() == tensor.nbytes and not tensor.requires_grad
        tensor.fill_(1)
    copy = HugePages().copy(first.T)
    assert torch.equal(copy, first.T) and copy.data_ptr() % PAGE == 0 and copy.is_contiguous()


@pytest.mark.parametrize("weights", (None, "int8"))
def test_models_and_caches(tmp_path, weights):
    """Matrices, what was not quantized, and states are close to each other."""
    save_hf(tmp_path, "mamba", hidden_size=128, num_hidden_layers=1)
    model = megatron_ssm.load(tmp_path, weights=weights)
    layer, held = model.layers[0].mixer, model.new_cache(2).states["layers.0.mixer"]
    state, conv = held["state"], held["conv"]
    matrix = layer.out_proj.weight if weights is None else layer.out_proj.weight.values
    assert abs(matrix.data_ptr() - layer.x_proj.data_ptr()) < PIECE
    assert 0 < state.data_ptr() - conv.data_ptr() <= conv.nbytes + 64
    assert not state.any() and not conv.any()
