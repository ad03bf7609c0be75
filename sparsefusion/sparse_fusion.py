"""`SparseFusion`: sending fewer gradient bytes, attached to somebody else's data parallelism."""

import sys

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import MODES, SPARSIFIERS
from .deepspeed_engine import DeepSpeedEngine
from .dry_run import dry_run, verdict
from .megatron_ddp import MegatronDDP
from .observation import Observation, measured_costs
from .plan import AS_THEY_COME, WIRES, Plan
from .planner import Wish, corrected, helps, plans_of, predict
from .reducer import Reducer
from .session import Session
from .torch_ddp import TorchDDP
from .trial import Trial
from .warmup import DensityWarmup

CLOSE = 1.3  # auto tries plans that are predicted to take at most this many times the best one's seconds,
MOST_TRIED = 4  # and no more than these
STATE_VERSION = 1
ATTACHED = "_sparsefusion"


class SparseFusion:
    """Sends a share of the numbers of gradients, the largest; what is not sent is added to the next step's (error feedback).

    density: the share. sparsifier: how numbers are selected: topk, dgc (as topk, by a sampled threshold, in C), gaussiank,
    redsync, sidco, randomk. mode: dense; fp16; layerwise: so many numbers of every tensor; bucket: so many of a whole
    buffer; selective: what costs more to select than it saves goes whole; interleaved: that, sent before the rest is
    selected; offload: selected by another thread on the CPU; auto: whichever is fastest here, and dense if none is faster.
    wire: the format of sent values: fp32, fp16, bf16, int8 (randomk: fp32). density_warmup: steps in which the density
    falls from a quarter to its own. loss_scale: a function that returns the scale of the loss, if there is one (a
    GradScaler's get_scale; DeepSpeed's is known). fabric: a `Fabric` of these links, else it is measured. report: is given
    what is to be read, on the first rank.

    Modes but dense and fp16 begin with five dense steps, which are watched. All ranks hold the same plan, and their means
    have the same bits. A mean that is not finite is a FloatingPointError on every rank, or with a loss scale a step that is
    skipped: residuals go back to where they were before it.
    """

    def __init__(
        self, density=0.01, sparsifier="dgc", mode="auto", wire="fp32", density_warmup=0, loss_scale=None, fabric=None,
        report=None,
    ):  # fmt: skip
        if not 0 < density <= 1:
            raise ValueError(f"density={density} must be above 0 and at most 1")
        if density_warmup < 0:
            raise ValueError(f"density_warmup={density_warmup} must be a number of steps")
        given = (("sparsifier", sparsifier, SPARSIFIERS), ("mode", mode, MODES), ("wire", wire, WIRES))
        for name, value, known in given:
            if value not in known:
                raise ValueError(f"{name}={value!r} is none of {', '.join(known)}")
        self.mode, self.density_warmup, self.loss_scale, self.fabric = mode, density_warmup, loss_scale, fabric
        self.wish, self._report = Wish(density, sparsifier, wire), report or _to_stderr
        self._door = self._session = self._target = None

    def attach(self, target) -> "SparseFusion":
        """Reduce the gradients of `target`, a DDP module of torch or Megatron-Core, or a DeepSpeed engine, from now on.

        ValueError: anything else; one that has a communication hook, or another SparseFusion; ZeRO 2 and 3.
        """
        if self._session:
            raise ValueError("this SparseFusion is attached already: detach() it first, or make another one")
        if getattr(target, ATTACHED, None):
            raise ValueError("another SparseFusion is attached to this model: detach() it first")
        door, wish = door_of(target), self.wish
        refuse_sparse_gradients(door.module)
        sizes = {name: p.numel() for name, p in door.parameters.items()}
        device = next(iter(door.parameters.values())).device
        scale = self.loss_scale or getattr(door, "loss_scale", None)
        session = Session(Reducer(door.group, wish.sparsifier, wish.wire), sizes, device, door.holds, scale)
        session.plan = Plan("dense", wish.sparsifier, wish.density, wish.wire, door.group.size())
        door.open(session)
        self._door, self._session, self._target, self._decided, self._sparse_since = door, session, target, False, None
        setattr(target, ATTACHED, self)
        self.replan()
        return self

    def detach(self) -> None:
        """The target reduces its own gradients again. What has not been sent yet is dropped."""
        self._stop_watching()
        self._door.close()
        delattr(self._target, ATTACHED)
        self._door = self._session = self._target = None

    @property
    def plan(self) -> Plan:
        """What is in force: a dense one while steps are watched. ValueError: not attached."""
        return self._attached.plan

    @property
    def _attached(self) -> Session:
        if self._session is None:
            raise ValueError("SparseFusion is not attached: attach(model) comes first")
        return self._session

    def replan(self) -> None:
        """Watch dense steps again, and plan anew; residuals are kept, and go with the first of those steps."""
        session, wish = self._attached, self.wish
        self._stop_watching()
        empty = Plan("dense", wish.sparsifier, wish.density, wish.wire, session.reducer.group.size())
        session.plan, self._decided = empty, True
        if self.mode in AS_THEY_COME:
            session.plan = Plan(self.mode, wish.sparsifier, wish.density, wish.wire, empty.ranks)
        elif not self._helps(wish.density) and self.mode != "auto":
            self._say(
                f"{self.mode} would send more than dense on {empty.ranks} ranks with density {wish.density}: dense"
            )
        elif empty.ranks > 1:
            self._decided = False
            session.watchers.append(Observation(self._door.parameters, session.reducer.group, self._observed))

    def _helps(self, density) -> bool:
        ranks, itemsize = self._session.reducer.group.size(), self._itemsize
        wish = Wish(density, self.wish.sparsifier, self.wish.wire)
        return helps(wish, ranks, itemsize, getattr(self._door, "reduce_scatters", False))

    @property
    def _itemsize(self) -> int:
        return min(p.element_size() for p in self._door.parameters.values())

    def _stop_watching(self):
        for watcher in [*self._session.watchers]:
            if isinstance(watcher, Observation):
                watcher.stop(self._session)
        self._session.watchers.clear()

    def _observed(self, timeline) -> None:
        """Plan: rank 0 does, for all."""
        session, wish = self._session, self.wish
        group, largest = session.reducer.group, max(tensor.numel for tensor in timeline.tensors)
        costs = measured_costs(group, session.device, largest, wish.density, wish.sparsifier, self.fabric)
        costs = corrected(costs, wish, timeline)
        plans = None
        if group.rank() == 0:
            early = getattr(self._door, "early", False)
            plans = plans_of(self._considered(), wish, timeline, costs, early)
            seconds = {mode: predict(plan, wish, timeline, costs) for mode, plan in plans.items()}
            self._say(dry_run(plans, seconds, wish, timeline))
            plans = {mode: plan.predicting(seconds).to_json() for mode, plan in plans.items()}
        box = [plans]
        dist.broadcast_object_list(box, group=group, group_src=0, device=session.device)
        plans = {mode: Plan.from_json(text) for mode, text in box[0].items()}
        self._take(plans, timeline.step)

    def _considered(self) -> list[str]:
        if self.mode != "auto":
            return [self.mode]
        sparse = ["layerwise", "bucket", "selective", "interleaved"] if self._helps(self.wish.density) else []
        if sparse and self._session.device.type == "cuda":
            sparse.append("offload")
        return ["dense", "fp16", *sparse]

    def _take(self, plans, dense: float) -> None:
        """Put the plan in force that is asked for, or predicted to be fastest; the close ones take turns first."""
        session, seconds = self._session, next(iter(plans.values())).predicted
        order = sorted(plans, key=lambda mode: seconds[mode])
        close = [mode for mode in order if seconds[mode] <= CLOSE * seconds[order[0]]][:MOST_TRIED]
        session.plan, self._sparse_since = plans[order[0]], session.step + 1
        if self.density_warmup and session.plan.buffers:
            self._warm_up()
        if self.mode != "auto" or close == ["dense"]:
            self._decided = True
            return

        def decided(mode, measured):
            session.plan, self._decided = plans[mode], True
            self._say(verdict(mode, measured))

        tried = {mode: plans[mode] for mode in close}
        session.watchers.append(Trial(session, tried, dense, self.density_warmup, decided))

    def _warm_up(self):
        self._session.watchers.append(
            DensityWarmup(self.wish.density, self.density_warmup, self._sparse_since, self._helps)
        )

    def _say(self, text: str) -> None:
        if self._session.reducer.group.rank() == 0:
            self._report(text)

    def state_dict(self) -> dict:
        """Of this rank: what has not been sent, the plan, the step. Every rank saves its own."""
        session = self._attached
        session.settle()
        return {
            "version": STATE_VERSION,
            "ranks": session.reducer.group.size(),
            "rank": session.reducer.group.rank(),
            "step": session.step,
            "sparse_since": self._sparse_since,
            "plan": session.plan.to_json() if self._decided else None,
            "residuals": {name: residual.clone() for name, residual in session.reducer.residuals.items()},
        }

    def load_state_dict(self, state) -> None:
        """Go on from `state_dict`: this rank's, or, after a run on another number of ranks, a list of all of its ranks'.

        From a list every rank takes the mean of all residuals, so that what is pending is applied all the same. The saved
        plan is kept, unless other options are asked for now, or the mode is auto on another number of ranks: then there
        will be a new one. ValueError: a state of something else, of other parameters, of another number of ranks or another
        rank, or a list that lacks one.
        """
        session = self._attached
        ranks, rank = session.reducer.group.size(), session.reducer.group.rank()
        states = [state] if isinstance(state, dict) else list(state)
        for each in states:
            self._check(each)
        one, count = states[0], states[0]["ranks"]
        if isinstance(state, dict):
            if count != ranks:
                raise ValueError(
                    f"the state of one of {count} ranks, and here are {ranks}: give load_state_dict the list of all "
                    f"{count} ranks' states, whose mean residual every rank then takes"
                )
            if one["rank"] != rank:
                raise ValueError(f"the state of rank {one['rank']}, and this is rank {rank}")
        elif sorted(each["rank"] for each in states) != list(range(count)):
            raise ValueError(
                f"{len(states)} states of ranks {[each['rank'] for each in states]}, and there were {count} ranks"
            )
        self._stop_watching()
        session.restore(one["step"], mean_residuals(states, session.device))
        self._sparse_since = one["sparse_since"]
        plan = one["plan"] and Plan.from_json(one["plan"])
        if not plan or not self._wants(plan) or (count != ranks and self.mode == "auto"):
            self.replan()
            return
        session.plan, self._decided = plan.among(ranks), True
        if self.density_warmup and session.plan.buffers:
            self._warm_up()

    def _wants(self, plan) -> bool:
        """Whether a saved plan is what is asked for now."""
        wish = Wish(plan.density, plan.sparsifier, plan.wire, self.wish.budget)
        return wish == self.wish and self.mode in ("auto", plan.mode)

    def _check(self, state) -> None:
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
            raise ValueError(f"not a state of SparseFusion, or of another version than {STATE_VERSION}")
        sizes = self._session.sizes
        for name, residual in state["residuals"].items():
            if sizes.get(name) != residual.numel():
                raise ValueError(
                    f"a state with {residual.numel()} numbers of {name!r}; here it has {sizes.get(name, 'none')}"
                )


