"""Measures this machine as a device: times parts of a model on all ranks that will compute at the same time.

A tensor-parallel rank of P computes as much as a single rank with a model of 1/P of the width. Such a model is built with
random weights, with one and with a few layers, and timed without messages; the time of all layers is extrapolated from it.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from attention2d.compute.tile import attend
from commfabric import Fabric
from commfabric.collectives.counted import all_reduce
from commfabric.collectives.shared_memory import connect
from commfabric.fabric.curve import Curve
from commfabric.fabric.measurement import repetitions, timed
from megatron_ssm.engine.generation import stream
from megatron_ssm.kernels import fused_adam
from megatron_ssm.model.initialization import draw
from megatron_ssm.model.memory import Memory
from megatron_ssm.model.model import Model
from megatron_ssm.parallel.ranks import Ranks
from megatron_ssm.parallel.summaries import selective_adjoint, selective_summary, ssd_adjoint, ssd_summary
from megatron_ssm.parallel.tracked import changed
from megatron_ssm.spec.fields import field_of
from megatron_ssm.spec.sizes import RecurrenceSizes
from megatron_ssm.spec.stack import Stack
from megatron_ssm.train.gradients import clip_gradients, grad_norm

from .traffic import Sums

REPEATED = 3  # number of timed runs after a warm-up; their median is used
LAYERS = (1, 4)  # numbers of layers of the timed models
KEPT = len(LAYERS) + 1  # number of models kept for further timings: drawing weights takes longer than a run
FIRST, NEW = 2, 4  # decoded tokens before the timed ones, for which CUDA graphs are captured; timed tokens
TURNS = 10  # turns of computing and sending, or calls, that are timed together: a barrier takes longer than one call
PRODUCTS = 4  # products of a matrix and a vector in a turn, which take about as long as a layer for a token
SIZES = [1 << bits for bits in range(8, 23, 2)]  # bytes of the timed sums in shared memory
BACKWARD_ATTENTION = 2.5  # attention has 5 products of matrices in backward and 2 in forward


def part_of(config: Stack, ranks: int, device: torch.device, dtype: torch.dtype, experts: int = 1) -> Model:
    """The part of a model on the first of `ranks` tensor-parallel ranks, with random weights; it sends no messages.

    It has the part of the vocabulary of that rank only. `experts` ranks divide the experts, if the model has any.
    """
    divided = Ranks(size=experts if any(spec.experts for _, spec in config.operators) else 1)
    model = Model(config, Ranks(size=ranks), dtype=dtype, device=device, experts=divided)
    with torch.no_grad(), device:  # the weights are drawn on the device
        for parameter in model.parameters():
            shape = tuple(parameter.shape)
            parameter.copy_(draw(replace(field_of(parameter), shape=shape), config.num_layers))
    return model


@dataclass
class MeasuredDevice:
    """A device with the methods of `devices.Device` that times models; it uses the slowest rank's times.

    All ranks call its methods together.

    Attributes:
        memory: Bytes of memory of a rank.
        group: The ranks that measure at the same time (None: this rank alone).
        dtype: The dtype of the timed models.
        device: The device on which they run.
        shares: True if ranks of one machine sum in shared memory, as models do (see `Ranks`).
    """

    memory: float
    group: ProcessGroup | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shares: bool = True
    _known: dict[tuple, tuple[float, ...]] = field(default_factory=dict)
    _models: dict[tuple[Stack, int, int], Model] = field(default_factory=dict)  # the models that were timed last

    @property
    def name(self) -> str:
        return f"this machine's {self.device.type}, measured in {str(self.dtype).removeprefix('torch.')}"

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def forward(self, config: Stack, ranks: int, batch: int, tokens: int, seq: int, experts: int = 1) -> float:
        """Seconds of a forward pass over `tokens` tokens of each of `batch` prompts of `seq` tokens.

        `experts` ranks divide the experts; the first of them is timed with the tokens that choose its experts.
        """
        run = _reply if ranks == 1 and tokens == seq else _divided_reply
        ttft, _ = self._of_layers(run, config, ranks, *_sequences(config, batch, tokens, seq), experts)
        return ttft + self._attention(config, ranks, batch, tokens, seq)

    def micro_batch(self, config: Stack, ranks: int, batch: int, tokens: int, seq: int) -> tuple[float, float]:
        """Seconds of a forward and of a backward pass in training, over `tokens` of the `seq` tokens of each sequence."""
        forward, backward, _ = self._of_layers(_training, config, ranks, *_sequences(config, batch, tokens, seq))
        attention = self._attention(config, ranks, batch, tokens, seq)
        return forward + attention, backward + BACKWARD_ATTENTION * attention

    def passing(self, config: Stack, ranks: int, batch: int, tokens: int) -> tuple[float, float]:
        """Additional seconds, forward and backward, in which a context rank computes the states that it passes on."""
        key = (_block_contributions, config, ranks, batch, tokens)
        if key not in self._known:
            total = torch.zeros(2, dtype=torch.float64)
            for sizes, count in Counter(config.recurrences).items():
                calls = _block_contributions(sizes, ranks, 2 * batch, -(-tokens // 2), self.device)
                total += count * self._slowest([_seconds(call, self.device) for call in calls])
            self._known[key] = tuple(total.tolist())
        forward, backward = self._known[key]
        return forward, backward

    def optimizer(self, config: Stack, ranks: int, experts: int = 1) -> float:
        """Seconds of the gradient norm, clipping and AdamW, in proportion to the weights."""
        key = (fused_adam.adamw, config, ranks)
        if key not in self._known:
            part = config.with_layers([config.kinds[0][0]] * LAYERS[-1])
            seconds = self._slowest([self._times(_training, part, ranks, 1, 2 * (config.history + 1))])[0, 2]
            self._known[key] = (float(seconds) / Memory(part, ranks).weights,)
        return self._known[key][0] * Memory(config, ranks, expert_ranks=experts).weights

    def token(self, config: Stack, ranks: int, batch: int, length: int, experts: int = 1) -> float:
        """Seconds to decode one token of `batch` sequences, of which this rank holds `length` tokens; see `forward`."""
        return self._of_layers(_reply if ranks == 1 else _divided_reply, config, ranks, batch, length, experts)[1]

    @cached_property
    def wait(self) -> float:
        """Additional seconds of a small message between computations, because ranks wait for the slowest."""
        return self._wait(lambda number: all_reduce(number, self.group))

    def sums(self, fabric: Fabric, ranks: int) -> Sums:
        """The sums of `ranks` tensor-parallel ranks: in memory if all measuring ranks share it, else over the fabric."""
        in_memory = self._in_memory
        is_local = in_memory is not None and ranks <= in_memory.fabric.curves[0].ranks
        return in_memory if in_memory and is_local else Sums(fabric, self.wait)

    @cached_property
    def _in_memory(self) -> Sums | None:
        """Sums in memory that all ranks of the group share, which are always exact; None if they share none."""
        if self.group is None or self.device.type != "cpu" or not self.shares:
            return None
        memory, _ = connect(self.group)
        if memory is None:
            return None
        calls: dict[str, Callable] = {"all_reduce": memory.all_reduce, "all_gather": memory.all_gather}
        points: dict[str, list[tuple[int, float]]] = {name: [] for name in calls}
        for nbytes in SIZES:
            watches = [timed(partial(_repeat, call, torch.zeros(nbytes // 4)), self.device) for call in calls.values()]
            medians = repetitions(watches, self.group, self.device, TURNS).median(0).values.tolist()
            for name, seconds in zip(calls, medians, strict=True):
                points[name].append((nbytes, seconds / TURNS))
        wait = self._wait(memory.all_reduce)
        memory.close()
        curves = [Curve.fit(name, self.group.size(), each) for name, each in points.items()]
        return Sums(Fabric(tuple(curves)), wait, ("fp32",))

    def _wait(self, send: Callable[[torch.Tensor], object]) -> float:
        """Seconds that `send` takes for a small tensor between products of matrices, in addition to its time alone."""
        if self.group is None:
            return 0.0
        matrix, number = torch.ones(1024, 1024, device=self.device), torch.ones(256, device=self.device)

        def turns(computes: bool, sends: bool) -> None:
            for _ in range(TURNS):
                for _ in range(PRODUCTS if computes else 0):
                    torch.mv(matrix, matrix[0])
                if sends:
                    send(number)

        calls = [timed(partial(turns, *each), self.device) for each in ((True, False), (False, True), (True, True))]
        computing, sending, both = repetitions(calls, self.group, self.device, TURNS).median(0).values.tolist()
        return max(0.0, both - computing - sending) / TURNS

    def _of_layers(
        self,
        run: Callable[[Model, torch.Tensor], tuple[float, ...]],
        config: Stack,
        ranks: int,
        batch: int,
        tokens: int,
        experts: int = 1,
    ) -> tuple[float, ...]:
        """The times of `run` for all layers of the part of a model, extrapolated from the times for few layers."""
        key = (run, config, ranks, batch, tokens, experts)
        if key not in self._known:
            (first, _), *others = config.kinds
            chosen = [[first] * layers for layers in LAYERS] + [[index] * LAYERS[0] for index, _ in others]
            models = [config.with_layers(indices) for indices in chosen]
            times = self._slowest([self._times(run, each, ranks, batch, tokens, experts) for each in models])
            layer = (times[1] - times[0]).clamp(min=0) / (LAYERS[1] - LAYERS[0])
            total = times[0] + (config.num_layers - LAYERS[0]) * layer
            for (_, count), seconds in zip(others, times[2:], strict=True):
                total += count * (seconds - times[0]).clamp(min=-layer)
            self._known[key] = tuple(total.tolist())
        return self._known[key]

    def _times(
        self, run: Callable, config: Stack, ranks: int, batch: int, tokens: int, experts: int = 1
    ) -> list[tuple[float, ...]]:
        """The times of all runs, (times that `run` returns, runs), with a model of random weights and random prompts."""
        model = self._model(config, ranks, experts)
        ids = torch.randint(model.embeddings.stop, (batch, tokens), generator=torch.Generator().manual_seed(0))
        times = [run(model, ids.to(self.device)) for _ in range(1 + REPEATED)][1:]
        return list(zip(*times, strict=True))

    def _model(self, config: Stack, ranks: int, experts: int) -> Model:
        key = config, ranks, experts
        if key not in self._models:
            if len(self._models) == KEPT:
                self._models.pop(next(iter(self._models)))
            self._models[key] = part_of(config, ranks, self.device, self.dtype, experts)
        return self._models[key]

    def _slowest(self, times: Sequence[Any]) -> torch.Tensor:
        """The median over runs of the slowest rank's time in each run; times: (..., runs)."""
        own = torch.tensor(times, dtype=torch.float64, device=self.device)
        return all_reduce(own, self.group, op=dist.ReduceOp.MAX).cpu().median(-1).values

    def _attention(self, config: Stack, ranks: int, batch: int, tokens: int, seq: int) -> float:
        """Seconds of attention to the keys of other context ranks, which the timed models do not compute."""
        if not config.attentions or tokens == seq:
            return 0.0
        local, key = config.attentions[0].on_ranks(ranks), (attend, config, ranks, batch, tokens)
        if key not in self._known:
            heads = [local.heads, local.kv_heads, local.kv_heads]
            q, k, v = (
                torch.randn(tokens, batch, n, local.head_dim, device=self.device, dtype=self.dtype) for n in heads
            )
            run = lambda: attend(q, k, v, True, local.head_dim**-0.5)  # noqa: E731
            self._known[key] = (float(self._slowest(_seconds(run, self.device))),)
        return len(config.attentions) * (seq / tokens - 1) * self._known[key][0]


