"""The choice of a plan by `SparseFusion`: profiles dense steps, plans on one rank, and measures close plans in turns."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from commfabric.collectives.agreement import on_first
from commfabric.fabric.cost_model import Fabric
from sparsefusion.planning.compression import CompressionSettings, sends_less
from sparsefusion.planning.plan import FRAMEWORK_BUCKET_MODES, Plan
from sparsefusion.planning.planner import calibrated_costs, make_plans, predict
from sparsefusion.planning.timeline import Costs, Timeline

from .attached_model import AttachedModel
from .cost_measurement import measure_costs
from .density_warmup import DensityWarmup
from .dry_run import describe_trial, dry_run
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

    def __init__(self, model: AttachedModel, options: Options):
        self.model, self.session, self.options = model, model.session, options
        if options.compression.exchange == "auto":
            gathering = replace(options.compression, exchange="all_gather")
            self.options = replace(options, compression=gathering)
            if not self.sends_less(gathering.density, than_fp16=options.mode == "auto" and model.dtype.itemsize == 4):
                self.options = replace(options, compression=replace(gathering, exchange="sparse_all_reduce"))
        self.session.reducer.exchange = self.options.compression.exchange
        self.is_final = False
        self.sparse_since: int | None = None
        self.candidates: dict | None = None
        self.session.plan = self.empty_plan("dense")

    def empty_plan(self, mode: str) -> Plan:
        """A plan without buffers."""
        compression = self.options.compression
        return Plan(
            mode, compression.sparsifier, compression.density, compression.wire, self.model.ranks,
            exchange=compression.exchange,
        )  # fmt: skip

    def start(self) -> None:
        """Start again: profile dense steps, if there is a plan to choose. The call itself sends nothing."""
        session, mode = self.session, self.options.mode
        self.stop()
        session.plan, self.is_final = self.empty_plan("dense"), True
        if self.model.ranks == 1:
            return
        if mode in FRAMEWORK_BUCKET_MODES:
            session.plan = self.empty_plan(mode)
        elif mode != "auto" and not self.sends_less(self.options.compression.density):
            self.report_once(f"sparsefusion: dense, as {self._too_large(mode)}")
        else:
            self.is_final = False
            session.observers.append(self._profiler())

    def _profiler(self) -> Profiler:
        return Profiler(
            self.model.adapter.parameters, self.session.reducer.group, self.model.dtype.itemsize,
            self.model.sent_itemsize, self._copied, self.model.sends_before_first_atom, self._plan_from_profile,
        )  # fmt: skip

    @cached_property
    def _copied(self) -> set[str]:
        """The names of parameters that several parts of a divided model hold.

        The user's function is called when ranks attach, where its errors are shared, and not again for a later profile.
        """
        model_group = self.session.model_group
        if model_group is None or model_group.size() == 1:
            return set()
        return {name for name, p in self.model.adapter.parameters.items() if self.options.is_copied(p)}

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
        compression = replace(self.options.compression, density=density)
        model, reduce_scatters = self.model, self.model.dense_operation == "reduce_scatter"
        return sends_less(
            compression, model.ranks, model.dtype.itemsize, model.sent_itemsize, reduce_scatters, than_fp16
        )

    def _too_large(self, what: str) -> str:
        density = self.options.compression.density
        return f"{what} would not send clearly less, on {self.session.plan.ranks} ranks with density {density}"

    @property
    def trial(self) -> Trial | None:
        """The trial in progress, if there is one."""
        return next((observer for observer in self.session.observers if isinstance(observer, Trial)), None)

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

    def report_once(self, text: str) -> None:
        if all(group is None or group.rank() == 0 for group in self.model.groups):
            self.options.report(text)

    def _plan_from_profile(self, timeline: Timeline) -> None:
        session, group, options = self.session, self.session.reducer.group, self.options
        costs = measure_costs(
            group, session.device, self.model.dtype, timeline.numel, options.compression, self.model.dense_operation,
            options.fabric,
        )  # fmt: skip

        def candidates():  # runs on one rank of each part of a divided model
            found = on_first(lambda: self.make_candidates(timeline, costs), session.model_group, session.device)
            plans = {mode: Plan.from_json(text).for_sizes(session.sizes) for mode, text in found["plans"].items()}
            return {"dense": found["dense"], "plans": {mode: plan.to_json() for mode, plan in plans.items()}}

        self.adopt(on_first(candidates, group, session.device))

    def make_candidates(self, timeline: Timeline, costs: Costs) -> dict:
        """{"dense": seconds of a dense step, "plans": {mode: JSON}}, with predictions, which are also reported."""
        compression, costs = self.options.compression, calibrated_costs(costs, timeline)
        plans = make_plans(self._modes(), compression, timeline, costs, self.model.can_send_early)
        seconds = {mode: predict(plan, compression, timeline, costs) for mode, plan in plans.items()}
        has_sparse = any(plan.buffers for plan in plans.values())
        note = "" if has_sparse else f"\n  {self._too_large('sparse messages')}"
        self.options.report(dry_run(plans, seconds, compression, timeline) + note)
        texts = {mode: plan.with_predictions(seconds).to_json() for mode, plan in plans.items()}
        return {"dense": timeline.step, "plans": texts}

    def _modes(self) -> list[str]:
        if self.options.mode != "auto":
            return [self.options.mode]
        modes = ["dense", "fp16"] if self.model.dtype.itemsize == 4 else ["dense"]  # float64 is not rounded
        if self.sends_less(self.options.compression.density, than_fp16="fp16" in modes):
            modes += ["layerwise", "bucket", "selective", "interleaved", "offload"]
        return modes

    def adopt(self, candidates: dict) -> None:
        """Activate the plan of the user's mode, or with auto the fastest, after a trial of plans with close predictions."""
        plans = {mode: Plan.from_json(text) for mode, text in candidates["plans"].items()}
        session, seconds = self.session, next(iter(plans.values())).predicted
        close = close_modes(seconds)
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
            self.report_once(describe_trial(mode, measured))

        wait = max(0, self.sparse_since + self.options.density_warmup - session.step)
        trial = Trial(session, plans, close, candidates["dense"], wait, decide, candidates.get("trial"))
        session.observers.append(trial)

    def adopt_final(self, plan: Plan) -> None:
        self.session.plan, self.is_final = plan.for_ranks(self.model.ranks), True
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
        options = self.options
        is_small = not plan.buffers or self.sends_less(plan.density)
        is_asked = saved == options.compression and options.mode in ("auto", plan.mode)
        return is_asked and is_small and plan.fits_sizes(self.session.sizes)
