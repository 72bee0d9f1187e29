"""Schedules: their text, the checker, the simulator and the scheduler."""

import random
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.errors import CompileError, ScheduleError
from fxpipe.plan.actions import Action, Work
from fxpipe.plan.execution import simulate
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.schedule_check import check, require
from passes.schedules.named import make_schedule
from passes.schedules.policies import POLICIES


def chain(num_stages: int, num_microbatches: int, num_components: int = 0) -> Work:
    stages = range(num_stages)
    return Work(
        num_stages,
        num_microbatches,
        num_components,
        backward=frozenset(stages),
        input_grad=frozenset(stages[1:]),
        weight_grad=frozenset(stages),
        edges=frozenset((s, s + 1) for s in stages[:-1]),
        grad_edges=frozenset((s + 1, s) for s in stages[:-1]),
        frozen_edges=frozenset((c, s) for c in range(num_components) for s in stages),
        component_edges=frozenset((c, c + 1) for c in range(num_components - 1)),
    )


@st.composite
def works(draw: st.DrawFn) -> Work:
    """Any stage graph in which values go to later stages: skips, empty stages, stages without gradients."""
    num_stages, num_components = draw(st.integers(1, 6)), draw(st.integers(0, 3))
    subset = st.frozensets(st.integers(0, num_stages - 1))
    empty, backward = draw(subset), draw(subset)
    stages = [stage for stage in range(num_stages) if stage not in empty]
    pairs = [(a, b) for a in stages for b in stages if a < b]
    edges = draw(st.frozensets(st.sampled_from(pairs))) if pairs else frozenset()
    gradients = [(b, a) for a, b in pairs if {a, b} <= backward]
    grad_edges = draw(st.frozensets(st.sampled_from(gradients))) if gradients else frozenset()
    frozen = [(c, stage) for c in range(num_components) for stage in stages]
    components = [(b, a) for a in range(num_components) for b in range(a + 1, num_components)]
    return Work(
        num_stages,
        draw(st.integers(1, 5)),
        num_components,
        empty,
        backward - empty,
        frozenset(b for b, _ in grad_edges),
        draw(subset) & backward - empty,
        edges,
        grad_edges,
        draw(st.frozensets(st.sampled_from(frozen))) if frozen else frozenset(),
        draw(st.frozensets(st.sampled_from(components))) if components else frozenset(),
    )


@given(works(), st.sampled_from(sorted(POLICIES)), st.integers(1, 4), st.data())
@settings(max_examples=400, deadline=None)
def test_every_name_orders_any_work(work: Work, name: str, world_size: int, data: st.DataObject) -> None:
    ranks = data.draw(st.lists(st.integers(0, world_size - 1), min_size=work.num_stages, max_size=work.num_stages))
    seconds = st.lists(st.integers(0, 5).map(float), min_size=work.num_stages, max_size=work.num_stages)
    schedule = make_schedule(name, work, ranks, data.draw(seconds), data.draw(seconds), world_size=world_size)
    assert check(schedule, work, world_size) == []
    assert Schedule.parse(schedule.text()) == schedule
    assert schedule.stage_ranks == tuple(() if s in work.empty else (rank,) for s, rank in enumerate(ranks))
    assert str(schedule).startswith(f"schedule {name}: ")
    for rank, actions in enumerate(schedule.ranks):
        frozen = [action for action in actions if action.kind == "T"]
        assert list(actions[: len(frozen)]) == frozen
        assert [a.microbatch for a in frozen] == sorted(
            m for m in range(work.num_microbatches) for _ in range(work.num_components) if m % world_size == rank
        )


def can_run(schedule: Schedule, work: Work) -> bool:
    """Whether program order and dependencies have no cycle, written without the product's own tables."""
    where = {str(action) for actions in schedule.ranks for action in actions}
    graph: dict[str, set[str]] = {name: set() for name in where}
    for actions in schedule.ranks:
        for earlier, later in pairwise(actions):
            graph[str(later)].add(str(earlier))
    for m in range(work.num_microbatches):
        pairs = [(f"{a}F{m}", f"{b}F{m}") for a, b in work.edges]
        pairs += [(f"{a}F{m}", f"{a}{k}{m}") for a in work.backward for k in "BI"]
        pairs += [(f"{a}I{m}", f"{a}W{m}") for a in work.backward]
        pairs += [(f"{b}{k}{m}", f"{a}{j}{m}") for b, a in work.grad_edges for k in "BI" for j in "BI"]
        pairs += [(f"{c}T{m}", f"{s}F{m}") for c, s in work.frozen_edges]
        pairs += [(f"{c}T{m}", f"{d}T{m}") for c, d in work.component_edges]
        for before, after in pairs:
            if before in where and after in where:
                graph[after].add(before)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    return True


