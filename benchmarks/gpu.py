"""A GPU beside what is predicted of it: seconds of blocks and of steps, and memory, at full size in bfloat16.

    python benchmarks/gpu.py                                  Stable Diffusion 2.1's whole step, SDXL's U-Net
    python benchmarks/gpu.py sd21 --batch-sizes 4,16 --profile sd21.json
    python benchmarks/gpu.py sd21 --parts steps --inductor    stage graphs by Inductor, too: minutes of compiling
    python benchmarks/gpu.py sdxl --parts memory denoiser

blocks    sums over all blocks and frozen layers, each run apart in float32 weights under autocast, predicted by the
          device's roofline as planners use it and measured
steps     plain torch (forward, backward), and one rank's program, in one micro-batch and in four; of one sample, for
          which the GPU waits for the host; operation by operation, and as CUDA graphs
memory    the allocator's peak in a step without an optimizer, of batches that are predicted to need 40 and 80 % of it,
          the last also in four micro-batches; not after other parts, whose recorded graphs hold memory of their own
denoiser  SDXL's, in float16: a step of two samples at 1024x1024 and 2048x2048, plain and by a sampler of one rank
ranks     the same denoiser's, by the program of one of 2, 4 and 8 ranks whose messages are there at once: how long a
          rank computes where it is given a part of the rows, operation by operation and as CUDA graphs

Weights are random. Timings are medians.
"""

import argparse
import gc
import itertools
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compile_sd21 import StableDiffusion21Step
from diffusers import UNet2DConditionModel
from planning import SDXL
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils import _pytree as pytree

import fxpipe
from cost_models import profile_files, timing
from cost_models.devices import DEVICES
from fxpipe.analysis import given_cost_model
from fxpipe.capture.inputs import call_of
from fxpipe.plan.transport import Pending
from fxpipe.profiling import Profiler
from fxpipe.run.sampling import BoundProgram, SampleRun
from fxpipe.run.transport import InProcessTransport
from fxpipe.run.transport.mailboxes import Mailboxes

MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sd21": (StableDiffusion21Step, "2,8,16"),
    "sdxl": (lambda: UNet2DConditionModel(**SDXL), "1,2,4"),
}
GPU = torch.device("cuda", 0)
TOTAL, USED = torch.cuda.get_device_properties(GPU).total_memory, (0.4, 0.8)
PARTS = "blocks", "steps", "memory", "denoiser", "ranks"
ROUNDS, WARM_UP, STEPS = 6, 2, 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all where left out")
    parser.add_argument("--batch-sizes", help="to time blocks at; the largest is a step's")
    parser.add_argument("--device-model", help="that predicts; the GPU's own where left out")
    parser.add_argument("--profile", type=Path, help="write the measured blocks to this file")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["blocks", "steps"])
    parser.add_argument("--inductor", action="store_true")
    options = parser.parse_args()
    known = options.device_model or own_model()
    for name in options.models or MODELS:
        sizes = [int(size) for size in (options.batch_sizes or MODELS[name][1]).split(",")]
        measured = Measured(name, sizes, known)
        if "memory" in options.parts:
            measured.memory()
        if "blocks" in options.parts:
            measured.blocks(options.profile)
        if "steps" in options.parts:
            measured.steps(options.inductor)
    if "denoiser" in options.parts:
        denoiser(known)
    if "ranks" in options.parts:
        ranks(known)


def own_model() -> str:
    """The GPU's name among those that fxpipe knows."""
    name = torch.cuda.get_device_name(GPU)
    print(f"{name}, torch {torch.__version__}")
    return next(known for known in DEVICES if known.partition("-")[0] in name)


