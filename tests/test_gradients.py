"""Loss and gradients; oracles: our own float64 model on one rank (1e-10), and transformers' autograd (5e-6).

transformers' models are float64 here, but their norms compute in float32 whatever the model's dtype, hence 5e-6.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import megatron_ssm
from cases import CASES, assemble, oracle
from megatron_ssm.families import layout

__all__ = ["oracle"]

OURS, THEIRS = 1e-10, 5e-6
FEW = ("mamba-biases-untied", "mamba2-1-group-biases-tied", "mamba2-2-groups-biases-tied")


def shifted(ids, ignored=0.0, value=-100, seed=5):
    """(inputs, labels) of predicting each next id; a part of the labels is set to the ignored value."""
    inputs, labels = ids[:, :-1], ids[:, 1:].clone()
    drawn = torch.rand(labels.shape, generator=torch.Generator().manual_seed(seed))
    return inputs, labels.masked_fill(drawn < ignored, value)


def cross_entropy(logits, labels, ignore_index=-100):
    """The loss of whole logits."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignore_index)


def gradients(model):
    """{our name: this rank's gradient}; every parameter must have one."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def run_loss(oracle, inputs, labels, group=None, dtype=torch.float64, **keywords):
    """The loss of our model, and this rank's gradients."""
    model = megatron_ssm.load(oracle.directory, group, dtype=dtype)
    loss = model.loss(inputs, labels, **keywords)
    loss.backward()
    return loss.detach(), gradients(model)


def whole(oracle, shards):
    """{Hugging Face name: whole gradient} from each rank's; those that several ranks hold must be the same bits."""
    return assemble(layout(megatron_ssm.Config.read(oracle.directory)), shards)


def of_transformers(oracle, inputs, labels):
    """transformers' loss and {name: gradient}, its logits compared with labels that are shifted already."""
    model = oracle.model
    model.zero_grad(set_to_none=True)
    loss = cross_entropy(model(inputs, use_cache=False).logits, labels)
    loss.backward()
    return loss.detach().double(), {name: p.grad.double() for name, p in model.named_parameters()}


def assert_near(ours, theirs, tolerance):
    """Per tensor ||g - g_ref|| / ||g_ref||, absolute where ||g_ref|| < 1e-8."""
    __tracebackhide__ = True
    assert set(ours) == set(theirs)

    def error(name):
        scale = theirs[name].norm()
        return ((ours[name] - theirs[name]).norm() / (scale if scale >= 1e-8 else 1)).item()

    wrong = {name: error(name) for name in theirs if not error(name) <= tolerance}
    assert not wrong, f"beyond {tolerance}: {wrong}"


@pytest.mark.parametrize("tp", (1, 2, 4))
@pytest.mark.parametrize("name", CASES)
def test_every_gradient_of_the_loss(ranks, tp, name, oracle):
    """With a fifth of the labels ignored, against one rank of ours and against transformers."""
    oracle = oracle(name, torch.float64)
    inputs, labels = shifted(oracle.ids, ignored=0.2)
    results = ranks(lambda rank: run_loss(oracle, inputs, labels, dist.group.WORLD), tp)
    found = whole(oracle, [shard for _, shard in results])

    loss, theirs = of_transformers(oracle, inputs, labels)
    assert all(torch.equal(results[0][0], other) for other, _ in results)
    torch.testing.assert_close(results[0][0], loss, rtol=THEIRS, atol=0)
    assert_near(found, theirs, THEIRS)

    loss, alone = run_loss(oracle, inputs, labels)
    torch.testing.assert_close(results[0][0], loss, rtol=OURS, atol=0)
    assert_near(found, whole(oracle, [alone]), OURS)


@pytest.mark.parametrize("tp", (1, 2, 4))
@pytest.mark.parametrize("name", FEW)
def test_every_gradient_in_fp32(ranks, tp, name, oracle):
    """Both in fp32; each is about 1e-6 from our float64 gradients."""
    oracle = oracle(name)
    inputs, labels = shifted(oracle.ids)
    results = ranks(lambda rank: run_loss(oracle, inputs, labels, dist.group.WORLD, torch.float32), tp)
    found = whole(oracle, [shard for _, shard in results])
    assert_near(found, of_transformers(oracle, inputs, labels)[1], THEIRS)