@given(works(), st.sampled_from(["1f1b", "zero-bubble"]), st.integers(1, 3), st.integers(0, 6), st.randoms())
@settings(max_examples=400, deadline=None)
def test_a_shuffle_is_accepted_when_it_can_run(
    work: Work, name: str, world_size: int, num_swaps: int, chance: random.Random
) -> None:
    stage_rank = [chance.randrange(world_size) for _ in range(work.num_stages)]
    ones = [1.0] * work.num_stages
    schedule = make_schedule(name, work, stage_rank, ones, ones, world_size=world_size)
    ranks = [list(actions) for actions in schedule.ranks]
    for _ in range(num_swaps):
        actions = chance.choice(ranks)
        if len(actions) > 1:
            i = chance.randrange(len(actions) - 1)
            actions[i], actions[i + 1] = actions[i + 1], actions[i]
    shuffled = Schedule(name, work.num_stages, work.num_microbatches, tuple(map(tuple, ranks)))
    assert (check(shuffled, work, world_size) == []) == can_run(shuffled, work)


def test_shuffles_of_both_kinds_are_tried() -> None:
    work = chain(2, 2)
    assert can_run(parse("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"), work)
    assert not can_run(parse("0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1B0"), work)


def parse(*ranks: str) -> Schedule:
    return Schedule.parse("\n".join(f"rank {rank}: {actions}" for rank, actions in enumerate(ranks)))


@pytest.mark.parametrize("forward_to_backward", [(1, 2), (1, 1), (2, 1), (0.1, 0.2)])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(4, 8), (3, 2), (1, 3), (8, 8)])
def test_1f1b_is_the_textbook_order(
    num_stages: int, num_microbatches: int, forward_to_backward: tuple[float, float]
) -> None:
    forward, backward = ([seconds] * num_stages for seconds in forward_to_backward)
    schedule = make_schedule("1f1b", chain(num_stages, num_microbatches), range(num_stages), forward, backward)
    for stage, actions in enumerate(schedule.ranks):
        warmup = min(num_stages - stage - 1, num_microbatches)
        expected = [f"{stage}F{m}" for m in range(warmup)]
        for m in range(num_microbatches - warmup):
            expected += [f"{stage}F{warmup + m}", f"{stage}B{m}"]
        expected += [f"{stage}B{m}" for m in range(num_microbatches - warmup, num_microbatches)]
        assert [str(action) for action in actions] == expected


def unit(action: Action) -> float:
    return {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "T": 1.0}[action.kind]


@pytest.mark.parametrize(
    ("name", "placement", "makespan"),
    [
        ("gpipe", [0, 1, 2, 3], (8 + 3) * 3),
        ("1f1b", [0, 1, 2, 3], (8 + 3) * 3),
        ("zero-bubble", [0, 1, 2, 3], 8 * 3 + 3),  # ZB-H1: (ranks - 1) * (F + I - W) idle
        ("interleaved", [0, 1, 2, 3] * 2, 2 * 8 * 3 + 3 * 3),  # Megatron-LM: (ranks - 1) * (F + B) idle
        ("wave", [0, 1, 2, 3, 3, 2, 1, 0], 2 * 8 * 3 + 12),
    ],
)
def test_equal_stages_take_the_known_time(name: str, placement: list[int], makespan: float) -> None:
    work = chain(len(placement), 8)
    schedule = make_schedule(name, work, placement, [1] * len(placement), [2] * len(placement))
    timeline = simulate(schedule, work, unit)
    assert timeline.makespan_seconds == makespan
    assert timeline.bubble_ratio == pytest.approx(1 - 8 * 3 * len(placement) / 4 / makespan)


