"""The draft head of Qwen3.5's checkpoints. Oracles: transformers' MtpModel, and decoding without it."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from hf import Float64, hf_model, tensors_in
from megatron_ssm import Engine, families, load, save
from megatron_ssm.checkpoints.convert import convert
from megatron_ssm.engine.sampling import Sampling, choose_tokens
from megatron_ssm.kernels import kernels
from megatron_ssm.model.memory import Memory
from megatron_ssm.spec.fields import hf_shapes

VOCAB, SEQ = 61, 20
NAMES = {
    "layers.0.enorm": "pre_fc_norm_embedding", "layers.0.hnorm": "pre_fc_norm_hidden", "layers.0.eh_proj": "fc",
    "layers.0.post_norm": "norm", "layers.0.mtp_block": "layers.0",
}  # fmt: skip
IDS = torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(0))


def ship(directory, family):
    """Save a model with a draft head; returns (directory, the head's hidden states for IDS in float64)."""
    changes = dict(num_hidden_layers=4, num_mtp_layers=1, mtp_layer_types=["full_attention"], vocab_size=VOCAB)
    model = hf_model(family, dtype=torch.float64, **changes)
    model.save_pretrained(directory)
    with Float64():
        head = MtpModel(model, 1).double().eval()
    generator = torch.Generator().manual_seed(7)
    own = {name: p for name, p in head.named_parameters() if name.startswith("layers.")}
    with torch.no_grad(), Float64():
        for parameter in own.values():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        hidden = model.model(IDS, use_cache=False).last_hidden_state
        positions = torch.arange(1, SEQ).expand(2, -1)
        guessed = head.forward_layer(0, hidden[:, :-1], positions, None, input_ids=IDS[:, 1:])
    tensors = load_file(directory / "model.safetensors")
    for name, parameter in own.items():
        start = next(start for start in NAMES if name.startswith(start))
        tensors[f"mtp.{NAMES[start]}{name.removeprefix(start)}"] = parameter.detach().clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory, guessed


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """See `ship`."""
    return ship(tmp_path_factory.mktemp("shipped"), "qwen3_5_text")


def on_rank(directory, **options):
    """The model of this rank, in float64."""
    return load(directory, dist.group.WORLD, dtype=torch.float64, **options)


@pytest.mark.parametrize("tp", (1, 2, pytest.param(4, marks=pytest.mark.full)))
@torch.no_grad()
def test_hidden_states(ranks, tp, shipped):
    """All tokens at once, and in pieces with a cache, from the hidden states that the model's cache keeps."""
    check_hidden_states(ranks, tp, *shipped)


@pytest.mark.parametrize("tp", (1, 2))
@torch.no_grad()
def test_hidden_states_of_a_head_with_experts(ranks, tp, tmp_path):
    check_hidden_states(ranks, tp, *ship(tmp_path, "qwen3_5_moe_text"))


def check_hidden_states(ranks, tp, directory, expected):
    """Assert that our head's hidden states are the expected ones."""

    def run(rank):
        model = on_rank(directory, draft_head=True)
        cache = model.new_cache(2)
        model.next_logits(IDS[:, :7], cache=cache, prompt=True)
        for t in range(7, SEQ):
            model.next_logits(IDS[:, t : t + 1], cache=cache)
        hidden, embeddings = cache.states["final"].per_token["hidden"][:, : SEQ - 1], model.embedded(IDS[:, 1:])
        whole, own, pieces = model.draft_head(embeddings, hidden), model.new_cache(2), []
        for piece in (slice(0, 5), slice(5, 6), slice(6, SEQ - 1)):
            pieces.append(model.draft_head(embeddings[:, piece], hidden[:, piece], own))
            own.advance(pieces[-1].shape[1])
        return whole, torch.cat(pieces, 1)

    for found in ranks(run, tp):
        for tensor in found:
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-10)


def save_wide(directory, hidden=256):
    """Save a model whose matrices have whole blocks on two ranks, with a random draft head."""
    config = dict(num_hidden_layers=4, mtp_num_hidden_layers=1, hidden_size=hidden, head_dim=64, vocab_size=VOCAB)
    hf_model("qwen3_5_text", intermediate_size=128, **config).save_pretrained(directory)
    tensors, generator = load_file(directory / "model.safetensors"), torch.Generator().manual_seed(3)
    for name, shape in hf_shapes(families.read(directory).with_draft_head().fields()).items():
        if name.startswith("mtp."):
            tensors[name] = 0.1 * torch.randn(shape, generator=generator)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.skipif(not kernels.LIBRARY, reason=f"no C library: {kernels.LIBRARY.why}")
