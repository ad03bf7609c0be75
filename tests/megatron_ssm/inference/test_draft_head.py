"""The draft head of Qwen3.5's checkpoints. Oracles: transformers' MtpModel, and decoding without it."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from hf import Float64, hf_model, tensors_in
from megatron_ssm import Engine, load, save
from megatron_ssm.sizing.memory import Memory

VOCAB, SEQ = 61, 20
NAMES = {
    "layers.0.enorm": "pre_fc_norm_embedding", "layers.0.hnorm": "pre_fc_norm_hidden", "layers.0.eh_proj": "fc",
    "layers.0.post_norm": "norm", "layers.0.mtp_block": "layers.0",
}  # fmt: skip
IDS = torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """(directory of a model with a draft head, the head's hidden states for IDS in float64)."""
    directory = tmp_path_factory.mktemp("shipped")
    changes = dict(num_hidden_layers=4, num_mtp_layers=1, mtp_layer_types=["full_attention"], vocab_size=VOCAB)
    model = hf_model("qwen3_5_text", dtype=torch.float64, **changes)
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


def on_rank(directory, **options):
    """The model of this rank, in float64."""
    return load(directory, dist.group.WORLD, dtype=torch.float64, **options)


@pytest.mark.parametrize("tp", (1, 2, 4))
@torch.no_grad()
def test_hidden_states(ranks, tp, shipped):
    """All tokens at once, and in pieces with a cache, from the hidden states that the model's cache keeps."""
    directory, expected = shipped

    def run(rank):
        model = on_rank(directory, draft_head=True)
        cache = model.new_cache(2)
        model.next_logits(IDS[:, :7], cache=cache, prompt=True)
        for t in range(7, SEQ):
            model.next_logits(IDS[:, t : t + 1], cache=cache)
        hidden = cache.states["final"].per_token["hidden"][:, : SEQ - 1]
        embeddings, positions = model.embedded(IDS[:, 1:]), torch.arange(1, SEQ).expand(2, -1)
        whole, own = model.draft_head(embeddings, hidden, positions), model.new_cache(2)
        pieces = [
            model.draft_head(*(t[:, piece] for t in (embeddings, hidden, positions)), own)
            for piece in (slice(0, 5), slice(5, 6), slice(6, SEQ - 1))
        ]
        return whole, torch.cat(pieces, 1)

    for found in ranks(run, tp):
        for tensor in found:
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-10)


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
    monkeypatch.setattr("megatron_ssm.inference.speculation.FIRST_RATES", (0.95, 0.95))
    monkeypatch.setattr("megatron_ssm.inference.speculation.FORGOTTEN", 1.0)  # so that wrong guesses are tried again

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


def test_a_model_without_one(tmp_path):
    hf_model("qwen3_5_text").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="config.json of this qwen3_5_text model names no draft head"):
        load(tmp_path, draft_head=True)
