"""`SparseFusion`: sends fewer bytes of gradients in a training loop that uses torch DDP, Megatron DDP or DeepSpeed."""

import sys
from collections.abc import Callable, Mapping
from numbers import Integral, Real

import torch
from torch.distributed import ProcessGroup

from commfabric.collectives.agreement import together
from commfabric.collectives.counted import Counter
from commfabric.fabric.cost_model import Fabric
from sparsefusion import EXCHANGES, MODES, SPARSIFIERS
from sparsefusion.adapters.adapter import Adapter, NotCopied
from sparsefusion.adapters.dispatch import adapter_for, target_groups
from sparsefusion.gradients.reducer import Reducer
from sparsefusion.gradients.session import Session
from sparsefusion.planning.compression import CompressionSettings
from sparsefusion.planning.plan import WIRES, Plan

from .checkpoint_state import VERSION, check_states, mean_residuals, memory_strides, model_part
from .plan_selection import Options, PlanSelection

ATTACHED = "_sparsefusion"
CHOICES = {
    "sparsifier": SPARSIFIERS,
    "mode": MODES,
    "wire": WIRES,
    "budget": ("none", "paper"),
    "exchange": EXCHANGES,
    "on_nonfinite": ("raise", "skip-known"),
}


class SparseFusion:
    """Sends the largest elements of gradients, and adds the others to the gradients of the next step (error feedback).

    Args:
        density: The share of all elements that is sent.
        sparsifier: The selection of elements: topk; dgc (topk with a sampled threshold, in C); gaussiank; redsync; sidco;
            randomk.
        mode: The plan, one of the modes below.
        wire: The format of selected values: fp32, fp16, bf16, int8 (randomk: fp32 only). Residuals are unscaled, so values
            below fp16's smallest number, 6e-8, stay in them.
        density_warmup: The number of steps in which the density falls from a quarter to its final value.
        loss_scale: Returns the scale of the loss, if there is one: a GradScaler's get_scale (DeepSpeed's is found). All
            optimizers must skip a step if a mean of these gradients is not finite, and no other steps. A reduction is a
            step: accumulate under no_sync, or earlier reductions of a skipped step are lost as well.
        fabric: A `Fabric` of these links. By default they are measured.
        model_group: The ranks over which the model is divided (tensor parallelism), which plan together and skip steps
            together. Those of Megatron and DeepSpeed are found. All ranks of the group must pass it: if only some parts of
            a replica do, they wait for the others.
        copied: copied(parameter) returns True if several of these ranks hold copies of the parameter, which must stay equal.
            By default, parameters without the attribute tensor_model_parallel or model_parallel.
        budget: The compensation of the density for gradients that are sent dense: "none", or "paper" (the density falls at
            most to 0.001).
        exchange: How selected elements are summed. all_gather: every rank receives all elements of all ranks, so a rank
            sends P - 1 times its elements. sparse_all_reduce: every rank receives only the largest sums, as many as it has
            selected; the others stay in residuals. A rank sends at most twice its elements on any number of ranks. auto:
            all_gather where it sends clearly less than dense gradients, otherwise sparse_all_reduce.
        on_nonfinite: raise, or skip-known: the training skips steps that are not finite, also without a loss scale.
        report: Called with texts for the user on the first rank. By default they are printed to stderr.

    Raises:
        ValueError: An option is invalid.

    | mode | messages |
    |---|---|
    | dense | all elements |
    | fp16 | all elements in float16, times a power of two that follows the largest mean of the last such step |
    | layerwise | a share of every tensor |
    | bucket | a share of every buffer |
    | selective | small gradients, and those whose selection costs more than it saves, are sent dense |
    | interleaved | as selective; dense gradients are sent before elements of the others are selected |
    | offload | as selective; another thread selects (not on CUDA) |
    | auto | the fastest of these on this machine, dense if none is faster |

    In fp16, gradients that are float16 already have no factor, and a bucket that overflows is sent again. In selective,
    interleaved and offload, gradients with fewer than 2,048 elements or one dimension are always sent dense.

    In each step, the modes dense and fp16 send an all-reduce of each of the framework's buckets. The other modes send, for
    each buffer of the plan, an all-gather of k values and indices (randomk: an all-reduce of values;
    sparse_all_reduce: an all-to-all of k and an all-gather of k / P values and indices) and an all-reduce of the dense
    gradients. Every rank keeps a residual of each sparse gradient, at least fp32 (4 bytes per element),
    and a copy of it where steps may be skipped.

    Modes other than dense and fp16 begin with five dense steps, which are profiled. All ranks have the same plan, and
    means with the same bits. If a mean is not finite, every rank raises FloatingPointError; or the step is skipped (by
    default with a loss scale, and where DeepSpeed skips it), and the residuals before it are restored. The framework
    reduces dense steps without residuals itself.
    """

    def __init__(
        self,
        density: float = 0.01,
        sparsifier: str = "dgc",
        mode: str = "auto",
        wire: str = "fp32",
        density_warmup: int = 0,
        loss_scale: Callable[[], float] | None = None,
        fabric: Fabric | None = None,
        model_group: ProcessGroup | None = None,
        copied: Callable[[torch.nn.Parameter], bool] | None = None,
        budget: str = "none",
        exchange: str = "auto",
        on_nonfinite: str | None = None,
        report: Callable[[str], None] | None = None,
    ):
        names = dict(sparsifier=sparsifier, mode=mode, wire=wire, budget=budget, exchange=exchange)
        functions = dict(loss_scale=loss_scale, copied=copied, report=report)
        _check_options(names | {"on_nonfinite": on_nonfinite or "raise"}, functions, density, density_warmup)
        if fabric is not None and not isinstance(fabric, Fabric):
            raise ValueError(f"fabric={fabric!r} must be a Fabric: Fabric.load(path) reads one")
        if model_group is not None and not isinstance(model_group, ProcessGroup):
            raise ValueError(f"model_group={model_group!r} must be a process group that this rank is in")
        compression = CompressionSettings(float(density), sparsifier, wire, budget, exchange)
        self._options = Options(
            mode, compression, int(density_warmup), fabric, copied or _is_replicated, report or _print_to_stderr
        )
        self._loss_scale, self._model_group, self._on_nonfinite = loss_scale, model_group, on_nonfinite
        self._selection: PlanSelection | None = None  # None: not attached
        self._target: object = None

    def attach(self, target: object) -> "SparseFusion":
        """Reduce the gradients of `target` from now on: a DDP of torch or Megatron-Core, or a DeepSpeed engine.

        All ranks call it at the same point between steps, with the same options, which they compare over the data-parallel
        group and over the ranks of a divided model. If some ranks cannot attach, or `copied` raises there, all ranks of
        these groups raise the same error, and none is attached. A target of another kind is an error on its rank only.

        Raises:
            ValueError: The target is another object, or has a communication hook or another SparseFusion, ZeRO 2 or 3, a
                pipeline, or complex or sparse gradients; the fabric lacks the collectives of this number of ranks; or
                options differ across ranks.
        """
        groups, selection_before = target_groups(target), self._selection
        model_group = groups.model if self._model_group is None else self._model_group
        compared = (groups.data, model_group if groups.data else None)
        try:
            together(lambda: self._attach_here(target), compared, lambda _: self._attached.arguments, groups.device)
        except Exception:  # of any kind: `copied` may raise
            if self._selection is not selection_before:
                self.detach()
            raise
        return self

    def _attach_here(self, target: object) -> None:
        """Attach on this rank; sends nothing."""
        if self._selection:
            raise ValueError("this SparseFusion is already attached: detach() it first, or create another one")
        if getattr(target, ATTACHED, None):
            raise ValueError("another SparseFusion is attached to this model: detach() it first")
        adapter, fabric = adapter_for(target), self._options.fabric
        ranks, session = adapter.group.size(), self._session_for(adapter)
        selection = PlanSelection(adapter, session, self._options)
        if fabric is not None and ranks > 1:
            sparse = selection.options.compression.messages(1, ranks)
            for operation in ("all_reduce", adapter.dense_operation, *(operation for operation, _ in sparse)):
                fabric.time(operation, 1, ranks)  # ValueError: it was not measured
        adapter.install(session)
        self._selection, self._target = selection, target
        setattr(target, ATTACHED, NotCopied(self))
        selection.start()

    def _session_for(self, adapter: Adapter) -> Session:
        compression = self._options.compression
        sizes = {name: p.numel() for name, p in adapter.parameters.items()}
        device = next(iter(adapter.parameters.values())).device
        loss_scale, skipped_steps = self._loss_scale or adapter.loss_scale, adapter.skipped_steps
        by_default = "raise" if (loss_scale or skipped_steps) is None else "skip-known"
        return Session(
            Reducer(adapter.group, compression.sparsifier, compression.wire), sizes, device,
            adapter.can_wait_for_buffer, loss_scale, (self._on_nonfinite or by_default) == "skip-known",
            self._model_group or adapter.model_group, skipped_steps,
        )  # fmt: skip

    def detach(self) -> None:
        """Let the target reduce its gradients itself again. ValueError if it is not attached.

        Residuals are dropped; to send them first, call `replan` and train one more step.

        torch's DDP accepts one communication hook in its lifetime: it works as without a hook, but accepts no other one.
        """
        selection = self._attached
        selection.stop()
        selection.adapter.remove()
        delattr(self._target, ATTACHED)
        self._selection = self._target = None

    @property
    def mode(self) -> str:
        return self._options.mode

    @property
    def plan(self) -> Plan:
        """The active plan, which is dense while steps are profiled. ValueError if it is not attached."""
        return self._attached.session.plan

    @property
    def counter(self) -> Counter:
        """The calls and bytes of this rank's gradients in collectives. ValueError if it is not attached.

        The framework's own reductions, profiling, planning and comparisons of ranks are not counted.
        """
        return self._attached.session.reducer.counter

    @property
    def _attached(self) -> PlanSelection:
        if self._selection is None:
            raise ValueError("SparseFusion is not attached: attach(model) comes first")
        return self._selection

    @property
    def _session(self) -> Session | None:
        return self._selection.session if self._selection else None

    def replan(self) -> None:
        """Profile dense steps again, and make a new plan, on all ranks together. ValueError if it is not attached.

        Residuals are added to the gradients of the first of these steps. The call itself sends nothing.
        """
        self._attached.start()

    def state_dict(self) -> dict:
        """The state of this rank: residuals ({name: (numel,)}), the plan, the step. Every rank saves its own state.

        It can be written with `torch.save` and read with `torch.load(weights_only=True)`. ValueError if it is not attached,
        RuntimeError if a step has begun.
        """
        selection, session = self._attached, self._attached.session
        session.finish_skipped_step()
        has_plan = selection.is_final
        trial, candidates = selection.trial, selection.candidates
        return {
            "version": VERSION,
            "ranks": session.reducer.group.size(),
            "rank": session.reducer.group.rank(),
            "part": model_part(session.model_group),
            "orders": memory_strides(selection.adapter.parameters),
            "step": session.step,
            "sparse_since": selection.sparse_since,
            "budget": self._options.compression.budget,
            "plan": session.plan.to_json() if has_plan else None,
            "candidates": {**candidates, "trial": trial.progress} if trial and candidates else None,
            "half_scale": session.reducer.fp16_scale.value,
            "residuals": {name: residual.clone() for name, residual in session.reducer.feedback.residuals.items()},
        }

    def load_state_dict(self, state: Mapping | list) -> None:
        """Continue from `state_dict`, on all ranks together.

        The saved plan is kept, unless options differ, it would not send clearly less on these ranks, or the mode is auto and
        the number of ranks has changed: then dense steps are profiled again. With a plan that is kept, the run is bitwise
        equal to an uninterrupted one. In the modes dense and fp16, which use DDP's own buckets, this holds for two ranks
        only: torch's DDP sums its first step in other buckets, which changes the order of a sum of more ranks.

        Args:
            state: This rank's own state, or the list of the states of all ranks, if their number has changed. From a list,
                every rank gets the mean of all residuals, so that their sum is still applied.

        Raises:
            ValueError: On every rank, if the state of any rank is invalid, or belongs to other parameters, another number of
                ranks, another rank or another part of the model; if a list is incomplete or mixes steps; or if only some
                ranks pass a list.
        """
        selection, session = self._attached, self._attached.session

        def check() -> list[Mapping]:
            parameters, group = selection.adapter.parameters, session.reducer.group
            return check_states(state, group, parameters, model_part(session.model_group))

        def same(states: list[Mapping]) -> dict[str, object]:
            kind = "its own state" if isinstance(state, Mapping) else "the list of all states"
            values = {name: states[0].get(name, 1.0) for name in ("step", "sparse_since", "budget", "half_scale")}
            return {"state": kind, **values}

        states = together(check, selection.groups, same, session.device)
        first = states[0]
        # Plans differ across the parts of a divided model.
        plans = {"plan": first["plan"], "candidates": first["candidates"] and first["candidates"]["plans"]}
        together(lambda: None, [session.reducer.group], lambda _: plans, session.device)
        selection.stop()
        residuals = mean_residuals(states, session.device)
        session.restore(first["step"], residuals, first.get("half_scale", 1.0))
        selection.sparse_since = first["sparse_since"]
        self._restore_plan(first)

    def _restore_plan(self, state: Mapping) -> None:
        """Adopt the plan of a state, or its candidates, or plan again."""
        selection, ranks, mode = self._attached, self._attached.ranks, self._options.mode
        plan = state["plan"] and Plan.from_json(state["plan"])
        texts = state["candidates"]["plans"].values() if state["candidates"] else ()
        candidates = [Plan.from_json(text) for text in texts]
        if ranks == 1 or (state["ranks"] != ranks and mode == "auto"):
            selection.start()
        elif plan and selection.accepts(plan, state["budget"]):
            selection.adopt_final(plan)
        elif candidates and mode == "auto" and all(selection.accepts(each, state["budget"]) for each in candidates):
            selection.adopt(state["candidates"])
        else:
            selection.start()


def _check_options(
    names: Mapping[str, object], functions: Mapping[str, object], density: object, density_warmup: object
) -> None:
    """ValueError for an invalid option. names: {option: one of CHOICES}. functions: {option: function or None}."""
    if not isinstance(density, Real) or not 0 < float(density) <= 1:
        raise ValueError(f"density={density!r} must be above 0 and at most 1")
    if not isinstance(density_warmup, Integral) or density_warmup < 0:
        raise ValueError(f"density_warmup={density_warmup!r} must be a number of steps")
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise ValueError(f"{name}={value!r} must be a function")
    for name, value in names.items():
        if value not in CHOICES[name]:
            raise ValueError(f"unknown {name} {value!r}: expected {', '.join(CHOICES[name])}")


def _print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _is_replicated(parameter: torch.nn.Parameter) -> bool:
    """Return True if a parameter lacks the attributes of tensor parallelism."""
    return not any(getattr(parameter, mark, False) for mark in ("tensor_model_parallel", "model_parallel"))
