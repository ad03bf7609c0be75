"""Tiny training runs in float32, in DeepSpeed's engine or in torch's, which is the oracle of the others."""

import functools
import json

import torch

import tiny

FP32 = 1e-5  # of losses about 4 and gradient norms about 1
MODELS = {
    "mamba2": {},
    "mamba untied": dict(model_type="mamba", untie_embeddings_and_output_weights=True),
    "mamba2 groups": dict(mamba_num_groups=2),
}
DIVIDED = dict(  # small enough to divide the tensors of tiny models
    stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=500, sub_group_size=3000, reduce_bucket_size=2000
)  # fmt: skip


def run_of(stage, **changes):
    """The options of a tiny run: `stage` of ZeRO, or torch's engine.

    Writes DeepSpeed's configuration to `folder`; config: its other sections; zero: more of the section zero_optimization.
    """
    changes = dict(params_dtype="float32", micro_batch_size=1) | changes
    if stage == "torch":
        return tiny.options(**changes)
    zero = {"stage": stage, **{key: size for key, size in DIVIDED.items() if stage == 3 or "3" not in key}}
    config = {"zero_optimization": zero | changes.pop("zero", {}), **changes.pop("config", {})}
    path = changes.pop("folder") / f"zero-{stage}.json"
    path.write_text(json.dumps(config))
    return tiny.options(**changes, engine="deepspeed", deepspeed_config=str(path))


@functools.cache
def one_rank(model):
    """The curve of torch's engine on one rank, with the whole batch at once."""
    run = run_of("torch", **MODELS[model], micro_batch_size=4)
    curve = tiny.curve(tiny.trainer(run), 10)
    assert (curve[1] > run.clip_grad).all(), "clipping was not active"
    return curve


def close(ours, oracle, limit=FP32):
    """Whether losses agree within `limit`, and gradient norms, the second row if there is one, within three times that."""
    limits = torch.tensor([limit, 3 * limit])[: len(oracle), None] if oracle.dim() == 2 else limit
    return bool(((ours - oracle).abs() <= limits).all())
