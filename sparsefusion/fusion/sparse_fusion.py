"""`SparseFusion`: sending fewer gradient bytes, attached to somebody else's data parallelism."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from sparsefusion.adapters.attachment import NotCopied
from sparsefusion.adapters.dispatch import door_of
from sparsefusion.adapters.refusals import refuse_gradients, refuse_options
from sparsefusion.collectives.agreement import agree, from_first
from sparsefusion.collectives.counted import Counter, all_gather_small
from sparsefusion.gradients.reducer import Reducer
from sparsefusion.gradients.session import Session, usual_dtype
from sparsefusion.planning.plan import AS_THEY_COME, Plan
from sparsefusion.planning.planner import Wish, corrected, helps, plans_of, predict

from .checkpoint_state import VERSION, checked_states, mean_residuals, orders_of, part_of
from .density_warmup import DensityWarmup
from .dry_run import dry_run, to_stderr, verdict
from .profiling import Observation, measured_costs
from .trial import Trial, contestants

ATTACHED = "_sparsefusion"


class SparseFusion:
    """Sends a share of the numbers of gradients, the largest; what is not sent is added to the next step's (error feedback).

    density: the share, of all numbers.
    sparsifier: how numbers are selected: topk, dgc (as topk, by a sampled threshold, in C), gaussiank, redsync, sidco,
        randomk.
    mode: dense; fp16: all of it, rounded, times a power of two that follows the largest mean of such a step, unless it is
        float16 (what is out of range is sent again); layerwise: so many numbers of every tensor; bucket: of a whole buffer;
        selective: what costs more to select than it saves goes whole; interleaved: that, sent before the rest is selected;
        offload: selected by another thread (not on CUDA); auto: whichever is fastest here, and dense if none is faster.
    wire: the format of sent values: fp32, fp16, bf16, int8 (randomk: fp32). Residuals have no loss scale: what is below
        fp16's least number, 6e-8, waits.
    density_warmup: steps in which the density falls from a quarter to its own.
    loss_scale: a function that returns the scale of the loss, if there is one (a GradScaler's get_scale; DeepSpeed's is
        known): a promise that a step is skipped, by all optimizers, if a mean of these gradients is not finite, and for
        nothing else. Each reduction is a step: accumulate under no_sync, or what earlier reductions sent goes with it.
    fabric: a `Fabric` of these links, else it is measured.
    model_group: the ranks over which the model is divided (tensor parallel), which then plan, and skip steps, together
        (Megatron's and DeepSpeed's are known); where it is forgotten on some of them alone, others wait.
    copied(parameter): whether several of those hold it, so that its copies must stay alike (default: without the mark
        tensor_model_parallel or model_parallel).
    budget: how the density pays for what goes whole: by bytes, or as in the paper.
    on_nonfinite: raise, or skip-known: without a loss scale, too, the training skips such steps, and no others.
    report: is given what is to be read, on the first rank.

    A step sends an all-reduce of each of the framework's buckets (dense, fp16), or, of each buffer of the plan, an
    all-gather of k values and places (randomk: an all-reduce of values) and an all-reduce of what goes whole. Every rank
    keeps a residual of each gradient that is sent sparsely, at least fp32, 4 bytes a number, and another one where steps may
    be skipped.

    All modes begin with a dense step, after which ranks compare; those but dense and fp16 with five, which are watched. All
    ranks hold the same plan, and their means have the same bits. A mean that is not finite is a FloatingPointError on every
    rank, or, by default with a loss scale or where DeepSpeed skips it, a step that is skipped: residuals go back to where
    they were before it. (Dense steps with nothing pending are the framework's.) ValueError: an option that is none.
    """

    def __init__(
        self, density=0.01, sparsifier="dgc", mode="auto", wire="fp32", density_warmup=0, loss_scale=None, fabric=None,
        model_group=None, copied=None, budget="bytes", on_nonfinite=None, report=None,
    ):  # fmt: skip
        refuse_options(
            density, density_warmup, fabric, model_group, dict(loss_scale=loss_scale, copied=copied, report=report),
            dict(sparsifier=sparsifier, mode=mode, wire=wire, budget=budget, on_nonfinite=on_nonfinite or "raise"),
        )  # fmt: skip
        self.mode, self.density_warmup, self.loss_scale, self.fabric = mode, int(density_warmup), loss_scale, fabric
        self.wish, self._report = Wish(float(density), sparsifier, wire, budget), report or to_stderr
        self.model_group, self._copied, self.on_nonfinite = model_group, copied or _unmarked, on_nonfinite
        self._door = self._session = self._target = None

    def attach(self, target) -> "SparseFusion":
        """Reduce the gradients of `target`, a DDP module of torch or Megatron-Core, or a DeepSpeed engine, from now on.

        On every rank, with the same options, between steps; sends nothing yet. ValueError: anything else; one that has a
        communication hook, or another SparseFusion; ZeRO 2 and 3; pipelines; complex or sparse gradients; a fabric without
        these ranks' all-reduce and all-gather (and reduce-scatter, if that is what it sends gradients with).
        """
        if self._session:
            raise ValueError("this SparseFusion is attached already: detach() it first, or make another one")
        if getattr(target, ATTACHED, None):
            raise ValueError("another SparseFusion is attached to this model: detach() it first")
        door, wish = door_of(target), self.wish
        refuse_gradients(door.module, door.parameters)
        sizes = {name: p.numel() for name, p in door.parameters.items()}
        device = next(iter(door.parameters.values())).device
        scale = self.loss_scale or getattr(door, "loss_scale", None)
        self._dtype = getattr(door, "dtype", None) or usual_dtype(door.parameters.values())
        self._sent = getattr(door, "sent", self._dtype.itemsize)
        self._whole = "reduce_scatter" if getattr(door, "reduce_scatters", False) else "all_reduce"
        for operation in ("all_reduce", "all_gather", self._whole) if self.fabric and door.group.size() > 1 else ():
            self.fabric.time(operation, 1, door.group.size())
        reducer = Reducer(door.group, wish.sparsifier, wish.wire)
        model_group = self.model_group or getattr(door, "model_group", None)
        counts = getattr(door, "skipped_steps", None)
        skips = self.on_nonfinite == "skip-known" if self.on_nonfinite else (scale or counts) is not None
        session = Session(reducer, sizes, device, door.holds, scale, skips, model_group, counts)
        session.plan = Plan("dense", wish.sparsifier, wish.density, wish.wire, door.group.size())
        door.open(session)
        self._door, self._session, self._target, self._decided, self._sparse_since = door, session, target, False, None
        setattr(target, ATTACHED, NotCopied(self))
        try:
            self.replan()
        except Exception:  # of any kind: `copied` may raise
            self.detach()
            raise
        return self

    def detach(self) -> None:
        """The target reduces its own gradients again. What has not been sent yet is dropped. ValueError: not attached.

        torch's DDP takes one communication hook for ever: it goes on without a SparseFusion, but takes no other hook.
        """
        self._stop_watching()
        self._door.close()
        delattr(self._target, ATTACHED)
        self._door = self._session = self._target = None

    @property
    def plan(self) -> Plan:
        """What is in force: a dense one while steps are watched. ValueError: not attached."""
        return self._attached.plan

    @property
    def counter(self) -> Counter:
        """Calls and bytes that this rank gave to collectives for gradients. ValueError: not attached.

        But for the framework's own, and for what finds out, plans and compares.
        """
        return self._attached.reducer.counter

    @property
    def _attached(self) -> Session:
        if self._session is None:
            raise ValueError("SparseFusion is not attached: attach(model) comes first")
        return self._session

    def replan(self) -> None:
        """Watch dense steps again, and plan anew, on all ranks together; residuals go with the first of those steps.

        Sends nothing itself. ValueError: not attached.
        """
        session, wish = self._attached, self.wish
        self._stop_watching()
        empty = Plan("dense", wish.sparsifier, wish.density, wish.wire, session.reducer.group.size())
        session.plan, self._decided, session.unproved, self._notice = empty, True, self._compare, None
        if self.mode in AS_THEY_COME and empty.ranks > 1:
            session.plan = Plan(self.mode, wish.sparsifier, wish.density, wish.wire, empty.ranks)
        elif not self._helps(wish.density) and self.mode != "auto" and empty.ranks > 1:
            self._notice = f"sparsefusion: dense, as {self._no_less(self.mode)}"
        elif empty.ranks > 1:
            self._decided = False
            parameters, copied = self._door.parameters, set()
            if session.model_group is not None and session.model_group.size() > 1:
                copied = {name for name, p in parameters.items() if self._copied(p)}
            group, early, itemsize = session.reducer.group, getattr(self._door, "early", False), self._dtype.itemsize
            session.watchers.append(Observation(parameters, group, itemsize, self._sent, copied, early, self._observed))

    def _helps(self, density, halves=False) -> bool:
        """Whether sparse messages are clearly smaller than dense ones, or fp16's."""
        ranks, wish = self._session.reducer.group.size(), replace(self.wish, density=density)
        return helps(wish, ranks, self._dtype.itemsize, self._sent, self._whole == "reduce_scatter", halves)

    def _no_less(self, what) -> str:
        return f"{what} would not send clearly less, on {self.plan.ranks} ranks with density {self.wish.density}"

    @property
    def _trial(self) -> Trial | None:
        return next((watcher for watcher in self._session.watchers if isinstance(watcher, Trial)), None)

    def _compare(self) -> None:
        """ValueError on every rank: one was given other options, another plan or another step."""
        session = self._session
        options = (self.mode, self.wish, self.density_warmup, session.skips, session.reducer.half_scale.value)
        absent = tuple(each is None for each in (session.loss_scale, self.fabric, session.model_group))
        trial = self._trial and self._trial.progress
        turns = trial and (trial["turns"], trial["rounds"], list(trial["samples"]))  # samples are each rank's own
        asked = (session.step, *options, absent, session.plan.mode, self._decided, turns)

        def of_replicas():
            self._agree(session.reducer.group, lambda: (*asked, session.plan.hash))
            return asked

        self._agree(session.model_group, of_replicas)
        if self._notice:  # of all ranks, as is known now
            self._say(self._notice)
            self._notice = None

    def _agree(self, group, asked) -> None:
        """ValueError on every rank of `group` (None: this one) that asked() is not alike, or what it raises."""
        if group is None:
            asked()
        else:
            agree(partial(all_gather_small, group=group), self._session.device, asked, "ranks of SparseFusion")

    def _stop_watching(self):
        session = self._attached
        for watcher in [*session.watchers]:
            if isinstance(watcher, Observation):
                watcher.stop(session)
        session.watchers.clear()
        session.density_ratio, session.sends_all, self._candidates = 1.0, False, None

    def _observed(self, timeline) -> None:
        """Plan: the first rank of all does, for all."""
        session, group = self._session, self._session.reducer.group
        costs = measured_costs(group, session.device, self._dtype, timeline.numel, self.wish, self._whole, self.fabric)

        def planned():  # of a divided model, on one rank of each part
            found, sized = from_first(lambda: self._planned(timeline, costs), session.model_group, session.device), {}
            if session.model_group is None:
                return found

            def size():
                for mode, text in found["plans"].items():
                    sized[mode] = Plan.from_json(text).sized(session.sizes).to_json()
                return list(sized)

            self._agree(session.model_group, size)
            return {"dense": found["dense"], "plans": sized}

        self._take(from_first(planned, group, session.device))
        session.prove()

    def _planned(self, timeline, costs) -> dict:
        """Candidates: plans, {mode: JSON}, with all their predictions, which are reported; dense, a dense step's seconds."""
        wish, early = self.wish, getattr(self._door, "early", False)
        costs = corrected(costs, timeline)
        plans = plans_of(self._considered(), wish, timeline, costs, early)
        seconds = {mode: predict(plan, wish, timeline, costs) for mode, plan in plans.items()}
        none = "" if any(plan.buffers for plan in plans.values()) else f"\n  {self._no_less('sparse messages')}"
        self._report(dry_run(plans, seconds, wish, timeline) + none)
        texts = {mode: plan.predicting(seconds).to_json() for mode, plan in plans.items()}
        return {"dense": timeline.step, "plans": texts}

    def _considered(self) -> list[str]:
        if self.mode != "auto":
            return [self.mode]
        modes = ["dense", "fp16"] if self._dtype.itemsize == 4 else ["dense"]  # float64 stays what it is
        if self._helps(self.wish.density, halves="fp16" in modes):
            modes += ["layerwise", "bucket", "selective", "interleaved", "offload"]
        return modes

    def _take(self, candidates: dict) -> None:
        """Put in force the one of `_planned`'s that is asked for, or predicted fastest; the close ones take turns first."""
        plans = {mode: Plan.from_json(text) for mode, text in candidates["plans"].items()}
        session, seconds = self._session, next(iter(plans.values())).predicted
        close = contestants(seconds)
        session.plan, session.unproved = plans[close[0]], self._compare
        if self._sparse_since is None:  # the first step that is not dense
            self._sparse_since = session.step
        self._warm_up(plans[mode] for mode in close)
        if self.mode != "auto" or close == ["dense"]:
            self._decided = True
            return
        self._candidates = candidates

        def decided(mode, measured):
            session.plan, self._decided, self._candidates = plans[mode], True, None
            self._say(verdict(mode, measured))

        wait = max(0, self._sparse_since + self.density_warmup - session.step)
        trial = Trial(session, plans, close, candidates["dense"], wait, decided, candidates.get("trial"))
        session.watchers.append(trial)

    def _warm_up(self, plans):
        if self.density_warmup and any(plan.buffers for plan in plans):
            warmup = DensityWarmup(self.wish.density, self.density_warmup, self._sparse_since, self._helps)
            self._session.watchers.append(warmup)

    def _say(self, text: str) -> None:
        """Have the first rank of all report it, on all ranks together; what goes wrong there is everyone's error."""
        session = self._session
        first = partial(from_first, partial(self._report, text), session.model_group, session.device)
        from_first(first, session.reducer.group, session.device)

    def state_dict(self) -> dict:
        """Of this rank: what has not been sent ({name: residual (numel,)}), the plan, the step. Every rank saves its own.

        For `torch.save`, and `torch.load` with weights_only. ValueError: not attached. RuntimeError: a step has begun.
        """
        session = self._attached
        session.settle()
        trial = self._trial
        return {
            "version": VERSION,
            "ranks": session.reducer.group.size(),
            "rank": session.reducer.group.rank(),
            "part": part_of(session.model_group),
            "orders": orders_of(self._door.parameters),
            "step": session.step,
            "sparse_since": self._sparse_since,
            "budget": self.wish.budget,
            "plan": session.plan.to_json() if self._decided and not session.unproved else None,
            "candidates": trial and {**self._candidates, "trial": trial.progress},
            "half_scale": session.reducer.half_scale.value,
            "residuals": {name: residual.clone() for name, residual in session.reducer.residuals.items()},
        }

    def load_state_dict(self, state) -> None:
        """Go on, all ranks together, from `state_dict`: this rank's, or, if there were others, the list of all of their own.

        From a list every rank takes the mean of all residuals, so that what is pending is applied all the same. The saved
        plan is kept, unless other options are asked for now, it would not help among these ranks, or the mode is auto on
        another number of ranks: then there will be a new one. ValueError: a state of something else, of other parameters, of
        another number of ranks, another rank or part of the model; a list that lacks one, or has them of different steps, or
        is given on some ranks only; on any rank, on all of them.
        """
        session, found = self._attached, []
        group, ranks = session.reducer.group, session.reducer.group.size()

        def check():
            found.extend(checked_states(state, group, self._door.parameters, part_of(session.model_group)))
            has = " and ".join(what for what in ("plan", "candidates") if found[0][what])
            return f"{'its own state' if isinstance(state, Mapping) else 'the list of all states'}, with {has or 'no plan'}"

        self._agree(session.model_group, lambda: self._agree(group, check))
        one, count = found[0], found[0]["ranks"]
        texts = [one["plan"], *(one["candidates"] or {"plans": {}})["plans"].values()]
        plan, *undecided = [text and Plan.from_json(text) for text in texts]
        self._stop_watching()
        session.restore(one["step"], mean_residuals(found, session.device), one.get("half_scale", 1.0))
        self._sparse_since = one["sparse_since"]
        if ranks == 1 or (count != ranks and self.mode == "auto"):
            self.replan()
        elif plan and self._wants(plan, one["budget"]):
            session.plan, self._decided = plan.among(ranks), True
            self._warm_up([session.plan])
        elif undecided and self.mode == "auto" and all(self._wants(each, one["budget"]) for each in undecided):
            self._take(one["candidates"])
        else:
            self.replan()
        session.unproved = self._compare
        session.prove()
        if not (one["plan"] or undecided):  # then the next step was to be watched, or ranks to be compared in it
            session.unproved = self._compare

    def _wants(self, plan, budget) -> bool:
        """Whether a saved plan is what is asked for now, of these parameters, and helps."""
        wish = Wish(plan.density, plan.sparsifier, plan.wire, budget)
        helps = not plan.buffers or self._helps(plan.density)
        return wish == self.wish and self.mode in ("auto", plan.mode) and helps and plan.fits(self._session.sizes)


def _unmarked(parameter) -> bool:
    return not any(getattr(parameter, mark, False) for mark in ("tensor_model_parallel", "model_parallel"))