def peak(actions: tuple[Action, ...]) -> int:
    """Micro-batches held at once, over all stages of the rank; a split backward holds until W."""
    split = {(a.stage, a.microbatch) for a in actions if a.kind == "W"}
    held, most = 0, 0
    for action in actions:
        held += action.kind == "F"
        held -= action.kind == "W" or (action.kind in "BI" and (action.stage, action.microbatch) not in split)
        most = max(most, held)
    return most


@pytest.mark.parametrize("num_microbatches", [4, 7, 16])
def test_memory_is_bounded_as_in_1f1b(num_microbatches: int) -> None:
    for name, placement, most in [
        ("1f1b", [0, 1, 2, 3], [4, 3, 2, 1]),
        ("zero-bubble", [0, 1, 2, 3], [4] * 4),
        ("wave", [0, 1, 2, 3, 3, 2, 1, 0], [9] * 4),
        ("interleaved", [0, 1, 2, 3] * 2, [12, 11, 10, 9]),
    ]:
        stages = len(placement)
        schedule = make_schedule(name, chain(stages, num_microbatches), placement, [1] * stages, [2] * stages)
        assert all(peak(actions) <= limit for actions, limit in zip(schedule.ranks, most, strict=True))


def test_lags_delay_only_what_travels() -> None:
    work = chain(2, 1, num_components=1)
    lags = {(0, 1, "F"): 10.0, (1, 0, "B"): 20.0, (0, 0, "T"): 0.5, (0, 1, "T"): 50.0}
    timeline = simulate(parse("0T0 0F0 0B0", "1F0 1B0"), work, unit, lambda *edge: lags[edge])
    assert timeline.start_seconds[Action(0, "F", 0)] == 1.5
    assert timeline.start_seconds[Action(1, "F", 0)] == 51.0
    assert timeline.start_seconds[Action(0, "B", 0)] == 74.0
    assert timeline.makespan_seconds == 76.0


def test_the_grid_is_drawn_against_time() -> None:
    schedule = make_schedule("1f1b", chain(2, 2, 1), [0, 1], [1, 1], [2, 2])
    assert str(schedule).splitlines() == [
        "schedule 1f1b: 2 stages, 2 micro-batches",
        "time      0                   5",
        "rank 0  0T0 0F0 0F1   .   . 0B0 ---   . 0B1 ---",
        "rank 1  0T1   . 1F0 1B0 --- 1F1 1B1 ---   .   .",
    ]


