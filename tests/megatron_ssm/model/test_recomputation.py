"""Models that compute their activations again in backward. Oracle: the same model without that, to the bit."""

import pytest
import torch
from gradients import assert_near, gradients, shifted

import megatron_ssm
from attention2d import Ring
from cases import groups_of, oracle

__all__ = ["oracle"]

# (case, tensor-parallel ranks, context ranks, sequence parallelism)
CASES = (
    ("mamba-biases-untied", 1, 1, False), ("falcon", 2, 1, False), ("mamba2-1-group", 2, 1, True),
    ("mamba2-2-groups", 4, 1, False), ("mamba2-1-group-biases-tied", 2, 2, False),
    ("zamba-4-heads-grouped-untied", 2, 2, True),
    ("zamba2-2-groups-adapters-rope", 1, 2, False), ("zamba2-4-groups-biases-adapters-untied", 2, 1, True),
)  # fmt: skip


def loss_on(rank, oracle, tp, cp, recompute, sequence_parallel):
    """A model on tensor-parallel times context ranks, and its loss for 64 tokens of each sequence."""
    tensor, context = groups_of(rank, tp, cp)
    spread = Ring(context)
    options = dict(dtype=torch.float64, recompute=recompute, sequence_parallel=sequence_parallel)
    model = megatron_ssm.load(oracle.directory, tensor, context=spread, **options)
    inputs, labels = (t[:, :64] for t in shifted(oracle.ids))
    return model, model.loss(spread.shard(inputs), spread.shard(labels))


@pytest.mark.parametrize("name, tp, cp, sequence_parallel", CASES)
def test_gradients_and_bytes_are_those_without_it(ranks, name, tp, cp, sequence_parallel, oracle):
    """Nothing is sent again, except the tokens that sequence parallelism gathers for the gradients of weights anyway."""
    oracle = oracle(name, torch.float64)

    def run(rank):
        results = []
        for recompute in (False, True):
            model, loss = loss_on(rank, oracle, tp, cp, recompute, sequence_parallel)
            loss.backward()
            results.append((loss.detach(), gradients(model), model.counter.sent, dict(model.counter.calls)))
        return results

    for plain, recomputed in ranks(run, tp * cp):
        assert torch.equal(plain[0], recomputed[0])
        for parameter, gradient in plain[1].items():
            assert torch.equal(gradient, recomputed[1][parameter]), parameter
        assert recomputed[2:] == plain[2:]


@pytest.mark.parametrize(
    "name, tp, cp, sequence_parallel",
    (("falcon", 1, 1, False), ("zamba2-1-group", 2, 2, False), ("falcon", 2, 1, True)),
)
def test_backward_twice(ranks, name, tp, cp, sequence_parallel, oracle):
    """A graph that is retained can be differentiated again."""
    oracle = oracle(name, torch.float64)

    def run(rank):
        model, loss = loss_on(rank, oracle, tp, cp, True, sequence_parallel)
        loss.backward(retain_graph=True)
        once = {name: gradient.clone() for name, gradient in gradients(model).items()}
        loss.backward()
        return once, gradients(model)

    for once, twice in ranks(run, tp * cp):
        assert_near(twice, {name: 2 * gradient for name, gradient in once.items()}, 1e-14)


class Stored:
    """Counts the bytes that autograd stores for backward, each tensor's storage once."""

    def __init__(self):
        self.storages = {}

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    def _pack(self, tensor):
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = tensor  # alive, so that no other has its address
        return tensor

    @property
    def nbytes(self):
        return sum(tensor.untyped_storage().nbytes() for tensor in self.storages.values())


@pytest.mark.parametrize("name", ("mamba", "mamba2-1-group", "zamba2-1-group"))
def test_a_block_stores_its_input_only(name, oracle):
    """Each block of 70 tokens stores less than a third of what it stored."""
    oracle, stored = oracle(name), []
    for recompute in (False, True):
        model = megatron_ssm.load(oracle.directory, recompute=recompute)
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with Stored() as saved:
            model.loss(oracle.ids, oracle.ids)
        saved.storages = {k: v for k, v in saved.storages.items() if k not in parameters}
        stored.append(saved.nbytes)
    assert stored[1] < stored[0]
