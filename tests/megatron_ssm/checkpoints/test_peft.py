"""LoRA adapters. Oracle: PEFT on transformers' models, in float64."""

import copy
import json
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from chosen import by_default
from gradients import assert_near, shifted
from safetensors.torch import load_file, save_file

import megatron_ssm
from cases import assemble
from hf import assert_same_bytes, hf_model, precisely, tensors_in
from megatron_ssm import families
from megatron_ssm.checkpoints.peft import CONFIG, WEIGHTS
from megatron_ssm.model.lora import lora_targets

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

EXACT, RANK, ALPHA = 5e-11, 3, 6
FEW = ("mamba", "mamba2-2-groups", "zamba2", "granite", "qwen3.5")
FUSED = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")  # whose fused CUDA kernels call no out_proj
CASES = {
    "mamba": ("mamba", dict(use_bias=True), "in_proj x_proj out_proj"),
    "falcon": ("falcon_mamba", {}, "in_proj x_proj"),
    "mamba2-1-group": ("mamba2", dict(n_groups=1), "in_proj out_proj"),
    "mamba2-2-groups": ("mamba2", dict(n_groups=2, use_bias=True), "in_proj out_proj"),
    "zamba": ("zamba", {}, "in_proj out_proj q_proj v_proj o_proj up_proj down_proj linear"),
    "zamba2": (
        "zamba2",
        dict(mamba_ngroups=2, use_shared_attention_adapter=True, use_mem_rope=True, add_bias_linear=True),
        "in_proj out_proj q_proj k_proj v_proj o_proj gate_up_proj down_proj linear",
    ),
    "nemotron": ("nemotron_h", dict(num_key_value_heads=1), "in_proj out_proj q_proj v_proj o_proj up_proj down_proj"),
    "granite": ("granitemoehybrid", dict(attention_bias=True), "in_proj k_proj v_proj input_linear output_linear"),
    "falcon-h1": ("falcon_h1", dict(mamba_rms_norm=True), "in_proj out_proj k_proj o_proj gate_proj down_proj"),
    "jamba": ("jamba", {}, "in_proj x_proj out_proj q_proj o_proj up_proj"),
    "qwen3.5": (
        "qwen3_5_text",
        {},
        "in_proj_qkv in_proj_z in_proj_b in_proj_a out_proj q_proj k_proj o_proj down_proj",
    ),
    "olmo": ("olmo_hybrid", {}, "q_proj k_proj g_proj a_proj o_proj v_proj up_proj"),
}


class Case:
    """A transformers model in float64 with PEFT's adapters; the directories of both, its logits, loss and gradients."""

    def __init__(self, family, changes, targets, directory, adapters):
        self.directory, self.adapters, self.targets = directory, adapters, targets.split()
        if family.startswith("zamba"):
            changes = changes | dict(layers_block_type=["linear_attention", "hybrid", "hybrid"])
        model = hf_model(family, dtype=torch.float64, **changes | dict(num_hidden_layers=3))
        model.save_pretrained(directory)
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=self.targets)
        with precisely(torch.float64):
            self.model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        generator = torch.Generator().manual_seed(1)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for parameter in trained.values():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        self.model.save_pretrained(adapters)
        self.ids = torch.randint(61, (2, 30), generator=generator)
        inputs, labels = shifted(self.ids)
        with precisely(torch.float64):
            self.logits = self.model(inputs, use_cache=False).logits
            self.loss = F.cross_entropy(self.logits.flatten(0, 1), labels.flatten())
            self.loss.backward()
        self.gradients = {name.replace(".default", ""): p.grad for name, p in trained.items()}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """case(name): a `Case`. PEFT refuses out_proj in Mamba models, because fused CUDA kernels would not call it."""
    made = {}

    def get(name):
        if name not in made:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(peft.tuners.tuners_utils, "_check_lora_target_modules_mamba", lambda *_: None)
                made[name] = Case(*CASES[name], tmp_path_factory.mktemp(name), tmp_path_factory.mktemp("adapters"))
        return made[name]

    return get


def load(case, trainable=True, **options):
    """Our model on the default group, with the case's adapters."""
    model = megatron_ssm.load(case.directory, dist.group.WORLD, dtype=torch.float64, **options)
    megatron_ssm.load_lora(model, case.adapters, trainable)
    return model


def fields_of(config):
    """The layout of adapters beside all linear layers."""
    return [field for target in lora_targets(config).values() for field in target.fields(RANK)]