class Measured:
    """One model and its programs, all of one capture."""

    def __init__(self, name: str, sizes: list[int], known: str) -> None:
        torch.manual_seed(0)
        self.name, self.sizes, self.known = name, sizes, f"{known}@bfloat16"
        with GPU:
            self.model, self.size = MODELS[name][0](), max(sizes)
        self.cache = tempfile.TemporaryDirectory()

    def _compiled(self, batch_size: int, microbatches: int = 1, backend: str = "eager") -> fxpipe.Program:
        return fxpipe.compile(
            self.model, 1, batch_size=batch_size, microbatches=microbatches, precision="bf16", schedule="1f1b",
            fill="none", recompute=False, cost_model=self.known, memory_limit="10TiB", cache=Path(self.cache.name),
            backend=backend, device="cuda", observe=lambda name, artefact: None,
        )  # fmt: skip

    def blocks(self, out: Path | None) -> None:
        """Sums over parts, and how far single ones are from their sum."""
        step = self._compiled(self.size).costed
        profiler = Profiler(step, self.sizes, GPU)
        for _ in range(ROUNDS):
            profiler.round()
        profile = profiler.profile()
        if out is not None:
            profile_files.save(profile, out)
        table = titled(f"{self.name}: ms by {self.known}, predicted / measured", "samples", "frozen", "forward",
                       "backward", "all", "single ones, middle 80 %")  # fmt: skip
        models = given_cost_model(self.known), profile
        for size in self.sizes:
            both = [model.seconds(step.costs, size) for model in models]
            taken = np.zeros((len(profile.entries), 2, 2))  # by part; forward, backward; predicted, measured
            for row, entry in zip(taken, profile.entries, strict=True):
                at = step.costs.positions(entry.nodes)
                row[:] = np.transpose([[part[at].sum() for part in (one.forward, one.backward)] for one in both])
            frozen = np.array([not any(entry.backward_seconds) for entry in profile.entries])
            sums = taken[frozen, 0].sum(0), taken[~frozen, 0].sum(0), taken[:, 1].sum(0), taken.sum((0, 1))
            low, high = np.quantile(np.divide(*taken.sum(1).T), (0.1, 0.9))
            cells = [f"{1e3 * p:.1f} / {1e3 * m:.1f} {p / m - 1:+.0%}" if m else "" for p, m in sums]
            table.add_row(str(size), *cells, f"{low:.2f} to {high:.2f}")
        Console(width=140).print(table)

    def steps(self, inductor: bool) -> None:
        size = self.size
        whole, four, tiny = (self._compiled(*batch) for batch in ((size, 1), (size, 4), (1, 1)))
        others = [self._compiled(*batch, "cudagraphs") for batch in ((1, 1), (size, 4))]
        others += [self._compiled(size, 1, "inductor")] if inductor else []
        columns = "samples", "micro-batches", "by", "plain torch", "program", "ratio", "an action"
        table = titled(f"{self.name}: ms of a step", *columns)
        for program in (whole, four, tiny, *others):
            batch, engine = inputs(program), program.local_engine()
            engine.check_batches = False
            plain, taken = medians(lambda b=batch, p=program: plainly(p, b), lambda b=batch, e=engine: e.step(b))
            sizes, actions = program.plan.microbatch_sizes, sum(map(len, program.schedule.ranks))
            cells = str(sum(sizes)), str(len(sizes)), program.step.backend
            numbers = f"{1e3 * plain:.1f}", f"{1e3 * taken:.1f}", f"{taken / plain:.3f}", f"{1e3 * taken / actions:.1f}"
            table.add_row(*cells, *numbers)
        Console(width=140).print(table)

    def memory(self) -> None:
        columns = "samples", "micro-batches", "predicted", "allocated", "error"
        table = titled(f"{self.name}: GiB of {TOTAL / 2**30:.1f}", *columns)
        tiny, whole = self._compiled(1), self._compiled(self.size)
        each = (peak(whole) - peak(tiny)) / (self.size - 1)
        few, many = (int((part * TOTAL - peak(tiny)) / each) + 1 for part in USED)
        for program in (tiny, whole, self._compiled(few), self._compiled(many), self._compiled(many - many % 4, 4)):
            sizes, predicted, found = program.plan.microbatch_sizes, peak(program), allocated(program)
            row = [str(sum(sizes)), str(len(sizes)), f"{predicted / 2**30:.2f}"]
            error = (
                ("out of memory", "") if found is None else (f"{found / 2**30:.2f}", f"{predicted / found - 1:+.1%}")
            )
            table.add_row(*row, *error)
        Console(width=140).print(table)


