"""A compiled sampler: a user's pipeline or denoiser, spread over ranks, and what they inspect of it.

sampler.pipeline()(prompt="...")     the user's own loop; its denoiser's calls are spread
  pipe.unet(sample, t, text)    ->   Spread: programs for this kind of call   ->   ranks   ->   the whole prediction
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxpipe.capture import Capture
from fxpipe.capture.changed import called
from fxpipe.capture.reach import reached
from fxpipe.cluster import Cluster
from fxpipe.costs.model import CostModel
from fxpipe.errors import CompileError, FxpipeError
from fxpipe.models.pipelines import own_schedulers, recorded_call, shell, with_components, with_submodule
from fxpipe.options import check_counts, given_cluster, held_cost_model
from fxpipe.plan.rank_program import Traffic
from fxpipe.plan.sample_grid import Grid
from fxpipe.plan.sample_plan import SamplePlan
from fxpipe.plan.sample_quality import Quality
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.timeline import Timeline
from fxpipe.plan.transport import T
from fxpipe.run.patched import finished
from fxpipe.run.ranks import Ranks
from fxpipe.sampling.calibration import Calibration, ExchangeRecorder, calibrated, made_of
from fxpipe.sampling.quality import measured, same_draws
from fxpipe.sampling.spread import Spread
from fxpipe.sampling.step import SampleStep, Traced
from fxpipe.simulate import timeline

Call = Mapping[str, Any] | Callable[[Callable[..., Any]], Any]
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 5e-5}
"""Of one call, relative to the prediction's largest value; rounding alone gave 9e-14 and, in one of 47 models, 5e-5."""

_MOST_EXACT = 4
"""Steps that verify makes before a displaced one: of every form that there may be, one or two."""


@dataclass(frozen=True)
class SampleVerification:
    """The largest difference from the uncompiled model, relative to its largest value.

    `displaced`: that of a displaced step with norms of one's own patch alone, which is not exact by design, and so
    counts for nothing in `ok`; None in any other mode, whose steps are all in `error`.
    """

    error: float
    tolerance: float
    dtype: torch.dtype
    layout: str
    displaced: float | None = None

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance

    def __str__(self) -> str:
        what = "exact" if self.ok else "NOT EXACT"
        where = f"{self.layout}, {str(self.dtype).removeprefix('torch.')}"
        told = f"{what}: prediction {self.error:.1e} off one device's, tolerance {self.tolerance:.0e} ({where})"
        if self.displaced is None:
            return told
        return f"{told}; {self.displaced:.1e} in displaced steps, whose norms are separate"


def _called(function: Callable[..., Any], step: SampleStep, args: Any, kwargs: Any) -> Any:
    """What a call gives, which has lists and caches of its own: forward may empty those that it is given, or fill."""
    inputs = step.traced.captured.inputs
    tensors, _ = inputs.bind(args, kwargs)
    return called(function, inputs.signature, *inputs.rebuild([*tensors.values()]))


def _off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    if not wanted.numel():
        return 0.0
    wide = torch.promote_types(wanted.dtype, torch.float32)
    scale = float(wanted.to(wide).abs().max()) or 1.0
    return float((found.to(wide) - wanted.to(wide)).abs().max()) / scale