def run(case, **options):
    """(loss, {name: gradient}, logits) on one rank; only adapters have gradients."""
    model = load(case, **options)
    inputs, labels = shifted(case.ids)
    loss = model.loss(inputs, labels)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(".lora." in name for name in found)
    with torch.no_grad():
        return loss.detach(), found, model(inputs)


@pytest.mark.parametrize("tp", by_default((2,), (1, 2, 4)))
@pytest.mark.parametrize("name", by_default((*FEW, "zamba", "nemotron", "falcon-h1", "jamba"), CASES))
def test_peft_adapters_have_the_same_loss_and_gradients(ranks, name, tp, case):
    check(case(name), ranks(lambda rank: run(case(name)), tp))


@pytest.mark.parametrize("tp", by_default((2,), (2, 4)))
@pytest.mark.parametrize("name", ("mamba", "mamba2-1-group", "mamba2-2-groups", "zamba2"))
def test_with_sequence_parallelism_and_recomputation(ranks, name, tp, case):
    check(case(name), ranks(lambda rank: run(case(name), sequence_parallel=True, recompute=True), tp))


def check(case, results):
    """Assert that loss, logits and all gradients are those of PEFT."""
    for loss, _, logits in results:
        torch.testing.assert_close(loss, case.loss.detach(), rtol=EXACT, atol=0)
        torch.testing.assert_close(logits, case.logits.detach(), rtol=EXACT, atol=EXACT)
    fields = [field for field in fields_of(families.read(case.directory)) if field.name in results[0][1]]
    assert_near(assemble(fields, [found for _, found, _ in results]), case.gradients, EXACT)


@pytest.mark.parametrize("tp", by_default((2,), (1, 2, 4)))
@pytest.mark.parametrize("name", by_default(FEW, CASES))
def test_saved_adapters_are_those_of_peft(ranks, name, tp, case, tmp_path):
    """Byte for byte, and PEFT loads them with the same logits."""
    case = case(name)
    ranks(lambda rank: megatron_ssm.save_lora(load(case), tmp_path), tp)
    assert_same_bytes(load_file(tmp_path / WEIGHTS), load_file(case.adapters / WEIGHTS))
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, WEIGHTS]
    with pytest.MonkeyPatch.context() as patched, precisely(torch.float64):
        patched.setattr(peft.tuners.tuners_utils, "_check_lora_target_modules_mamba", lambda *_: None)
        model = type(case.model.get_base_model()).from_pretrained(case.directory, dtype=torch.float64).eval()
        again = peft.PeftModel.from_pretrained(model, tmp_path, autocast_adapter_dtype=False)
        with torch.no_grad():
            logits = again(shifted(case.ids)[0], use_cache=False).logits
    exact = 1e-6 if name == "falcon-h1" else EXACT  # from_pretrained rounds the constants of its mixers to float32
    torch.testing.assert_close(logits, case.logits.detach(), rtol=exact, atol=exact)


@pytest.mark.parametrize("tp", by_default((2,), (1, 2, 4)))
@pytest.mark.parametrize("name", ("mamba", "mamba2-2-groups"))
def test_merged_weights_are_those_of_peft(ranks, name, tp, case, tmp_path):
    case = case(name)

    def merge(rank):
        model = load(case)
        megatron_ssm.merge_lora(model)
        assert model.lora is None and all(p.requires_grad for p in model.parameters())
        megatron_ssm.save(model, tmp_path / "ours")

    ranks(merge, tp)
    merged = copy.deepcopy(case.model).merge_and_unload()
    merged.save_pretrained(tmp_path / "theirs")
    ours, theirs = tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[tensor], theirs[tensor], rtol=1e-14, atol=1e-14) for tensor in ours)