def _sequences(config: Stack, batch: int, tokens: int, seq: int) -> tuple[int, int]:
    """(number of sequences, tokens of each) with which a rank is timed.

    The two blocks of a context rank count as two sequences; with attention as one sequence, because every query of a rank
    attends to all earlier keys of the rank.
    """
    return (batch, tokens) if tokens == seq or config.attentions else (2 * batch, -(-tokens // 2))


# The timed functions: of a model and ids (batch, tokens), and of random inputs of a scan


def _block_contributions(
    sizes: RecurrenceSizes, ranks: int, blocks: int, length: int, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Functions that compute the final states of blocks, and the gradients of their incoming states.

    ranks: the number of ranks that divide the heads. blocks: the number of blocks in all sequences, each of `length` tokens.
    """

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device)

    heads, state, groups = sizes.heads // ranks, sizes.state, max(1, sizes.groups // ranks)
    if sizes.head_dim == 1:
        x, dt, z = random(3, blocks, length, heads)
        A_log, B, bias = random(heads, state), random(blocks, length, state), random(heads)
        return (
            lambda: selective_summary(x, dt, A_log, B, bias),
            lambda: selective_adjoint(x, dt, A_log, B, z, bias),
        )
    x, B = random(blocks, length, heads, sizes.head_dim), random(blocks, length, groups, state)
    dt, A_log = random(blocks, length, heads), random(heads)
    return lambda: ssd_summary(x, dt, A_log, B), lambda: ssd_adjoint(x, dt, A_log, B)


def _repeat(call: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> None:
    for _ in range(TURNS):
        call(tensor)


def _clock(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _seconds(run: Callable[[], object], device: torch.device) -> list[float]:
    """The seconds of REPEATED calls, after a warm-up."""
    return [_clock(run, device) for _ in range(1 + REPEATED)][1:]


def _training(model: Model, ids: torch.Tensor) -> tuple[float, ...]:
    """Seconds of forward, of backward, and of the update: gradient norm, clipping, AdamW and zeroing the gradients.

    The timed step of AdamW is its second one, because the first one allocates the moments.
    """
    losses: list[torch.Tensor] = []
    forward = _clock(lambda: losses.append(model.loss(ids, ids)), ids.device)
    backward = _clock(losses[0].backward, ids.device)
    optimizer = fused_adam.adamw([{"params": list(model.parameters()), "weight_decay": 0.0}], lr=1e-4)
    optimizer.step()

    def update() -> None:
        clip_gradients(model, grad_norm(model) + 1.0, 1.0)
        optimizer.step()
        fused_adam.zero_gradients(optimizer)

    return forward, backward, _clock(update, ids.device)


def _reply(model: Model, ids: torch.Tensor) -> tuple[float, ...]:
    """Seconds to the first token of replies to prompts, and seconds per following token."""
    return _times_of_reply(model, ids, [])


def _divided_reply(model: Model, ids: torch.Tensor) -> tuple[float, ...]:
    """`_reply` of ranks that divide a model or a sequence. They read prompts with modules instead of the C tape.

    An empty forward hook on each layer makes the model call its modules, because C would not call the hooks.
    """
    return _times_of_reply(model, ids, [layer.register_forward_hook(lambda *_: None) for layer in model.layers])


def _times_of_reply(model: Model, ids: torch.Tensor, hooks: list[Any]) -> tuple[float, ...]:
    times = [time.perf_counter()]
    for _ in stream(model, ids, max_new_tokens=1 + FIRST + NEW):
        times.append(time.perf_counter())
        while hooks:
            hooks.pop().remove()
            changed(model)
    return times[1] - times[0], (times[-1] - times[1 + FIRST]) / NEW
