"""Tiny training runs in float64, on one rank or on any layout of ranks, for the tests of training."""

import warnings

import torch
import torch.distributed as dist

import hf
from megatron_ssm import families
from megatron_ssm.checkpoints.training import Snapshot
from megatron_ssm.parallel.groups import Groups, initialize
from megatron_ssm.train.batches import Batches, Tokens
from megatron_ssm.train.deepspeed_settings import read_settings
from megatron_ssm.train.options import Options
from megatron_ssm.train.pretraining import make_model, make_trainer
from megatron_ssm.train.trainer import Trainer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.parallel_state  # noqa: F401  (seconds, once here instead of in every forked rank)

ZAMBA = dict(model_type="zamba", mamba_head_dim=16, hybrid_interval=1, num_layers=2)  # 2 mamba heads
ZAMBA2 = dict(model_type="zamba2", hybrid_interval=1, num_layers=2, adapter_rank=3)
# The first and the third invocation use the same block. Untied, each contains unused adapters for the other. With RUN's
# lr, rounding errors would grow tenfold per step.
ZAMBA2_UNTIED = dict(
    ZAMBA2, mamba_num_groups=2, num_layers=3, shared_blocks=2, untie_embeddings_and_output_weights=True, lr=1e-3
)
NEMOTRON = dict(hybrid_override_pattern="M*-M", mamba_num_groups=2, num_query_groups=2)
# {model type: config.json} of families that cannot be made from options
RAW = {
    name: hf.CONFIGS[name][0](**hf.SMALL | hf.CONFIGS[name][1] | changes).to_dict()
    for name, changes in {
        "granitemoehybrid": dict(layer_types=["full_attention", "linear_attention"]),
        "bamba": dict(mamba_n_groups=1),
        "falcon_h1": dict(mamba_rms_norm=True, mamba_n_groups=1),
        "jamba": {},
    }.items()
    for changes in [changes | dict(hidden_size=16, num_hidden_layers=2, mamba_d_state=4)]
    for changes in [changes if name == "jamba" else changes | dict(mamba_n_heads=4, mamba_d_ssm=32)]
}
MIXED = dict(hidden_size=16, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
RAW |= {
    name: hf.CONFIGS[name][0](**hf.SMALL | hf.CONFIGS[name][1] | MIXED).to_dict()
    for name in ("qwen3_5_text", "olmo_hybrid", "qwen3_5_moe_text")
}
SIGMOID_EXPERTS = dict(
    hidden_size=16, layers_block_type=["moe", "linear_attention"], n_routed_experts=4, moe_intermediate_size=8, n_group=2,
    moe_shared_expert_intermediate_size=12, moe_latent_size=10, routed_scaling_factor=1.5, vocab_size=61,
)  # fmt: skip
RAW["nemotron_h"] = hf.CONFIGS["nemotron_h"][0](**hf.CONFIGS["nemotron_h"][1] | SIGMOID_EXPERTS).to_dict()
STEPS = 6  # of a run's 20, those that a curve shows: three of warm-up, and three of the decay
VOCAB = 61  # not divisible: 31 + 30 on two ranks, 16 + 16 + 16 + 13 on four
RUN = dict(
    num_layers=2, hidden_size=16, mamba_state_dim=4, mamba_head_dim=4, seq_length=12, micro_batch_size=2,
    global_batch_size=4, train_iters=20, lr=1e-2, lr_warmup_iters=3, clip_grad=0.5, params_dtype="float64", seed=7,
)  # fmt: skip


def options(**changes) -> Options:
    """The options of a tiny Mamba-2 run of 20 steps in which every gradient is clipped, with `changes`."""
    return Options(**{**RUN, **changes})


def stream(vocab=VOCAB, tokens=400) -> Tokens:
    """Tokens that can be learned: most of them are a function of the previous one."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randint(vocab, (tokens,), generator=generator)
    ids = [0]
    for step in noise.tolist():
        ids.append(step if step % 4 == 0 else (3 * ids[-1] + 1) % vocab)
    return Tokens(torch.tensor(ids), len(ids))


def batches(run: Options, vocab=VOCAB) -> Batches:
    """The batches of a run."""
    return Batches(stream(vocab), run.seq_length, run.global_batch_size, run.seed)


def trainer(run: Options, groups: Groups = None, vocab=VOCAB, device="cpu") -> Trainer:
    """A trainer of a new model over these groups (None: one rank), with the run's engine."""
    groups = groups or Groups()
    config = families.from_dict(RAW[run.model_type] if run.model_type in RAW else run.new_config(vocab, 0))
    is_deepspeed = run.engine == "deepspeed"
    settings = read_settings(run, groups.data_ranks, config.hidden_size) if is_deepspeed else None
    return make_trainer(make_model(run, config, groups, torch.device(device)), groups, run, settings)


def curve(trainer: Trainer, steps=STEPS, start=0, vocab=VOCAB) -> torch.Tensor:
    """(2, steps - start) float64: loss and gradient norm of each step."""
    data = batches(trainer.options, vocab)
    results = [trainer.step(data, step) for step in range(start, steps)]
    return torch.tensor([[r.loss, r.grad_norm] for r in results], dtype=torch.float64).T


def trainer_on(tp, run: Options, vocab=VOCAB, device="cpu") -> Trainer:
    """A trainer on the calling rank; each replica is split over `tp` x run.context_parallel_size ranks."""
    sizes = dict(context=run.context_parallel_size, expert=run.expert_model_parallel_size)
    groups = initialize(tp, device, **sizes) if dist.is_initialized() else None
    return trainer(run, groups, vocab, device)


def rounding_differently(trainer: Trainer) -> Trainer:
    """The trainer; each tensor-parallel rank gets slightly other gradients of what several of them hold.

    So do ranks with different numbers of threads, or on different processors.
    """
    ranks = trainer.model.ranks
    error = 1e-4 * ranks.rank
    for parameter in trainer.model.parameters():
        if parameter.requires_grad and parameter.field.copies(ranks.size) > 1:
            parameter.register_hook(lambda gradient: gradient + error)
    return trainer


def pieces(trainer: Trainer) -> dict:
    """{name: this rank's piece} of every parameter."""
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def assembled(per_rank: list, fields, tp: int, ep: int = 1) -> dict:
    """{name: whole tensor} from every rank's pieces; pieces that several ranks hold must be bitwise equal.

    Fields without pieces are left out: idle parameters have neither gradients nor moments.
    """
    wholes = {}
    idle = [field.name for field in fields if field.name not in per_rank[0]]
    assert all(".idle." in name or name.endswith(".correction") for name in idle)
    for field in (field for field in fields if field.name in per_rank[0]):
        whole = torch.full(field.shape, float("nan"), dtype=per_rank[0][field.name].dtype)
        for rank, rank_pieces in enumerate(per_rank):
            index = field.piece(rank % tp, tp, rank // tp % ep, ep)
            known = not whole[index].isnan().all()
            assert not known or torch.equal(whole[index], rank_pieces[field.name]), (
                f"{field.name} differs on rank {rank}"
            )
            whole[index] = rank_pieces[field.name]
        assert not whole.isnan().any(), f"nobody holds a part of {field.name}"
        wholes[field.name] = whole
    return wholes


def continued(ranks, folder, before, after, tp, dp, steps):
    """The curve of steps 3 to `steps` under the options `after`, on `dp` ranks.

    Its checkpoint is that of a run under the options `before`, on tp x dp ranks, written after an evaluation.
    """

    def begin(rank):
        trainer = trainer_on(tp, before)
        curve(trainer, 3)
        trainer.evaluate(stream())
        Snapshot.of(folder, 3, trainer.model, trainer.checkpoint_state(), {}).write()

    def go_on(rank):
        trainer = trainer_on(1, after)
        trainer.load(folder / "step-000003", 3)
        return curve(trainer, steps, start=3)

    ranks(begin, tp * dp)
    return ranks(go_on, dp)[0]