@pytest.mark.parametrize("tp", (1, 2, 4))
@pytest.mark.parametrize("name", FEW)
def test_gradients_through_whole_logits(ranks, tp, name, oracle):
    """model(ids) gathers the logits on every rank; each rank then computes the same loss of them."""
    oracle = oracle(name, torch.float64)
    shape = (*oracle.ids.shape, oracle.vocab)
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def run(rank=0, group=None):
        model = megatron_ssm.load(oracle.directory, group, dtype=torch.float64)
        (model(oracle.ids) * weights).sum().backward()
        return gradients(model)

    found = whole(oracle, ranks(lambda rank: run(rank, dist.group.WORLD), tp))
    assert_near(found, whole(oracle, [run()]), OURS)
    oracle.model.zero_grad(set_to_none=True)
    (oracle.model(oracle.ids, use_cache=False).logits * weights).sum().backward()
    assert_near(found, {n: p.grad.double() for n, p in oracle.model.named_parameters()}, THEIRS)


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("name", ("mamba", "mamba2-2-groups"))
def test_loss_is_that_of_transformers(ranks, tp, name, oracle):
    """transformers shifts the labels itself; ours come shifted. In fp32."""
    oracle = oracle(name)
    with torch.no_grad():
        expected = oracle.model(oracle.ids, labels=oracle.ids, use_cache=False).loss
    for loss, _ in ranks(lambda rank: run_loss(oracle, *shifted(oracle.ids), dist.group.WORLD, torch.float32), tp):
        torch.testing.assert_close(loss, expected, rtol=THEIRS, atol=0)


@pytest.mark.parametrize("tp", (1, 2, 4))
def test_ignored_labels(ranks, tp, oracle):
    """Another ignored value, also one that is an id; and a batch where every label is ignored has loss 0, not NaN."""
    oracle = oracle("mamba2-2-groups", torch.float64)
    inputs, labels = shifted(oracle.ids, ignored=0.5, value=7)

    def run(rank):
        seven, _ = run_loss(oracle, inputs, labels, dist.group.WORLD, ignore_index=7)
        far, _ = run_loss(oracle, inputs, labels.masked_fill(labels == 7, -1), dist.group.WORLD, ignore_index=-1)
        return seven, far, *run_loss(oracle, inputs, torch.full_like(labels, -100), dist.group.WORLD)

    with torch.no_grad():
        expected = cross_entropy(oracle.model(inputs, use_cache=False).logits, labels, ignore_index=7)
    for seven, far, none, none_gradients in ranks(run, tp):
        torch.testing.assert_close(seven, expected.double(), rtol=THEIRS, atol=0)
        assert torch.equal(seven, far)
        assert none == 0 and all(not grad.any() for grad in none_gradients.values())


@pytest.mark.parametrize("tp", (1, 2, 4))
def test_labels_outside_the_vocabulary(ranks, tp, oracle):
    oracle = oracle("mamba")
    inputs, labels = shifted(oracle.ids)
    labels[1, 3] = oracle.vocab

    def run(rank):
        with pytest.raises(ValueError) as caught:
            run_loss(oracle, inputs, labels, dist.group.WORLD)
        return str(caught.value)

    assert ranks(run, tp) == ["label 61 is outside the vocabulary of 61"] * tp


@pytest.mark.parametrize("tp, dp", [(1, 2), (2, 2), (1, 3)])
@pytest.mark.parametrize("name", ("mamba", "mamba2-2-groups"))
def test_loss_over_data_parallel_ranks(ranks, tp, dp, name, oracle):
    """Each replica has other rows, and another number of ignored labels: losses and summed gradients of one batch."""
    oracle = oracle(name, torch.float64)
    ids = torch.randint(oracle.vocab, (dp, 30), generator=torch.Generator().manual_seed(4))
    rows = [shifted(ids[i : i + 1], ignored=0.4 * i, seed=i) for i in range(dp)]
    inputs, labels = (torch.cat(parts) for parts in zip(*rows, strict=True))
    counts = labels.ne(-100).sum(1)
    assert counts[0] != counts[-1] > 0

    def run(rank):
        tensor = [dist.new_group(range(i * tp, (i + 1) * tp)) for i in range(dp)][rank // tp]
        data = [dist.new_group(range(i, tp * dp, tp)) for i in range(tp)][rank % tp]
        model = megatron_ssm.load(oracle.directory, tensor, dtype=torch.float64, data_group=data)
        loss = model.loss(*rows[rank // tp])
        loss.backward()
        for grad in (found := gradients(model)).values():
            dist.all_reduce(grad, group=data)
        return loss.detach(), found

    expected, alone = run_loss(oracle, inputs, labels)
    results = ranks(run, tp * dp)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected, rtol=OURS, atol=0)
    for replica in range(dp):
        shards = [shard for _, shard in results[replica * tp : (replica + 1) * tp]]
        assert_near(whole(oracle, shards), whole(oracle, [alone]), OURS)