@pytest.mark.parametrize("tp", by_default((2,), (1, 2)))
@pytest.mark.parametrize("name", by_default(FEW, CASES))
def test_generation_with_adapters(ranks, name, tp, case):
    """The native decoding of the base model has run before, and copied from it."""
    case = case(name)

    def generate(rank):
        model = megatron_ssm.load(case.directory, dist.group.WORLD, dtype=torch.float32)
        base = megatron_ssm.generate(model, case.ids[:, :5], max_new_tokens=8)
        cache = model.new_cache(2, 40)
        with torch.no_grad():
            model(case.ids[:, :4], cache=cache), model(case.ids[:, 4:5], cache=cache)
            megatron_ssm.load_lora(model, case.adapters)
            steps = [model(case.ids[:, [i]], cache=cache) for i in range(5, 8)]
        adapted = megatron_ssm.load(case.directory, dist.group.WORLD, dtype=torch.float32)
        megatron_ssm.load_lora(adapted, case.adapters)
        fresh = adapted.new_cache(2, 40)
        with torch.no_grad():
            whole = adapted(case.ids[:, :29])
            decoded = [adapted(case.ids[:, :27], cache=fresh), adapted(case.ids[:, 27:28], cache=fresh)]
        return base, steps, whole, decoded[1][:, -1]

    for base, steps, whole, decoded in ranks(generate, tp):
        assert base.shape == (2, 8) and all(step.isfinite().all() for step in steps)
        torch.testing.assert_close(decoded.double(), whole[:, 27].double(), rtol=1e-3, atol=3e-3)
        torch.testing.assert_close(whole.double(), case.logits.detach(), rtol=1e-3, atol=3e-3)


@pytest.mark.parametrize("tp", by_default((2,), (1, 2, 4)))
def test_new_adapters(ranks, tp, case):
    """They change nothing at first, have the same values on any number of ranks, and survive a copy; then only they move."""
    case = case("mamba2-2-groups")
    inputs, labels = shifted(case.ids)

    def train(rank):
        model = megatron_ssm.load(case.directory, dist.group.WORLD, dtype=torch.float64)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        first = model.loss(inputs, labels).detach()
        megatron_ssm.add_lora(model, RANK, ALPHA, ["in_proj", "backbone.layers.1.mixer.out_proj"], seed=4)
        model = copy.deepcopy(model)
        assert torch.equal(model.loss(inputs, labels), first)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model.loss(inputs, labels)
            loss.backward()
            optimizer.step()
        assert loss < first and all(torch.equal(before[n], p) for n, p in model.named_parameters() if n in before)
        return {name: p.detach() for name, p in model.named_parameters() if name not in before}

    results = ranks(train, tp)
    fields = fields_of(families.read(case.directory))
    found = assemble([field for field in fields if field.name in results[0]], results)
    assert len(found) == 2 * (3 + 1)
    for name, tensor in assemble([f for f in fields if f.name in results[0]], ranks(train, 1)).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ("mamba", "mamba2-2-groups"))