def test_wide_grids_are_drawn_in_bands_and_impossible_orders_too() -> None:
    schedule = make_schedule("wave", chain(16, 8), [*range(8), *range(8)[::-1]], [1] * 16, [2] * 16)
    lines = str(schedule).splitlines()
    assert max(map(len, lines)) <= 120
    assert len(lines) % 9 == 1
    assert sum(line.startswith("rank 3 ") and "12F7" in line for line in lines) == 1
    assert "0B0 --- 0F0" in str(parse("0B0 0F0"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0: 0F0 1Bogus2", "'1Bogus2' on rank 0 is no action; legal actions are .*F = forward.*T = frozen work"),
        ("rank 0: 0F0\nrank 1: 0X0", "'0X0' on rank 1"),
        ("rank 0: 0f0", "'0f0'"),
        ("rank 0: 0F-1", "'0F-1'"),
        ("rank 0: ٣F0", "is no action"),
        ("rank 1: 0F0", "expected the line of rank 0"),
        ("rank 0: 0F0\nrank 0: 0B0", "expected the line of rank 1"),
        ("0F0 0B0", "expected the line of rank 0"),
        ("", "one line per rank"),
        ("schedule x: 1 stage, 1 micro-batch", "one line per rank"),
        ("schedule x: 1 stage, 1 micro-batch\nrank 0: 1F0", "promises 1 stages and 1 micro-batches, the actions use 2"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.parse(text)


def test_text_without_a_header_is_counted() -> None:
    schedule = parse("4T0 0F0 0F1", "", "2F0 2F1")
    assert (schedule.name, schedule.num_stages, schedule.num_microbatches) == ("custom", 3, 2)
    assert schedule.stage_ranks == ((0,), (), (2,))
    assert not schedule.is_split
    assert parse("0F0 0I0 0W0").is_split


GOOD = "0T0 0F0 0B0", "1F0 1B0"


@pytest.mark.parametrize(
    ("ranks", "fault"),
    [
        (("0T0 0F0 0B0",), "has 1 ranks, the program 2"),
        (("0T0 0F0 0B0 0F1 0B1", GOOD[1]), "has 2 micro-batches, the program 1"),
        (("0F0 0B0", GOOD[1]), "0T0 is missing"),
        (("0T0 0B0", GOOD[1]), "0F0 is missing"),
        ((GOOD[0], "1F0"), "1B0 is missing"),
        ((GOOD[0], "1F0 1B0 1B0"), "1B0 is there 2 times"),
        (("0T0 0T0 0F0 0B0", GOOD[1]), "0T0 is there 2 times"),
        ((GOOD[0], "1F0 1I0"), "1W0 is missing: 1I0 leaves the weight gradient undone"),
        ((GOOD[0], "1F0 1B0 1W0"), "both a full and a split backward of micro-batch 0"),
        ((GOOD[0], "1F0 1W0"), "1B0 is missing"),
        (("0T0 0F0 0I0 0W0", GOOD[1]), "0I0 on rank 0: stage 0 sends no gradient to another stage"),
        (("0T0 0F0", "0B0 1F0 1B0"), "stage 0 is on ranks \\[0, 1\\]"),
        ((GOOD[0] + " 2F0", GOOD[1]), "2F0 on rank 0: there is no stage 2, only 2"),
        ((GOOD[0] + " 1T0", GOOD[1]), "1T0 on rank 0: there is no component 1, only 1"),
    ],
)
def test_faults_are_named(ranks: tuple[str, ...], fault: str) -> None:
    assert check(parse(*GOOD), chain(2, 1, 1), 2) == []
    with pytest.raises(ScheduleError, match=fault):
        require(parse(*ranks), chain(2, 1, 1), 2)


def test_stages_without_gradients_or_work_are_left_alone() -> None:
    work = Work(3, 1, empty=frozenset({1}), backward=frozenset({2}), weight_grad=frozenset(), edges=frozenset({(0, 2)}))
    assert check(parse("0F0", "2F0 2B0"), work, 2) == []
    assert check(parse("0F0 1F0", "2F0 2B0"), work, 2) == ["1F0 on rank 0: stage 1 is empty and has no work"]
    assert check(parse("0F0 0B0", "2F0 2B0"), work, 2) == [
        "0B0 on rank 0: stage 0 has no gradient work; remove the action"
    ]
    bogus = Schedule("x", 3, 1, ((Action(0, "X", 0), Action(0, "F", 0)), (Action(2, "F", 0), Action(2, "B", 0))))
    assert check(bogus, work, 2)[0].startswith("0X0 on rank 0: unknown kind 'X'")


def test_an_input_gradient_without_parameters_needs_no_weight_gradient() -> None:
    work = Work(
        2,
        1,
        backward=frozenset({0, 1}),
        input_grad=frozenset({1}),
        weight_grad=frozenset({0}),
        edges=frozenset({(0, 1)}),
        grad_edges=frozenset({(1, 0)}),
    )
    assert check(parse("0F0 0B0", "1F0 1I0"), work, 2) == []
    assert "owns no trainable parameter" in check(parse("0F0 0B0", "1F0 1I0 1W0"), work, 2)[0]


def test_a_deadlock_is_shown_inside_the_schedule() -> None:
    (fault,) = check(parse("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", ""), chain(2, 2), 3)
    assert fault.splitlines() == [
        "the ranks wait for each other:",
        "rank 0: 0F0 0B0 <-- HERE waits for 1B0 (rank 1) | then 0F1 0B1",
        "rank 1: 1F0 1F1 <-- HERE waits for 0F1 (rank 0) | then 1B0 1B1",
        "rank 2: (ends)",
    ]
    (fault,) = check(parse("0B0 0F0", "1F0 1B0"), chain(2, 1), 2)
    assert "rank 0: 0B0 <-- HERE waits for 0F0 (rank 0, after it), 1B0 (rank 1) | then 0F0" in fault
    with pytest.raises(ScheduleError, match="stops after 0 actions"):
        simulate(parse("0B0 0F0", "1F0 1B0"), chain(2, 1), unit)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(CompileError, match="unknown schedule 'onef1b'; choose one of 'gpipe', '1f1b'"):
        make_schedule("onef1b", chain(1, 1), [0], [1], [1])
