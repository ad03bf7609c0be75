"""The choice of a plan by `SparseFusion`: profiles dense steps, plans on one rank, and measures close plans in turns."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch.distributed import ProcessGroup

from commfabric.collectives.agreement import on_first
from commfabric.fabric.cost_model import Fabric
from sparsefusion.adapters.adapter import Adapter
from sparsefusion.gradients.session import Session, StepObserver
from sparsefusion.planning.compression import CompressionSettings, sends_less
from sparsefusion.planning.plan import FRAMEWORK_BUCKET_MODES, Plan
from sparsefusion.planning.planner import PLANNERS, calibrated_costs, make_plans, predict
from sparsefusion.planning.timeline import Costs, Timeline

from .cost_measurement import measure_costs
from .profiling import Profiler
from .trial import Trial, close_modes


@dataclass(frozen=True)
class Options:
    """The settings of a `SparseFusion`; its docstring explains them."""

    mode: str
    compression: CompressionSettings
    density_warmup: int
    fabric: Fabric | None
    is_copied: Callable
    report: Callable[[str], None]


class PlanSelection:
    """Chooses the plan of one attached model, the same on all ranks.

    Attributes:
        is_final: True if the active plan is final.
        sparse_since: The number of the first step that was not dense, or None.
        candidates: During a trial {"dense": seconds of a dense step, "plans": {mode: JSON}}, otherwise None.
    """

    def __init__(self, adapter: Adapter, session: Session, options: Options):
        self.adapter, self.session, self.options = adapter, session, options
        self.ranks = session.reducer.group.size()
        if options.compression.exchange == "auto":
            gathering = replace(options.compression, exchange="all_gather")
            self.options = replace(options, compression=gathering)
            if not self.sends_less(gathering.density, options.mode == "auto" and adapter.dtype.itemsize == 4):
                self.options = replace(options, compression=replace(gathering, exchange="sparse_all_reduce"))
        session.reducer.exchange = self.options.compression.exchange
        self.is_final = False
        self.sparse_since: int | None = None
        self.candidates: dict | None = None
        session.plan = self._without_buffers("dense")

    def _without_buffers(self, mode: str) -> Plan:
        return self.options.compression.plan(mode, self.ranks)

    @property
    def groups(self) -> tuple[ProcessGroup, ProcessGroup | None]:
        """(the group of replicas, the group of the parts of a divided model or None)."""
        return self.session.reducer.group, self.session.model_group

    @property
    def arguments(self) -> dict[str, object]:
        """The arguments that must be equal on all ranks."""
        session, options = self.session, self.options
        given = {name: getattr(options, name) for name in ("mode", "compression", "density_warmup")}
        optional = dict(loss_scale=session.loss_scale, fabric=options.fabric, model_group=session.model_group)
        return (
            given
            | {name: "not given" if value is None else "given" for name, value in optional.items()}
            | {"on_nonfinite": "skip-known" if session.skips_nonfinite_steps else "raise"}
        )

    def start(self) -> None:
        """Start again: profile dense steps, if there is a plan to choose. The call itself sends nothing."""
        session, mode, adapter = self.session, self.options.mode, self.adapter
        self.stop()
        session.plan, self.is_final = self._without_buffers("dense"), True
        if self.ranks == 1:
            return
        if mode in FRAMEWORK_BUCKET_MODES:
            session.plan = self._without_buffers(mode)
        elif mode != "auto" and not self.sends_less(self.options.compression.density):
            self._report_once(f"sparsefusion: dense, as {self._too_large(mode)}")
        else:
            self.is_final = False
            session.observers.append(Profiler(adapter, self._copied, self._plan_from_profile))

    @cached_property
    def _copied(self) -> set[str]:
        """The names of parameters that several parts of a divided model hold.

        The user's function is called when ranks attach, where its errors are shared, and not again for a later profile.
        """
        model_group = self.session.model_group
        if model_group is None or model_group.size() == 1:
            return set()
        return {name for name, p in self.adapter.parameters.items() if self.options.is_copied(p)}

    def stop(self) -> None:
        """End profiling, trials and the warm-up."""
        session = self.session
        for observer in [*session.observers]:
            if isinstance(observer, Profiler):
                observer.stop(session)
        session.observers.clear()
        session.density_ratio, session.is_dense_step, self.candidates = 1.0, False, None

    def sends_less(self, density: float, than_fp16: bool = False) -> bool:
        """Return True if sparse messages of this density are clearly smaller than dense ones, or than those in float16."""
        compression, adapter = replace(self.options.compression, density=density), self.adapter
        scatters = adapter.dense_operation == "reduce_scatter"
        return sends_less(compression, self.ranks, adapter.dtype.itemsize, adapter.sent_itemsize, scatters, than_fp16)

    def _too_large(self, what: str) -> str:
        return (
            f"{what} would not send clearly less, on {self.ranks} ranks with density {self.options.compression.density}"
        )

    @property
    def trial(self) -> Trial | None:
        return next((observer for observer in self.session.observers if isinstance(observer, Trial)), None)

    def _report_once(self, text: str) -> None:
        if all(group is None or group.rank() == 0 for group in self.groups):
            self.options.report(text)

    def _plan_from_profile(self, timeline: Timeline) -> None:
        (group, model_group), session, adapter = self.groups, self.session, self.adapter
        costs = measure_costs(
            group, session.device, adapter.dtype, timeline.numel, self.options.compression, adapter.dense_operation,
            self.options.fabric,
        )  # fmt: skip

        def candidates():  # runs on one rank of each part of a divided model
            found = on_first(lambda: self.make_candidates(timeline, costs), model_group, session.device)
            plans = {mode: Plan.from_json(text).for_sizes(session.sizes) for mode, text in found["plans"].items()}
            return {"dense": found["dense"], "plans": {mode: plan.to_json() for mode, plan in plans.items()}}

        self.adopt(on_first(candidates, group, session.device))

    def make_candidates(self, timeline: Timeline, costs: Costs) -> dict:
        """{"dense": seconds of a dense step, "plans": {mode: JSON}}, with predictions, which are also reported."""
        compression, costs = self.options.compression, calibrated_costs(costs, timeline)
        plans = make_plans(self._modes(), compression, timeline, costs, self.adapter.can_send_early)
        seconds = {mode: predict(plan, compression, timeline, costs) for mode, plan in plans.items()}
        has_sparse = any(plan.buffers for plan in plans.values())
        note = "" if has_sparse else f"\n  {self._too_large('sparse messages')}"
        self.options.report(dry_run(plans, seconds, compression, timeline) + note)
        texts = {mode: replace(plan, predicted=seconds).to_json() for mode, plan in plans.items()}
        return {"dense": timeline.step, "plans": texts}

    def _modes(self) -> list[str]:
        if self.options.mode != "auto":
            return [self.options.mode]
        modes = ["dense", "fp16"] if self.adapter.dtype.itemsize == 4 else ["dense"]  # float64 is not rounded
        if self.sends_less(self.options.compression.density, than_fp16="fp16" in modes):
            modes += [mode for mode in PLANNERS if mode not in FRAMEWORK_BUCKET_MODES]
        return modes

    def adopt(self, candidates: dict) -> None:
        """Activate the plan of the user's mode, or with auto the fastest, after a trial of plans with close predictions."""
        plans = {mode: Plan.from_json(text) for mode, text in candidates["plans"].items()}
        session, close = self.session, close_modes(next(iter(plans.values())).predicted)
        session.plan = plans[close[0]]
        if self.sparse_since is None:
            self.sparse_since = session.step
        self._warm_up([plans[mode] for mode in close])
        if self.options.mode != "auto" or close == ["dense"]:
            self.is_final = True
            return
        self.candidates = candidates

        def decide(mode, measured):
            session.plan, self.is_final, self.candidates = plans[mode], True, None
            self._report_once(describe_trial(mode, measured))

        wait = max(0, self.sparse_since + self.options.density_warmup - session.step)
        trial = Trial(session, plans, close, candidates["dense"], wait, decide, candidates.get("trial"))
        session.observers.append(trial)

    def adopt_final(self, plan: Plan) -> None:
        self.session.plan, self.is_final = replace(plan, ranks=self.ranks), True
        self._warm_up([self.session.plan])

    def _warm_up(self, plans: Iterable[Plan]) -> None:
        steps, density = self.options.density_warmup, self.options.compression.density
        if steps and any(plan.buffers for plan in plans):
            if self.sparse_since is None:  # the plan is from a checkpoint of a run without sparse steps so far
                self.sparse_since = self.session.step
            self.session.observers.append(DensityWarmup(density, steps, self.sparse_since, self.sends_less))

    def accepts(self, plan: Plan, budget: str) -> bool:
        """Return True if a plan from a checkpoint has these settings, fits these parameters, and sends clearly less."""
        saved = CompressionSettings(plan.density, plan.sparsifier, plan.wire, budget, plan.exchange)
        is_asked = saved == self.options.compression and self.options.mode in ("auto", plan.mode)
        return is_asked and (not plan.buffers or self.sends_less(plan.density)) and plan.fits_sizes(self.session.sizes)


