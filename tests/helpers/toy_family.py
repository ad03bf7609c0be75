"""A family in one file: an operator whose state rotates, beside attention with one key/value head, in one unit."""

from dataclasses import dataclass

import torch

from affine_states import entering_states
from megatron_ssm.layers import AttentionSpec, Operator, Partial, State
from megatron_ssm.layers.families.common import layer_count, stack_of
from megatron_ssm.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_ssm.spec import Family, Field, Norm, Part, Sizes, Spec, Unit, packed, row_parallel


@dataclass(frozen=True)
class RotorSpec(Spec):  # S_t = A_t S_{t-1} + k_t v_t^T, A_t = tanh(decay) * rotation(angle_t); y_t = q_t^T S_t
    hidden_size: int
    heads: int
    head_dim: int

    def rows(self, ranks=1):
        return {name: size * self.heads // ranks for name, size in dict(q=2, k=2, v=self.head_dim, angle=1).items()}

    def fields(self):
        yield from packed("in_proj", self.rows(), dict.fromkeys(self.rows(), self.heads), (self.hidden_size,))
        yield Field("decay", "decay", (2, 2))
        yield from row_parallel("out_proj", (self.hidden_size, self.heads * self.head_dim), self.heads)

    def build(self, place):
        return Rotor(self, place)

    def sizes(self, work):
        state = 2 * self.rows(work.ranks)["v"]
        return Sizes(state=state * work.itemsize, parameters=(4,) if work.ranks > 1 else (), passed=state)


class Rotor(Operator):
    def __init__(self, spec, place):
        super().__init__(place)
        self.heads, self.rows = spec.heads // place.ranks.size, spec.rows(place.ranks.size)
        self.in_proj = ColumnParallelLinear(spec.hidden_size, self.rows, False, place.ranks, **place.where)
        self.decay = torch.nn.Parameter(torch.empty(2, 2, **place.where))
        self.out_proj = RowParallelLinear(self.rows["v"], spec.hidden_size, False, place.ranks, **place.where)

    def new_state(self, batch):
        shape = batch, self.heads, 2, self.rows["v"] // self.heads
        return State(dict(state=torch.zeros(shape, dtype=self.decay.dtype)))

    def mix(self, projected, call, state=None):
        first, sharding = None if state is None else state["state"][call.rows], call.sharding
        real = call.mask if sharding is None else sharding.mask_padding(torch.ones_like(projected[..., :1]))
        q, k, v, angle = (t.unflatten(-1, (self.heads, -1)) for t in projected.split(list(self.rows.values()), dim=-1))
        turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2)).squeeze(-3)
        A = torch.tanh(self.copied(self.decay)) * turn
        if real is not None:  # padding leaves the state as it is
            k, A = k * real.unsqueeze(-1), A.where(real[..., None, None] > 0, torch.eye(2, dtype=A.dtype))
        if sharding is None:
            y, last, _ = scan(q, k, v, A, first)
        else:
            blocks = [self.context.to_blocks(t) for t in (q, k, v, A)]
            _, final, transition = scan(*blocks)
            entering, last = entering_states(transition, final, self.context, first)
            y = self.context.from_blocks(scan(*blocks, entering)[0])
        if state is not None:
            state.update(call.rows, state=last)
        return Partial(self.out_proj(y.flatten(2)))


def scan(q, k, v, A, S=None):
    S = v.new_zeros(len(v), v.shape[2], 2, v.shape[3]) if S is None else S
    whole, outputs = torch.eye(2, dtype=v.dtype).expand(len(v), v.shape[2], 2, 2), []
    for t in range(v.shape[1]):
        S, whole = A[:, t] @ S + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2), A[:, t] @ whole
        outputs.append((q[:, t].unsqueeze(-2) @ S).squeeze(-2))
    return torch.stack(outputs, 1), S, whole


def read(fields):
    hidden, eps = fields.positive("hidden_size"), fields.number("layer_norm_epsilon")
    rotor = RotorSpec(hidden, fields.positive("rotor_heads"), 3)
    attention = AttentionSpec(hidden, fields.positive("num_attention_heads"), 1, 4, rope_theta=100.0, rope_size=2)
    layers = []
    for path in (f"model.layers.{i}." for i in range(layer_count(fields))):
        parts = Part("rotor", rotor, path + "rotor."), Part("attention", attention, path + "attn.", output_scale=0.5)
        layers.append((Unit(parts, Norm("norm", path + "norm.weight", eps)),))
    return stack_of(fields, layers)


SIZES = dict(vocab_size=61, hidden_size=16, num_hidden_layers=3, rotor_heads=4, num_attention_heads=4)
TOY = Family("toy", read, SIZES | dict(layer_norm_epsilon=1e-5, tie_word_embeddings=False))