def _least_precise(traced: Traced, dtype: torch.dtype) -> torch.dtype:
    """Of the types that values made from rows have, down to the prediction's: patches sum in another order there."""
    inputs = traced.captured.graph.find_nodes(op="placeholder")
    rows = [node for node in inputs if node.meta["kind"] == "input" and node.meta["input"] in traced.rows]
    values = [node.meta.get("val") for node in reached(rows, lambda node: node.users)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    used = {value.dtype.to_real() for value in tensors if value.is_floating_point() or value.is_complex()}
    return max((dtype, *used), key=lambda found: _TOLERANCES.get(found, 5e-2))


@dataclass(frozen=True, eq=False)
class Sampler:
    """The result of `fxpipe.compile_sampler`.

    `denoiser` predicts; `decoder` is the VAE's, spread by the same passes. `example` is the call of the denoiser that
    was compiled for; calls of other shapes are compiled when they come, as are those of the pipeline's `others`, by
    name: denoisers of later steps.
    """

    model: Any
    name: str | None
    denoiser: Spread
    others: Mapping[str, Spread]
    decoder: Spread | None
    example: tuple[tuple[Any, ...], dict[str, Any]]
    ranks: Ranks
    cluster: Cluster

    @property
    def step(self) -> SampleStep:
        """The programs for calls like the example."""
        return self.denoiser.step(*self.example)

    @property
    def grid(self) -> Grid:
        return self.step.grid

    @property
    def plan(self) -> SamplePlan:
        """Which rank has which samples, stages and patches of calls like the example, and why."""
        return self.step.plan

    @property
    def requests(self) -> int:
        """How many calls like the example are joined in the one that was compiled for."""
        return self.plan.expects.requests if self.plan.expects else 1

    @property
    def schedule(self) -> Schedule:
        """The order of a steady step."""
        return self.plan.step

    @property
    def capture(self) -> Capture:
        return self.step.traced.captured

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the denoiser on all ranks: what its forward returns. Inside `call()` it is the next step."""
        return self.denoiser(*args, **kwargs)

    def call(self) -> AbstractContextManager[None]:
        """Around the steps of a loop of one's own, which belong together, as those of a pipeline's call do. Until it
        ends, `predict` is its next step on any thread; other calls of other threads wait, and end with an error where
        nothing is predicted for half an hour."""
        return self.ranks.call(for_all=True)

    def pipeline(self) -> Any:
        """The user's pipeline, same call, scheduler and callbacks, with its denoiser spread over the ranks.

        It is a shallow copy: schedulers, encoders and weights are shared; a deep copy of it has its own, and programs
        of its own. Under torchrun every rank runs the same script, and every rank gets the whole result.
        """
        if self.name is None:
            raise CompileError(f"{type(self.model).__name__} is no pipeline; call sampler.predict as its forward")
        spread = {self.name: self.denoiser, **self.others}
        parts: dict[str, object] = {name: shell(one.module, one, one.of_copy) for name, one in spread.items()}
        if self.decoder is not None:
            decoder = shell(self.decoder.module, self.decoder, self.decoder.of_copy)
            parts["vae"] = with_submodule(self.model.vae, "decoder", decoder)
        return with_components(self.model, parts, self._call, finished)

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Around a call of the pipeline: where it fails, what it may have looked for is told."""
        with self.ranks.call():
            try:
                yield
            except FxpipeError:
                raise
            except Exception as error:
                for text in sorted(set[str]().union(*(one.kept for one in (self.denoiser, *self.others.values())))):
                    error.add_note(text)
                raise

    def prepare(self, **call: Any) -> SampleStep:
        """The programs for a call of the pipeline, before it comes: it ends where it calls its denoiser. Collective
        over the ranks of a launch.

        Raises:
            CompileError: there can be none, or the call fails before.
        """
        if self.name is None:
            raise CompileError(f"{type(self.model).__name__} is no pipeline; its programs are made when it is called")
        name, args, kwargs = recorded_call(self.model, [self.name, *self.others], call)
        return (self.denoiser if name == self.name else self.others[name]).step(args, kwargs)

    def release(self) -> int:
        """Let go of the denoiser's weights that this rank of a launch does not read, as `stages=` leaves it its
        stage's alone; how many bytes that frees.

        Kinds of calls that were made, or prepared, go on; another that reads what is gone ends with an error, and so
        does running or saving the denoiser itself. In one process all ranks' weights stay, and it is 0.
        """
        if self.ranks.rank is None:
            return 0
        return sum(one.release(self.ranks.rank) for one in (self.denoiser, *self.others.values()))

    def calibrate(self, call: Call, slower: float = 0.05) -> Calibration:
        """Keep those exchanges of displaced steps fresh that change much in a call and take little time.

        The call is made once, on one device (under torchrun on every rank's); rank 0's measurements count. What is kept
        is part of `plan`, and holds for calls like this one, of pipelines made before, too.

        Args:
            call: arguments of the pipeline's call; or a function that runs a loop of one's own, given what predicts in
                it. Generators in it are used.
            slower: by how much a steady step may get longer, as predicted: 0.05 for 5 %; 0 keeps none, inf all. None
                gets longer than an exact one.

        Raises:
            CompileError: the plan has nothing that could be kept fresh, or the call has a single step.
        """
        if not isinstance(slower, int | float) or not slower >= 0:
            raise CompileError(
                f"slower={slower!r} is a share of a step's time: give 0.05 for 5 %, or another from 0 on"
            )
        recorder = ExchangeRecorder(self.denoiser)
        with recorder.streams.call():
            self._called(call, recorder)

        def found() -> tuple[Calibration, SamplePlan]:
            changes = recorder.changes()
            assert recorder.step is not None
            given = recorder.keys, changes, recorder.num_steps, slower, self.cluster
            return calibrated(self.denoiser, recorder.step, *given)

        with self.ranks.compiling({"steps": recorder.num_steps, "slower": slower}):
            calibration, plan = self.ranks.of_rank_zero(found)
        assert recorder.step is not None
        self.denoiser.adopt(made_of(self.denoiser, recorder.step, plan, self.ranks))
        for other in self.others.values():  # as where the plan is loaded
            other.follow(plan)
        return calibration

    def measure(self, call: Call, most: int = 6) -> Quality:
        """How near to one device's result the ways to sample a call are, beside what they are predicted to take.

        The call is made on one device (under torchrun on every rank's), then by this sampler's plan, by the fastest
        exact layout, and by the `most` fastest of the others that the planner considers; each is compiled for it.

        Args:
            call: as for `calibrate`, but made several times: generators among a pipeline's arguments are left as they
                are, a function makes its own.

        Raises:
            CompileError: the call has steps of several kinds, begins with other numbers when it is made again, or
                returns none.
        """
        check_counts(most=most)
        state = torch.get_rng_state()

        def run(predict: Callable[..., Any]) -> Any:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                return self._called(same_draws(call) if isinstance(call, Mapping) else call, predict)

        return measured(self.denoiser, run, most)

    def _called(self, call: Call, predict: Callable[..., Any]) -> Any:
        """What a call returns, its denoiser's calls made by `predict`."""
        if not isinstance(call, Mapping):
            if not callable(call):
                raise CompileError(f"call is a {type(call).__name__}; give a pipeline's arguments, or a function")
            return call(predict)
        if self.name is None:
            raise CompileError(
                f"{type(self.model).__name__} is no pipeline: instead of a pipeline's arguments give a function of "
                "what predicts, with a loop of your own"
            )
        parts: dict[str, object] = {self.name: shell(self.denoiser.module, predict)}
        return with_components(self.model, parts | own_schedulers(self.model))(**call)

    def broadcast(self, value: T) -> T:
        """Collective over the ranks of a launch: rank 0's value, on every rank."""
        return self.ranks.broadcast(value)

    def verify(self, *args: Any, **kwargs: Any) -> SampleVerification:
        """One call of all ranks against the uncompiled model; the example where no arguments are given.

        In displaced mode the same call is made again after the exact steps, up to four of them: where nothing changes
        between steps, what was so a step before is what is so now, and all predictions are exact. With norms that are
        "separate" the displaced one is not: its distance is told, and the exact steps are judged.
        """
        if not args and not kwargs:
            args, kwargs = self.example
        step = self.denoiser.step(args, kwargs)
        with torch.no_grad():
            wanted = step.traced.returned.tensor(_called(self.denoiser.module, step, args, kwargs))
        if wanted.is_meta:
            raise CompileError("a denoiser on the meta device has no weights, and predicts nothing to compare; load it")
        found = [step.traced.returned.tensor(one) for one in self._again(step, args, kwargs)]
        if found[-1].dtype != wanted.dtype:
            raise CompileError(
                f"ranks predict in {found[-1].dtype}, the denoiser in {wanted.dtype}: please report this"
            )
        parts = step.traced.returned.parts
        errors = [max(_off(*pair) for pair in zip(parts(one), parts(wanted), strict=True)) for one in found]
        displaced = errors.pop() if "displaced" in step.forms and step.plan.how.norms == "separate" else None
        computed = _least_precise(step.traced, wanted.dtype)
        return SampleVerification(max(errors), _TOLERANCES.get(computed, 5e-2), computed, step.plan.layout, displaced)

    def _again(self, step: SampleStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """What a few equal steps predict, the last of them displaced where there are such."""
        is_displaced = "displaced" in step.forms
        first = max(step.warmup - _MOST_EXACT, 0) if is_displaced else 0
        with self.call():
            self.ranks.begin_at(first, step, "verify")
            return [
                _called(lambda *a, **k: self.denoiser.predict(step, a, k, "verify"), step, args, kwargs)
                for _ in range(first, step.warmup + 1 if is_displaced else 1)
            ]

    def traffic(self, form: str = "fresh") -> Traffic:
        """Bytes of one call of the denoiser, by directed channel and by kind; of one of `step.forms`."""
        if form not in self.step.forms:
            raise CompileError(f"form={form!r}: the programs have the forms {', '.join(self.step.forms)}")
        return Traffic(self.step.messages_of[form])

    def simulate(
        self, steps: int = 1, cluster: Cluster | str | None = None, cost_model: CostModel | None = None
    ) -> Timeline:
        """Predict the denoiser's part of a call from the programs of all ranks: time, traffic and memory of each.

        Args:
            steps: of the call, from its first; what follows displaced ones is as long as the last of them.
            cluster: seconds of transfers, a `Cluster` or its text; the one compiled for where left out.
            cost_model: seconds of operations, such as `cost_models.timed.Timed()`, which times them here; the one
                compiled for where left out.
        """
        network = given_cluster(self.cluster if cluster is None else cluster, self.plan.world_size)
        check_counts(steps=steps)
        model = None if cost_model is None else held_cost_model(cost_model)
        ops = self.denoiser.lowering.ops(self.step, steps, model, network.keeps_sent)
        return timeline(ops, network)

    def trace(self, path: str | Path, steps: int = 1) -> Path:
        """Write what `simulate` predicts as a Chrome trace, for Perfetto."""
        from fxpipe.show.trace_format import write_trace

        return write_trace(self.simulate(steps), path)

    def dump(self, directory: str | Path) -> Path:
        """Write plan, rows, traffic and every rank's program as readable Python."""
        from fxpipe.show.dump import dump_sampler

        return dump_sampler(self, Path(directory))

    def report(self, path: str | Path, steps: int = 1, quality: Quality | None = None) -> Path:
        """Write what is predicted of a call's first steps as one HTML page: timeline, load, memory, traffic, plan; and
        PSNR against latency, where `quality` has been measured."""
        from fxpipe.show.report import write_sample_report

        check_counts(steps=steps)
        return write_sample_report(self, path, steps, quality)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be known: of the plan, and of what runs whole."""
        whole = (one.whole for one in [self.decoder] if one is not None and one.whole)
        return (*self.plan.notes, *whole)

    def close(self) -> None:
        """Leave the network, where this process is one rank of a launch."""
        self.ranks.close()

    def __str__(self) -> str:
        forms = [form for form in ("fresh", "displaced") if form in self.step.forms]
        moved = (f"traffic of a {form} step: {self.traffic(form).moved}" for form in forms)
        whole = (f"note: {one.whole}" for one in [self.decoder] if one is not None and one.whole)
        return "\n".join([str(self.capture), self.plan.summary(), *moved, *whole])
