"""The order of every rank's actions, from the traced stages: a named one, or one found for these very stages.

stages, times, transfers, memory    ->    one pipeline's schedule, and a bound on what any could reach
                                    ->    the same for every pipeline, with the reductions over them
"""

from dataclasses import dataclass, replace

from fxpipe.block_graph import BlockGraph
from fxpipe.cluster import Cluster
from fxpipe.schedule import Schedule, Work
from fxpipe.staged import Staged
from passes.estimate import BlockTimes, Lags, action_seconds, recomputed_seconds, stage_seconds
from passes.placement.replicas import tile
from passes.room import Room, saved_bytes
from passes.schedules.bounds import lower_bound_ticks
from passes.schedules.job_shop import job_shop
from passes.schedules.named import make_schedule
from passes.schedules.problem import Problem, peak_bytes
from passes.schedules.synthesis import Synthesis, synthesise


@dataclass(frozen=True)
class Resources:
    """What an order may use: times of blocks, links, and on every place of a pipeline bytes for saved activations.

    `saved_bytes` are per stage, held by one micro-batch from its forward to its last gradient. Of the room,
    `ahead_bytes` had better be left to frozen work of the next batch.
    """

    times: BlockTimes
    cluster: Cluster
    saved_bytes: tuple[int, ...]
    room_bytes: tuple[int, ...] | None = None
    ahead_bytes: tuple[int, ...] = ()

    @staticmethod
    def of(room: Room, staged: Staged, times: BlockTimes, cluster: Cluster, limit: int | None) -> "Resources":
        """With what a memory limit leaves; unlimited where stages differ in their replicas."""
        saved = saved_bytes(room.costs, staged, times.num_samples)
        if limit is None or not _pipelines(staged):
            return Resources(times, cluster, saved)
        at = staged, _places(staged), times.num_samples
        return Resources(times, cluster, saved, room.for_activations(*at, limit), room.for_ahead(*at))


@dataclass(frozen=True)
class Ordered:
    """A schedule of all ranks, and what is known about that of one pipeline (None: pipelines differ)."""

    schedule: Schedule
    known: Synthesis | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        return () if self.known is None else (f"one pipeline's schedule {self.known}",)


def order(
    graph: BlockGraph, staged: Staged, work: Work, resources: Resources, budget_seconds: float | None = None
) -> Ordered:
    """The order for `staged`: the one it is named after, or with a budget the best that is found in that time.

    Args:
        work: of all micro-batches.
    """
    times = resources.times
    pipelines = _pipelines(staged)
    if not pipelines or work.num_microbatches % len(pipelines):
        schedule = make_schedule(
            staged.schedule, work, staged.stage_ranks, stage_seconds(staged, times.forward),
            recomputed_seconds(staged, times), frozen_seconds=times.components,
            frozen_ranks=staged.frozen_ranks, world_size=staged.world_size,
        )  # fmt: skip
        return Ordered(schedule, None)
    problem = _problem(
        graph, staged, replace(work, num_microbatches=work.num_microbatches // len(pipelines)), resources
    )
    if budget_seconds is None or problem.num_ranks == 1:
        known = _named(problem, staged.schedule)
    else:
        known = synthesise(_asked(problem, staged, resources), budget_seconds)
        if staged.recompute:
            known = replace(known, method=f"{known.method}, of orders with whole backwards")
    return Ordered(tile(known.schedule, pipelines, problem.work), known)


def _pipelines(staged: Staged) -> list[tuple[int, ...]]:
    """The ranks of every pipeline, place by place; none where stages differ in their replicas."""
    if len(set(map(len, staged.stage_ranks))) > 1:
        return []
    found = [tuple(dict.fromkeys(ranks)) for ranks in zip(*staged.stage_ranks, strict=True)]
    covered = sorted(rank for pipeline in found for rank in pipeline)
    return found if covered == list(range(staged.world_size)) else []


def _place_of(staged: Staged) -> dict[int, int]:
    """The place of every rank of the first pipeline."""
    return {rank: place for place, rank in enumerate(_pipelines(staged)[0])}


def _places(staged: Staged) -> tuple[int, ...]:
    """The place of every stage in a pipeline."""
    places = _place_of(staged)
    return tuple(places[ranks[0]] for ranks in staged.stage_ranks)


def _problem(graph: BlockGraph, staged: Staged, work: Work, resources: Resources) -> Problem:
    times = resources.times
    places = _places(staged)
    seconds = action_seconds(staged, times)
    frozen = staged.frozen_places(_place_of(staged)) if work.num_components else ()
    return Problem(
        work,
        places,
        seconds | ({"T": times.components} if work.num_components else {}),
        max(places) + 1,
        Lags(graph, staged, times.num_samples, resources.cluster),
        resources.saved_bytes if resources.room_bytes is not None else (),
        resources.room_bytes,
        frozen,
    )


def _asked(problem: Problem, staged: Staged, resources: Resources) -> Problem:
    """What is searched for: no recomputed backward in two parts, for what the first computes again would be held until
    the second; and room for frozen work of the next batch, as far as the named order leaves it."""
    seconds = {kind: each for kind, each in problem.seconds.items() if not staged.recompute or kind not in "IW"}
    if resources.room_bytes is None:
        return replace(problem, seconds=seconds)
    needed = peak_bytes(problem, _named(problem, staged.schedule).schedule)
    left = zip(resources.room_bytes, resources.ahead_bytes, needed, strict=True)
    room = tuple(max(room - ahead, named) for room, ahead, named in left)
    return replace(problem, seconds=seconds, memory_limit_bytes=room)


def _named(problem: Problem, name: str) -> Synthesis:
    """A schedule by its name, held against the lower bound."""
    seconds, work = problem.seconds, problem.work
    schedule = make_schedule(
        name, work, problem.stage_rank, seconds["F"], seconds["B"],
        frozen_seconds=seconds.get("T", ()), frozen_ranks=problem.frozen_ranks, world_size=problem.num_ranks,
    )  # fmt: skip
    timeline = problem.simulate(schedule)
    shop = job_shop(problem, problem.splittable, relaxed=True)
    made = timeline.makespan_seconds
    bound = min(lower_bound_ticks(shop) * shop.seconds_per_tick, made)
    return Synthesis(schedule, made, bound, made / bound - 1 if bound else 0.0, timeline.bubble_ratio, "its name")
