"""A family of an operator that exists in no other, in one file (helpers/toy_family.py). Oracle: a loop over its tokens."""

import json
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import toy_family
from safetensors.torch import load_file, save_file

from attention2d import Ring
from megatron_ssm import Engine, families, load, save
from megatron_ssm.model.advise import all_reduces
from megatron_ssm.model.memory import Memory

IDS = torch.randint(61, (3, 24), generator=torch.Generator().manual_seed(0))
worlds = pytest.mark.parametrize("tp", (1, 2, 4))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A checkpoint with random weights. The family is registered as long as this module is tested."""
    families.register(toy_family.TOY)
    path, generator = tmp_path_factory.mktemp("toy"), torch.Generator().manual_seed(1)
    raw = {"model_type": "toy", **toy_family.SIZES}
    (path / "config.json").write_text(json.dumps(raw))
    shapes = {}
    for field in families.from_dict(raw).fields():
        shapes[field.hf] = max(shapes.get(field.hf, (0,)), field.hf_shape)
    tensors = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")
    yield path
    del families.FAMILIES["toy"]


def loop(directory, ids):
    """Logits in float64, one token of one sequence after the other. Returns also the weights, which have gradients."""
    w = {name: tensor.double().requires_grad_() for name, tensor in load_file(directory / "model.safetensors").items()}
    norm = lambda x, name: F.rms_norm(x, x.shape[-1:], w[name], 1e-5)  # noqa: E731

    def angles(t):
        c, s = math.cos(t), math.sin(t)
        return torch.tensor([[c, -s], [s, c]], dtype=torch.float64)

    logits = []
    for row in ids:
        states, keys, values, outputs = [torch.zeros(4, 2, 3).double()] * 3, [[], [], []], [[], [], []], []
        for t, token in enumerate(row.tolist()):
            x = w["model.embed_tokens.weight"][token]
            for i in range(3):
                path = f"model.layers.{i}."
                h = norm(x, path + "norm.weight")
                q, k, v, a = (w[path + "rotor.in_proj.weight"] @ h).split([8, 8, 12, 4])
                turn = torch.stack([a.cos(), -a.sin(), a.sin(), a.cos()], -1).view(4, 2, 2)
                update = k.view(4, 2, 1) * v.view(4, 1, 3)
                states[i] = torch.tanh(w[path + "rotor.decay"]) * turn @ states[i] + update
                rotor = w[path + "rotor.out_proj.weight"] @ (q.view(4, 1, 2) @ states[i]).flatten()
                q, k, v = (w[f"{path}attn.{name}_proj.weight"] @ h for name in "qkv")
                q, k, turn = q.view(4, 4), k.view(4), angles(t)
                keys[i].append(torch.cat([turn @ k[:2], k[2:]]))
                values[i].append(v)
                q = torch.cat([q[:, :2] @ turn.T, q[:, 2:]], dim=1)
                weights = (q @ torch.stack(keys[i]).T / 2).softmax(-1)
                x = x + rotor + 0.5 * w[path + "attn.o_proj.weight"] @ (weights @ torch.stack(values[i])).flatten()
            outputs.append(w["lm_head.weight"] @ norm(x, "model.norm.weight"))
        logits.append(torch.stack(outputs))
    return torch.stack(logits), w


def model_of(directory, **options):
    return load(directory, dist.group.WORLD, dtype=torch.float64, **options)


@worlds
def test_logits_gradients_and_decoding(ranks, tp, directory):
    expected, weights = loop(directory, IDS)
    loss = F.cross_entropy(expected[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    loss.backward()

    def run(rank):
        model = model_of(directory)
        ours = model.loss(IDS[:, :-1], IDS[:, 1:])
        ours.backward()
        cache = model.new_cache(3)
        with torch.no_grad():
            parts = [model(part, cache=cache) for part in IDS.split([9, 1, 6, 1, 7], dim=1)]
        gradients = {p.field.name: (p.field, p.grad) for p in model.parameters()}
        return ours.item(), torch.cat(parts, dim=1), gradients

    results = ranks(run, tp)
    for ours, logits, _ in results:
        assert abs(ours - loss.item()) < 1e-12
        torch.testing.assert_close(logits, expected.detach(), rtol=0, atol=1e-10)
    for name, (field, _) in results[0][2].items():
        for rank, (*_, gradients) in enumerate(results):
            wanted = field.read(weights[field.hf].grad, rank, tp)
            torch.testing.assert_close(gradients[name][1], wanted, rtol=0, atol=1e-11, msg=name)


@pytest.mark.parametrize("tp, cp", [(1, 2), (2, 2)])
def test_context_ranks_send_as_much_for_any_length(ranks, tp, cp, directory):
    expected, _ = loop(directory, IDS)

    def run(rank):
        groups = [dist.new_group(list(range(start, start + tp))) for start in range(0, tp * cp, tp)]
        contexts = [dist.new_group(list(range(first, tp * cp, tp))) for first in range(tp)]
        schedule, sent, logits = Ring(contexts[rank % tp]), [], None
        model = load(directory, groups[rank // tp], context=schedule, dtype=torch.float64)
        for length in (16, 24):
            model.context_ranks.counter.reset()
            local = model.local_logits(schedule.shard(IDS[:, :length], 1))
            if tp == 1:  # what tensor-parallel ranks send grows with the tokens
                sent.append(model.counter.sent)
            whole = torch.cat(list(model.ranks.all_gather(local)), dim=-1) if tp > 1 else local
            logits = schedule.unshard(whole, 1)
        with torch.no_grad():
            cache = model.new_cache(3)
            model.next_logits(IDS[:, :20], cache=cache, prompt=True)
            decoded = model(IDS[:, 20:21], cache=cache)
        return sent, logits.detach(), decoded

    for sent, logits, decoded in ranks(run, tp * cp):
        assert len(set(sent)) <= 1 and all(sent)
        torch.testing.assert_close(logits[..., :61], expected.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(decoded[:, 0], expected[:, 20].detach(), rtol=0, atol=1e-10)


@worlds
def test_tokens_that_are_taken_back(ranks, tp, directory):
    expected, _ = loop(directory, IDS)

    def run(rank):
        model = model_of(directory)
        cache = model.new_cache(3)
        with torch.no_grad():
            model.next_logits(IDS[:, :9], cache=cache, prompt=True)
            wrong = IDS[:, 9:14].clone()
            wrong[0, 1:], wrong[1, 3:] = 0, 0
            model.speculative_logits(wrong, cache)
            cache.accept([1, 3, 5])
            nexts = torch.stack([IDS[row, 9 + count] for row, count in enumerate((1, 3, 5))]).unsqueeze(1)
            return model(nexts, cache=cache)[:, 0]

    wanted = torch.stack([expected[row, 9 + count] for row, count in enumerate((1, 3, 5))])
    for found in ranks(run, tp):
        torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=1e-10)


@worlds
def test_engine_prefix_cache_checkpoint_and_sizes(ranks, tp, directory, tmp_path):
    expected, _ = loop(directory, IDS)

    def run(rank):
        model = model_of(directory)
        tokens = []
        for _ in range(2):  # the second time, the prefix cache has the prompts
            engine = Engine(model, slots=2, prefix_bytes=1 << 20)
            requests = [engine.add(IDS[row, :12].tolist(), max_new_tokens=3) for row in range(3)]
            while engine.step():
                pass
            tokens.append([request.tokens for request in requests])
        counter, cache = model.counter, model.new_cache(2, 8)
        with torch.no_grad():
            model(IDS[:2, :4], cache=cache)
            counter.reset()
            model.local_logits(IDS[:2, 4:5], cache=cache)
        counted = counter.calls["all_reduce"], counter.nbytes
        save(model, tmp_path / f"saved-{tp}")
        return tokens, counted, cache.nbytes, sum(p.numel() * 8 for p in model.parameters())

    for tokens, counted, cache_bytes, weights in ranks(run, tp):
        assert tokens[0] == tokens[1]
        assert [row[0] for row in tokens[0]] == expected[:, 11].argmax(-1).tolist()
        config = families.read(directory)
        sums = list(all_reduces(config, tp)) if tp > 1 else []
        assert counted[0] == sum(count for _, count in sums)
        assert counted[1] == sum(2 * 2 * nbytes * count for nbytes, count in sums)  # two rows, of float64
        assert cache_bytes == Memory(config, tp, 8).cache(2, 8)
        assert weights <= Memory(config, tp, 8).weights
    ours, theirs = load_file(tmp_path / f"saved-{tp}" / "model.safetensors"), load_file(directory / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].float(), theirs[name]) for name in ours)
