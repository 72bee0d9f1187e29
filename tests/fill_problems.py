"""Random frozen work and idle time, for hypothesis."""

from itertools import pairwise

from hypothesis import strategies as st

from passes.comparison.published import exact, greedy
from passes.costs.layer import FrozenComponent, Points, layer_points
from passes.fill.per_device import no_fill, per_device
from passes.fill.problem import FillProblem
from passes.fill.result import Fill
from tests.fill_check import placed

LAUNCH = st.sampled_from((0.0, 0.0005, 0.003, 0.02))
SAMPLE = st.sampled_from((0.0, 0.0002, 0.001, 0.004))
PAPER = (4, 8, 12, 16, 24, 32, 48, 64, 96)


def affine(launch_seconds: float, sample_seconds: float) -> Points:
    """A layer of `launch_seconds` and `sample_seconds` for every sample."""
    return (1, launch_seconds + sample_seconds), (2, launch_seconds + 2 * sample_seconds)


@st.composite
def layers(draw: st.DrawFn) -> Points:
    """Launch and time per sample, or measured at a few sizes, with steps and plateaus."""
    if draw(st.booleans()):
        return affine(draw(LAUNCH), draw(SAMPLE))
    sizes = draw(st.sets(st.integers(1, 48), min_size=1, max_size=4))
    return layer_points({n: draw(LAUNCH) + n * draw(SAMPLE) for n in sizes})


@st.composite
def intervals(draw: st.DrawFn, pipeline_seconds: float, most: int = 4) -> tuple[tuple[float, float], ...]:
    """Idle intervals on a grid of 2.5 ms, so that ranks often change together; some reach the pipeline's end."""
    ticks = int(pipeline_seconds / 0.0025)
    times = sorted(draw(st.sets(st.integers(0, ticks), max_size=2 * most)))
    return tuple((a * 0.0025, pipeline_seconds if b == ticks else b * 0.0025) for a, b in list(pairwise(times))[::2])


@st.composite
def components(
    draw: st.DrawFn, num_ranks: int, most: int, most_layers: int, anywhere: bool
) -> tuple[FrozenComponent, ...]:
    """A random graph; some run in parts; unless `anywhere`, some components have few ranks, or run whole."""
    found: list[FrozenComponent] = []
    for index in range(draw(st.integers(0, most))):
        depends = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        ranks, whole = None, False
        if not anywhere and draw(st.integers(0, 3)) == 0:
            ranks = tuple(sorted(draw(st.sets(st.integers(0, num_ranks - 1), min_size=1))))
        if not anywhere and draw(st.integers(0, 7)) == 0:
            whole = True
        own = tuple(draw(layers()) for _ in range(draw(st.integers(0, most_layers))))
        most_at_once = draw(st.sampled_from((None, None, 1, 3, 16)))
        found.append(FrozenComponent(f"c{index}", own, tuple(sorted(depends)), ranks, whole, most_at_once))
    return tuple(found)


@st.composite
def problems(
    draw: st.DrawFn,
    most_ranks: int = 4,
    most_components: int = 3,
    most_layers: int = 5,
    most_samples: int = 40,
    anywhere: bool = False,
) -> FillProblem:
    """Any problem of these sizes."""
    num_ranks = draw(st.integers(1, most_ranks))
    pipeline = draw(st.sampled_from((0.0, 0.03, 0.0625, 0.2)))
    return FillProblem(
        pipeline_seconds=pipeline,
        idle=tuple(draw(intervals(pipeline)) for _ in range(num_ranks)),
        components=draw(components(num_ranks, most_components, most_layers, anywhere)),
        batch_size=draw(st.integers(1, most_samples)),
        min_bubble_seconds=draw(st.sampled_from((0.0, 0.002, 0.01))),
        local_batches=draw(st.sampled_from((tuple(range(1, 97)), PAPER, (2,), ()))),
        partial=draw(st.integers(0, 4)) > 0,
    )


FILLERS = {"none": no_fill, "greedy": greedy, "exact": exact, "per-device": per_device}


def fill(problem: FillProblem, how: str = "per-device") -> Fill:
    """The frozen work in the idle time, by one of `FILLERS`."""
    return FILLERS[how](problem)


def holders(problem: FillProblem, fill: Fill, component: int) -> tuple[tuple[int, int, int], ...]:
    """Who ends up with a component's results: (first sample, last sample, rank), by sample."""
    last = len(problem.components[component].layers)
    ends = [(rank, p) for rank, _, p in placed(fill) if p.component == component and p.last_layer == last]
    return tuple(sorted((p.first_sample, p.last_sample, rank) for rank, p in ends))