def test_factors_over_bfloat16_are_float32(name, case):
    """As PEFT's: each sum is rounded once, so that a layer's outputs are bitwise equal; also after merging."""
    case = case(name)
    model = megatron_ssm.load(case.directory, dtype=torch.bfloat16)
    megatron_ssm.load_lora(model, case.adapters)
    assert {p.dtype for n, p in model.named_parameters() if ".lora." in n} == {torch.float32}
    theirs = type(case.model.get_base_model()).from_pretrained(case.directory, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        patched.setattr(peft.tuners.tuners_utils, "_check_lora_target_modules_mamba", lambda *_: None)
        theirs = peft.PeftModel.from_pretrained(theirs, case.adapters).get_base_model()
        x = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
        ours, weight = model.layers[0].mixer, theirs.backbone.layers[0].mixer.in_proj.base_layer.weight.clone()
        product = ours.lora["in_proj"].product()
        out = ours.project(x)
        torch.testing.assert_close(out, theirs.backbone.layers[0].mixer.in_proj(x), rtol=0, atol=0)
        megatron_ssm.merge_lora(model)
        assert torch.equal(ours.in_proj.weight(), (weight + product).bfloat16())


@pytest.mark.parametrize("dp", (1, 2))
@pytest.mark.parametrize(
    "family", sorted({family for family, _, names in CASES.values() if "in_proj" in names.split()})
)
@pytest.mark.parametrize("target", ("in_proj", "out_proj"))
def test_a_line_names_what_peft_refuses(ranks, family, target, dp, caplog):
    """Once, on the first rank, exactly where PEFT does not take this target of this family."""
    theirs, config = hf_model(family), peft.LoraConfig(target_modules=[target])
    try:
        peft.get_peft_model(theirs, config)
        expected = []
    except ValueError:
        expected = [
            f"PEFT does not load adapters of out_proj into {family} models: leave this target out, or merge the adapters "
            "(merge_lora) and save the model"
        ]

    def add(rank):
        model = megatron_ssm.build(families.from_dict(theirs.config.to_dict()), data_group=dist.group.WORLD)
        megatron_ssm.add_lora(model, RANK, ALPHA, ["in_proj", target])
        return [record.message for record in caplog.records]

    assert ranks(add, dp) == [expected] + [[]] * (dp - 1)
    assert bool(expected) == (target == "out_proj" and family in FUSED)


@pytest.mark.parametrize("tp", by_default((2,), (2, 4)))
@pytest.mark.parametrize("name", ("mamba", "mamba2-1-group", "zamba"))
def test_no_activations_are_sent_for_adapters(ranks, name, tp, case):
    """What adapters add to a step does not depend on the number of tokens: the gradients of A or B."""
    case = case(name)

    def sent(adapters, tokens):
        model = megatron_ssm.load(case.directory, dist.group.WORLD, dtype=torch.float64)
        if adapters:
            megatron_ssm.add_lora(model, RANK, ALPHA, case.targets)
            model.embeddings.weight.requires_grad_(True)  # so that gradients flow through all layers in both models
        before = model.counter.nbytes
        model.loss(case.ids[:, :tokens], case.ids[:, 1 : tokens + 1]).backward()
        return model.counter.nbytes - before

    def run(rank):
        long, short = (sent(True, tokens) - sent(False, tokens) for tokens in (24, 12))
        return long, short

    for long, short in ranks(run, tp):
        assert long == short != 0


REFUSED = {
    "peft_type='IA3' is not implemented": lambda raw: raw.update(peft_type="IA3"),
    "use_dora=True is not implemented": lambda raw: raw.update(use_dora=True),
    "rank_pattern={'in_proj': 8} is not implemented": lambda raw: raw.update(rank_pattern={"in_proj": 8}),
    "r=0 must be a positive and finite number": lambda raw: raw.update(r=0),
    "lora_alpha=inf must be a positive and finite number": lambda raw: raw.update(lora_alpha=float("inf")),
    r"in_proj.lora_A.weight is \(3, 32\), and with r=4 the model needs \(4, 32\)": lambda raw: raw.update(r=4),
}


@pytest.mark.parametrize("tp", by_default((2,), (1, 2)))
def test_what_is_refused(ranks, tp, case, tmp_path):
    case, zamba = case("mamba2-2-groups"), case("zamba")
    tensors, raw = (
        load_file(case.adapters / WEIGHTS),
        (case.adapters / CONFIG).read_text(),
    )
    for index, change in enumerate(REFUSED.values()):
        values = json.loads(raw)
        change(values)
        directory = tmp_path / str(index)
        directory.mkdir()
        (directory / CONFIG).write_text(json.dumps(values))
        save_file(tensors, directory / WEIGHTS)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / CONFIG).write_text(raw)
    (tmp_path / "cut" / WEIGHTS).write_bytes(b"x" * 20)

    def refuse(rank):
        model = megatron_ssm.load(case.directory, dist.group.WORLD)
        for index, message in enumerate(REFUSED):
            with pytest.raises(ValueError, match=message):
                megatron_ssm.load_lora(model, tmp_path / str(index))
        with pytest.raises(ValueError, match="is not a complete safetensors file"):
            megatron_ssm.load_lora(model, tmp_path / "cut")
        with pytest.raises(FileNotFoundError, match="adapter_config.json"):
            megatron_ssm.load_lora(model, tmp_path)
        with pytest.raises(
            ValueError, match="mamba.in_proj.lora_A.weight is not for a linear layer of this mamba2 model"
        ):
            megatron_ssm.load_lora(model, zamba.adapters)
        with pytest.raises(ValueError, match="a mamba2 model has the linear layers in_proj, out_proj"):
            megatron_ssm.add_lora(model, 2, 2, ["q_proj"])
        with pytest.raises(ValueError, match="has no LoRA adapters"):
            megatron_ssm.merge_lora(model)
        with pytest.raises(ValueError, match="has no LoRA adapters"):
            megatron_ssm.save_lora(model, tmp_path / "none")
        assert model.lora is None and all(p.requires_grad for p in model.parameters())
        megatron_ssm.add_lora(model, 2, 2, ["in_proj"])
        with pytest.raises(ValueError, match="already has LoRA adapters of rank 2"):
            megatron_ssm.load_lora(model, case.adapters)
        with pytest.raises(ValueError, match=r"saved after merge_lora\(model\)"):
            megatron_ssm.save(model, tmp_path / "none")
        with pytest.raises(ValueError, match="shared.0.qkv.weight.q is shared by several layers"):
            megatron_ssm.merge_lora(load(zamba))
        assert not (tmp_path / "none").exists()

    ranks(refuse, tp)