def denoiser(known: str) -> None:
    """Of a pipeline's call, a step at a time: each waits for the one before, as schedulers do."""
    torch.manual_seed(0)
    with GPU:
        model = UNet2DConditionModel(**SDXL).half().eval().requires_grad_(False)
    columns = "side", "plain torch", "program", "CUDA graphs", "predicted", "GiB allocated", "predicted"
    table = titled("SDXL's denoiser, two samples: ms of a step", *columns)
    for side in (1024, 2048):
        call = denoiser_call(side // 8)
        options = {"example": call, "cfg": 1, "cost_model": f"{known}@float16"}
        sampler, recorded = (fxpipe.compile_sampler(model, 1, backend=by, **options) for by in ("eager", "cudagraphs"))
        with torch.no_grad(), sampler.call(), recorded.call():
            calls = model, sampler.predict, recorded.predict
            plain, taken, replayed = medians(*[lambda c=call, run=one: run(**c) for one in calls])
        del recorded
        gc.collect()
        with sampler.call():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            sampler.predict(**call)
        found, (held,) = sampler.simulate(), sampler.simulate().peak_bytes
        seconds = [f"{1e3 * one:.1f}" for one in (plain, taken, replayed)]
        memory = f"{torch.cuda.max_memory_allocated() / 2**30:.2f}", f"{held / 2**30:.2f}"
        table.add_row(str(side), *seconds, f"{1e3 * found.makespan_seconds:.1f}", *memory)
    Console(width=140).print(table)


class AtOnce(InProcessTransport):
    """A rank whose messages are there as soon as they are asked for; what they say nobody reads."""

    def __init__(self, world_size: int) -> None:
        super().__init__(Mailboxes(world_size, 60), 0)
        self.device = GPU

    def send(self, tensor: torch.Tensor, dst: int, edge: int) -> None:
        pass

    def recv(
        self, src: int, edge: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Pending[torch.Tensor]:
        return Pending(lambda: torch.ones(shape, dtype=dtype, device=GPU))

    def flush(self) -> None:
        pass


def ranks(known: str) -> None:
    torch.manual_seed(0)
    with GPU:
        model = UNet2DConditionModel(**SDXL).half().eval().requires_grad_(False)
    columns = "side", "ranks", "mode", "eager", "CUDA graphs", "predicted, with messages"
    table = titled("SDXL's denoiser, two samples: ms of a rank's step", *columns)
    for side, world_size, mode in itertools.product((1024, 2048), (2, 4, 8), ("exact", "displaced")):
        call = denoiser_call(side // 8)
        sampler = fxpipe.compile_sampler(
            model, world_size, example=call, cfg=1, stages=1, patches=world_size, mode=mode, warmup=1,
            cost_model=f"{known}@float16",
        )  # fmt: skip
        taken = medians(*(rank_step(sampler, call, backend) for backend in ("eager", "cudagraphs")), warm_up=6)
        before, predicted = (sampler.simulate(steps).makespan_seconds for steps in (2, 3))
        milliseconds = [f"{1e3 * one:.1f}" for one in (*taken, predicted - before)]
        table.add_row(str(side), str(world_size), mode, *milliseconds)
    Console(width=140).print(table)


def rank_step(sampler: fxpipe.Sampler, call: dict[str, Any], backend: str) -> Callable[[], object]:
    """A step of the first rank by itself, of the last form that a long call has; the first one is fresh."""
    step, (tensors, _) = sampler.step, sampler.step.traced.captured.inputs.bind((), call)
    bound = BoundProgram(step.program(0), sampler.denoiser.state(step.traced), backend=backend)
    run, inputs, form = SampleRun(AtOnce(step.plan.world_size)), step.bind(tensors), step.sequence(9)[-1]
    return lambda: run.predict(bound, inputs, form)


def denoiser_call(side: int) -> dict[str, Any]:
    def of(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=GPU, dtype=torch.float16)

    added = {"text_embeds": of(2, 1280), "time_ids": of(2, 6)}
    given = {"sample": of(2, 4, side, side), "encoder_hidden_states": of(2, 77, SDXL["cross_attention_dim"])}
    return {**given, "timestep": torch.full((2,), 500, device=GPU), "added_cond_kwargs": added}


def allocated(program: fxpipe.Program) -> int | None:
    """The most bytes at once in a first step; None where there were not enough."""
    for parameter in program.model.parameters():
        parameter.grad = None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        program.local_engine().step(inputs(program))
    except (torch.OutOfMemoryError, fxpipe.RunError):
        return None
    return torch.cuda.max_memory_allocated()


def titled(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def peak(program: fxpipe.Program) -> int:
    (predicted,) = program.simulate(optimizer_bytes=0).peak_bytes
    return predicted


def inputs(program: fxpipe.Program) -> dict[str, Any]:
    """A batch on the GPU, of numbers where the model gives shapes alone."""
    args, kwargs = call_of(program.model.example_inputs(program.step.batch_size))  # type: ignore[operator]
    assert not args
    filled: dict[str, Any] = pytree.tree_map_only(torch.Tensor, _numbers, kwargs)
    return filled


def _numbers(like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, device=GPU) if like.is_floating_point() else torch.zeros_like(like, device=GPU)


def plainly(program: fxpipe.Program, batch: dict[str, Any]) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        loss = program.model(**batch)
    loss.backward()


def medians(*calls: Callable[[], object], warm_up: int = WARM_UP) -> list[float]:
    """Seconds of each, in turns."""
    taken: list[list[float]] = [[] for _ in calls]
    for turn, (call, found) in itertools.product(range(warm_up + STEPS), zip(calls, taken, strict=True)):
        started = timing.now(GPU)
        call()
        found += [timing.now(GPU) - started] if turn >= warm_up else []
    return [statistics.median(found) for found in taken]


if __name__ == "__main__":
    main()