@dataclass(eq=False)
class DensityWarmup(StepObserver):
    """Sets the density of step t, counted from step `since`, to max(density, 0.25^(1 + 4 t / steps)).

    Steps in which this density does not send clearly less than a dense step are dense. Source: Deep Gradient Compression
    (2018).
    """

    density: float
    steps: int
    since: int
    sends_less: Callable[[float], bool]

    def step_began(self, session: Session) -> None:
        t = session.step - self.since
        density = max(self.density, 0.25 ** (1 + 4 * t / self.steps)) if t < self.steps else self.density
        session.density_ratio, session.is_dense_step = density / self.density, not self.sends_less(density)
        if t >= self.steps:
            session.observers.remove(self)


def dry_run(
    plans: Mapping[str, Plan], seconds: Mapping[str, float], compression: CompressionSettings, timeline: Timeline
) -> str:
    """A table of plans ({mode: plan}): predicted seconds, bytes that a rank sends, and the number of buffers.

    The bytes leave out the 4 bytes that indices take per 65,536 elements of the gradients.
    """
    ranks = next(iter(plans.values())).ranks
    lines = [
        f"sparsefusion: {ranks} ranks, {len(timeline.tensors)} gradients of {timeline.numel:,} elements in "
        f"{_plural(len(timeline.atoms), 'bucket')}; a dense step takes {1e3 * timeline.step:.0f} ms. Predicted:"
    ]
    for mode, plan in plans.items():
        nbytes = _bytes(plan, compression, timeline)
        dense, selected, numel = plan.sent_elements if plan.buffers else (1, 0, 1)
        lines.append(
            f"  {mode:<12}{1e3 * seconds[mode]:8.0f} ms{nbytes / 1e6:10.2f} MB, {(dense + selected) / numel:6.1%} of "
            f"all elements, in {_plural(len(plan.buffers) or len(timeline.atoms), 'buffer')}"
        )
    return "\n".join(lines)


def describe_trial(mode: str, measured: Mapping[str, float]) -> str:
    """The result of a trial. mode: the chosen mode. measured: {mode: seconds of a step} of all modes of the trial."""
    times = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in measured.items())
    return f"sparsefusion: chose {mode}; measured steps: {times}"


def _bytes(plan: Plan, compression: CompressionSettings, timeline: Timeline) -> int:
    if plan.mode in FRAMEWORK_BUCKET_MODES:
        return timeline.numel * (2 if plan.mode == "fp16" else timeline.sent_itemsize)
    dense, sparse, _ = plan.sent_elements
    filled = sum(compression.filled(unit.k) for buffer in plan.buffers for unit in buffer.units)
    return dense * timeline.itemsize + compression.sent_bytes(sparse, timeline.itemsize, filled)


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"
