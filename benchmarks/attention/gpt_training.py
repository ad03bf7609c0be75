"""Training steps of a GPT by how its attention is spread over 4 to 16 ranks behind slow links (about 16 min; root).

The claims: the counted bytes of attention are those of `volume`, and all schedules give the loss of the ring. The times
of a step are shown relative to the ring, behind links of 20 mbit; they need a quiet machine. Two models of two layers of
width 128 (144 on 9 ranks), with 8 heads (9) of 16: Megatron's GPTModel, with `cp_comm_type` p2p, all_gather, a2a and 2d;
and ours, a Granite with attention in every layer. fp32, one sequence of 2,048 tokens (2,304 on 9 ranks). A step is
forward, backward, the sum of the gradients over the ranks, and AdamW. In each repetition all schedules run in turn. The
ring runs twice, and the difference of its two medians is the spread.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from attention2d import AllGather, Attention2D, Ring, Ulysses
from benchmarks.attention.grid_attention import point
from benchmarks.support.cells import cell_arguments, measured_cells, write_result
from benchmarks.support.context import VOCABULARY, bytes_on_wire, random_model
from benchmarks.support.tables import markdown, print_or_publish
from commfabric.collectives.counted import Counter, all_reduce
from commfabric.fabric.measurement import repetitions, timed

REPETITIONS, BURST, LAYERS, HEAD_DIM = 3, "16kb", 2, 16
MEGATRON, OURS = "Megatron's GPTModel", "ours"
SHOWN = ("all-gather", "Ulysses", "2-D", "3-D")
Arguments = dict[str, Any]  # of Attention2D


@dataclass(frozen=True)
class Cell:
    """A model on a number of ranks."""

    model: str
    ranks: int
    rate: str = "20mbit"

    @property
    def heads(self) -> int:
        """9 on 9 ranks, so that Ulysses is possible."""
        return 9 if self.ranks == 9 else 8

    @property
    def seq(self) -> int:
        """The length of the sequence, which twice the number of ranks divides."""
        return 256 * self.heads

    @property
    def shape(self) -> dict[str, int]:
        """The arguments of `volume`."""
        return dict(batch=1, seq=self.seq, heads=self.heads, kv_heads=self.heads, head_dim=HEAD_DIM, itemsize=4)


CELLS = [Cell(model, ranks) for model in (MEGATRON, OURS) for ranks in (4, 8, 9, 16)]


def contestants(cell: Cell, group: dist.ProcessGroup) -> dict[str, tuple[Attention2D, str, dict[str, int]]]:
    """{name: (schedule, Megatron's cp_comm_type for it, arguments of `core_attention`)} of all that fit the ranks."""
    found: dict[str, tuple[Attention2D, str, dict[str, int]]] = {
        "ring": (Ring(group), "p2p", {}),
        "ring again": (Ring(group), "p2p", {}),
        "all-gather": (AllGather(group), "all_gather", {}),
    }
    if cell.heads % cell.ranks == 0:
        found["Ulysses"] = (Ulysses(group), "a2a", {})
    for name, ulysses in (("2-D", 1), ("3-D", 2)):
        cells = cell.ranks // ulysses
        sides = [dict(rows=r, cols=cells // r, ulysses=ulysses) for r in range(2, cells) if cells % r == 0]
        if sides and cells * ulysses == cell.ranks:
            best = min((Attention2D(group, **side) for side in sides), key=lambda each: sent(each, cell))
            grid = dict(rows=best.grid.rows, cols=best.grid.cols, ulysses=ulysses)
            found[name] = (best, "2d", grid)
    return found


def sent(schedule: Attention2D, cell: Cell) -> int:
    """The bytes of attention that a rank sends in a step."""
    volume = schedule.volume(**cell.shape)
    return LAYERS * (volume.forward + volume.backward)


def megatron_loss(cell: Cell, kind: str, grid: dict[str, int]) -> tuple[Callable, torch.nn.Module, list[Attention2D]]:
    """A function from (inputs, labels) to this rank's share of the loss, the model, and the schedules of its layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import get_batch_on_this_cp_rank

    from megatron_ssm.integrations.specs import with_core_attention

    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HEAD_DIM * cell.heads, num_attention_heads=cell.heads,
        use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0, context_parallel_size=cell.ranks,
        cp_comm_type=kind, bias_dropout_fusion=False, masked_softmax_fusion=False, pipeline_dtype=torch.float32,
    )  # fmt: skip
    torch.manual_seed(0)
    spec = with_core_attention(get_gpt_layer_local_spec(), **grid)
    model = GPTModel(config, spec, VOCABULARY, cell.seq, position_embedding_type="learned_absolute")

    def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(cell.seq).unsqueeze(0)
        part = get_batch_on_this_cp_rank(dict(tokens=inputs, labels=labels, position_ids=positions))
        logits = model(part["tokens"], part["position_ids"], None)
        return F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="sum") / cell.seq

    return loss, model, [layer.self_attention.core_attention.schedule for layer in model.decoder.layers]


def our_loss(cell: Cell, schedule: Attention2D) -> tuple[Callable, torch.nn.Module, list[Attention2D]]:
    """As `megatron_loss`, with a model of this library."""
    width = HEAD_DIM * cell.heads
    model = random_model(
        schedule, model_type="granitemoehybrid", vocab_size=VOCABULARY, hidden_size=width, num_local_experts=0,
        shared_intermediate_size=8 * width // 3, num_hidden_layers=LAYERS, layers_block_type=["attention"] * LAYERS,
        num_attention_heads=cell.heads, num_key_value_heads=cell.heads, mamba_n_heads=cell.heads,
        position_embedding_type="rope",
    )  # fmt: skip

    def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model.loss(schedule.shard(inputs), schedule.shard(labels), seq=cell.seq)

    return loss, model, [schedule]


class Training:
    """One schedule's model, its optimizer, and what its steps send.

    Attributes:
        loss: of the last step, this rank's share.
        gradients: counts the bytes that sum the gradients.
    """

    def __init__(self, cell: Cell, schedule: Attention2D, kind: str, grid: dict[str, int]) -> None:
        made = megatron_loss(cell, kind, grid) if cell.model == MEGATRON else our_loss(cell, schedule)
        self._loss, model, self._schedules = made
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1e-4)
        self._seq, self._step = cell.seq, 0
        self.loss, self.gradients = torch.zeros(()), Counter()

    @property
    def sent(self) -> int:
        """The bytes of attention so far."""
        return sum(schedule.counter.sent for schedule in self._schedules)

    def step(self) -> None:
        """Train on one random sequence, the same on every rank and for every schedule."""
        self._step += 1
        generator = torch.Generator().manual_seed(self._step)
        ids = torch.randint(VOCABULARY, (1, self._seq + 1), generator=generator)
        self._optimizer.zero_grad()
        self.loss = self._loss(ids[:, :-1], ids[:, 1:])
        self.loss.backward()
        found = [parameter.grad for parameter in self._parameters]
        flat = torch.cat([gradient.flatten() for gradient in found])
        summed = all_reduce(flat, dist.group.WORLD, self.gradients)
        for gradient, total in zip(found, summed.split([each.numel() for each in found]), strict=True):
            gradient.copy_(total.view_as(gradient))
        self._optimizer.step()
        self.loss = self.loss.detach()


def measure(out: str, number: str) -> None:
    """Run one rank of cell number `number`. Rank 0 writes the result to `out`."""
    warnings.simplefilter("ignore")  # Megatron warns of every optional package
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cell, group = CELLS[int(number)], dist.group.WORLD
    if cell.model == MEGATRON:
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(context_parallel_size=cell.ranks)
    found = contestants(cell, group)
    runs = {name: Training(cell, *each) for name, each in found.items()}
    losses, counted, on_wire = {}, {}, {}
    for name, run in runs.items():
        dist.barrier()
        before = bytes_on_wire()
        run.step()
        on_wire[name] = bytes_on_wire() - before
        counted[name] = run.sent, run.gradients.sent
        losses[name] = all_reduce(run.loss, group).item()
        assert counted[name][0] == sent(found[name][0], cell), (name, counted[name], sent(found[name][0], cell))
    assert max(losses.values()) - min(losses.values()) < 1e-5, losses
    seconds = repetitions([timed(run.step) for run in runs.values()], group, "cpu", REPETITIONS, warm_up=False)
    if dist.get_rank() == 0:
        write_result(out, {
            "seconds": dict(zip(runs, seconds.median(0).values.tolist(), strict=True)),
            "counted": counted, "on_wire": on_wire,
            "grids": {name: point(schedule) for name, (schedule, _, _) in found.items()},
        })  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


def row(cell: Cell, measured: dict) -> list[str]:
    """A row of the table: how many times as fast as with a ring, and in brackets the megabytes that attention sends."""
    seconds, counted, wire = measured["seconds"], measured["counted"], measured["on_wire"]
    ring = seconds["ring"]

    def against(name: str) -> str:
        if name not in seconds:
            return ""
        grid = f" {measured['grids'][name]}" if name in ("2-D", "3-D") else ""
        return f"{ring / seconds[name]:.2f}x ({counted[name][0] / 1e6:.2f} MB){grid}"

    return [
        f"{cell.model}, {cell.ranks}", f"{counted['ring'][1] / 1e6:.2f} MB",
        f"{counted['ring'][0] / 1e6:.2f} MB ({wire['ring'] / 1e6:.2f}), {ring:.2f} s", *map(against, SHOWN),
        f"{seconds['2-D']:.2f} s", f"{abs(seconds['ring again'] / ring - 1):.0%}",
    ]  # fmt: skip


def main() -> None:
    """Measure all cells and publish the table; or measure and print those whose numbers are arguments."""
    results = measured_cells(__file__, CELLS, burst=BURST)
    header = ["model, ranks", "gradients", "ring: attention (all, on the wire)", *SHOWN, "2-D: a step", "spread"]
    print_or_publish("gpt-training", markdown(header, [row(cell, measured) for cell, measured in results.items()]))
    if sys.argv[1:]:
        print(results)


if __name__ == "__main__":
    arguments = cell_arguments()
    main() if arguments is None else measure(*arguments)