def mean_residuals(states, device) -> dict:
    """{name: residual} that all ranks take; of one state its own."""
    names = dict.fromkeys(name for state in states for name in state["residuals"])
    found = {}
    for name in names:
        parts = [state["residuals"][name].to(device) for state in states if name in state["residuals"]]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        found[name] = total / len(states) if len(states) > 1 else total
    return found


def door_of(target):
    """The adapter that fits, told by its methods. ValueError: none does."""
    if isinstance(target, DistributedDataParallel):
        return TorchDDP(target)
    if hasattr(target, "bucket_groups") and hasattr(target, "finish_grad_sync"):
        return MegatronDDP(target)
    if hasattr(target, "zero_optimization_stage") and hasattr(target, "allreduce_gradients"):
        return DeepSpeedEngine(target)
    kinds = {kind.__name__ for kind in type(target).__mro__}
    sharded = kinds & {"FullyShardedDataParallel", "FSDPModule"}
    raise ValueError(
        f"SparseFusion attaches to torch's DistributedDataParallel, Megatron-Core's, or a DeepSpeed engine; this is "
        f"{type(target).__name__}" + (", whose gradients are divided over the ranks" if sharded else "")
    )


def refuse_sparse_gradients(module) -> None:
    """ValueError: gradients without a fixed size."""
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse:
            raise ValueError(f"{name} has sparse=True: SparseFusion selects from whole gradients")


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