@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize(
    "options", ({}, dict(dtype=torch.bfloat16), dict(weights="int8"), dict(weights="int4")), ids=str
)
@torch.no_grad()
def test_the_tape_gives_what_the_module_gives(ranks, tp, options, tmp_path):
    """Hidden states of one row and of both, which have read differently many tokens; and the token that each one guesses."""
    directory = save_wide(tmp_path)

    def run(rank):
        model = load(directory, dist.group.WORLD, draft_head=True, **options)
        hidden = torch.randn(2, SEQ, 256, generator=torch.Generator().manual_seed(1)).to(model.dtype)
        caches, found = [model.new_cache(2, SEQ) for _ in range(2)], []
        for rows, tokens in (([0, 1], 3), ([1], 2), ([0, 1], 4), ([0, 1], 1)):
            both = [cache.select(rows) for cache in caches]
            given = IDS[rows, :tokens], hidden[rows, :tokens]
            by_tape = model._tapes.draft_hidden(model, *given, both[0])
            by_module = model.draft_head(model.embedded(given[0]), given[1], both[1])
            found.append((model.draft_hidden(*given, both[0]) if by_tape is None else by_tape, by_module))
            guessed = [model.scaled_logits(by_module)[:, -1], model.draft_logits(by_module[:, -1])]
            found.append([choose_tokens(local, Sampling(), [], model.ranks) for local in guessed])
            assert (by_tape is None) == (tokens == 3)  # C does not read the first token of a sequence
            for cache in both:
                cache.advance(tokens)
        return model.draft_head.vocabulary is None, found

    for has_no_copy, found in ranks(run, tp):
        assert has_no_copy == (options == dict(weights="int4"))
        for ours, expected in found:
            atol = 0.05 if "dtype" in options else 2e-3 if options else 1e-5
            torch.testing.assert_close(ours, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("weights", ("int8", "int4"))
@torch.no_grad()
def test_a_quantized_directory_has_it(ranks, tp, weights, tmp_path):
    """Oracle: the same head quantized at load."""
    source, target = save_wide(tmp_path / "source"), tmp_path / "quantized"
    rows = {row.target: row.dtype for row in convert(source, target, weights=weights)}
    assert rows["mtp.fc.weight"] == rows["mtp.layers.0.self_attn.q_proj.weight"] == weights
    assert rows["mtp.norm.weight"] == rows["model.norm.weight"] == "F32"

    def run(rank):
        models = [load(source, dist.group.WORLD, weights=weights, draft_head=True)]
        models += [load(target, dist.group.WORLD, draft_head=has) for has in (True, False)]
        hidden = torch.ones(2, SEQ, 256)
        return models[2].draft_head, [model.draft_head(model.embedded(IDS), hidden) for model in models[:2]]

    for without, (expected, found) in ranks(run, tp):
        assert without is None and torch.equal(found, expected)


def replies(model, **options):
    """Tokens of several requests, of which the last ones share a prefix, and how many proposals were accepted."""
    engine = Engine(model, slots=3, prefix_bytes=2**22, block=4, chunk=5, **options)
    prompts = [list(range(1, 14)), [5, 4, 3], [9] * 9, [*range(1, 10), 30, 31], [7]]
    requests = [
        engine.add(prompt, max_new_tokens=12, temperature=0.8 * (n == 2), seed=n) for n, prompt in enumerate(prompts)
    ]
    while engine.is_busy:
        engine.step()
    return [request.tokens for request in requests], engine.speculated


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_tokens_are_those_without_it(ranks, tp, dtype, shipped, monkeypatch):
    """Greedy and sampled, with ragged acceptances, chunked prompts and hits of the prefix cache."""
    monkeypatch.setattr("megatron_ssm.engine.speculation.FIRST_RATES", (0.95, 0.95))
    monkeypatch.setattr("megatron_ssm.engine.speculation.FORGETTING_RATE", 1.0)  # so that wrong guesses are tried again

    def run(rank):
        found = [load(shipped[0], dist.group.WORLD, dtype=dtype, draft_head=with_head) for with_head in (False, True)]
        return [replies(model) for model in found]

    for (plain, _), (tokens, (proposed, _)) in ranks(run, tp):
        assert tokens == plain and proposed > 10


@pytest.mark.parametrize("tp", (1, 2))
def test_saving_and_memory(ranks, tp, shipped, tmp_path):
    """It is saved with the model; it is left out unless it is asked for; the formula counts it."""
    directory, _ = shipped

    def run(rank):
        model = on_rank(directory, draft_head=True)
        save(model, tmp_path / "saved")
        memory = Memory(model.config, tp, 8)
        weights = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
        cache = model.new_cache(3, 10)
        save(on_rank(directory), tmp_path / "plain")
        return (weights, cache.nbytes), (memory.weights, memory.cache(3, 10))

    measured, formula = ranks(run, tp)[0]  # of a rank that has no fewer words than others
    assert measured == formula
    whole, plain = tensors_in(directory), tensors_in(tmp_path / "plain")
    assert tensors_in(tmp_path / "saved").keys() == whole.keys()
    assert all(torch.equal(tensors_in(tmp_path / "saved")[name], tensor) for name, tensor in whole.items())
    assert plain.keys() == {name for name in whole if not name.startswith("mtp.")}


@pytest.mark.skipif(not kernels.LIBRARY, reason=f"no C library: {kernels.LIBRARY.why}")
@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize(
    "options", ({}, dict(dtype=torch.bfloat16), dict(weights="int8"), dict(weights="int4")), ids=str
)
def test_memory_of_the_copied_vocabulary(ranks, tp, options, tmp_path):
    """In 4 bits, unless the model's own head has them."""
    directory = save_wide(tmp_path)

    def run(rank):
        model = load(directory, dist.group.WORLD, draft_head=True, **options)
        held = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
        bits = {None: 0, "int8": 8, "int4": 4}[options.get("weights")]
        return sum(held.values()), Memory(model.config, tp, model.dtype.itemsize, quantized_bits=bits).weights

    measured, formula = ranks(run, tp)[0]
    assert measured == formula


def test_a_model_without_one(tmp_path):
    hf_model("qwen3_5_text").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="config.json of this qwen3_5_text model declares no supported draft head"):
        load(tmp_path, draft_head=True)
