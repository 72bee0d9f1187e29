"""Plans as text and as JSON: what is read back is what was written."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import CompileError, ScheduleError
from fxpipe.plan.actions import Action, piece
from fxpipe.plan.plan import Plan, Prediction
from fxpipe.plan.plan_check import check
from fxpipe.plan.schedule import Schedule
from fxpipe.plan.staged import PlannedCut, Staged
from fxpipe.plan.tuning import Outcome

_TEXT = st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=12).map(str.strip)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans whose every field varies; they need not make sense."""
    stages, ranks, components = (draw(st.integers(1, n)) for n in (4, 4, 3))
    boundaries = tuple(sorted(draw(st.lists(st.integers(0, 20), min_size=stages + 1, max_size=stages + 1))))
    some_ranks = st.lists(st.integers(0, ranks - 1), min_size=1, unique=True).map(lambda of: tuple(sorted(of)))
    starts = sorted(draw(st.sets(st.integers(0, 20), max_size=3)))
    staged = Staged(
        boundaries,
        tuple(draw(some_ranks) for _ in range(stages)),
        draw(st.sampled_from(("1f1b", "zero-bubble", "a name (of mine)"))),
        draw(st.booleans()),
        ranks,
        tuple((start, start + 1) for start in starts),
        tuple(draw(some_ranks) for _ in range(components)) if draw(st.booleans()) else (),
        *draw(st.sampled_from([(False, False), (True, False), (True, True)])),
    )
    microbatches = draw(st.integers(1, 5))
    step = Schedule("1f1b", stages, microbatches, draw(_ranks(stages, microbatches, ranks)))
    steady = replace(step, name="wave") if draw(st.booleans()) else None
    number = st.integers(0, 2**60)
    seconds = st.floats(0, 1e9)
    prediction = st.builds(Prediction.of, seconds, st.floats(0, 1), number, number)
    forms = ("step", "steady")[: 1 + (steady is not None)]
    return Plan(
        fingerprint=draw(st.text("0123456789abcdef", max_size=12)),
        cluster=draw(st.sampled_from(("2x8xV100+Ethernet-10", 'device = "V100"\n\n[[level]]\nsize = 2'))),
        cost_model=draw(st.sampled_from(("", "H100@bfloat16", "profile.json"))),
        batch_size=draw(st.integers(microbatches, 64)),
        num_microbatches=microbatches,
        cut=PlannedCut(draw(st.integers(1, 128)), draw(st.integers(1, 9)), draw(st.booleans())),
        staged=staged,
        labels=tuple(f" 5.0%  {draw(_TEXT)}" for _ in range(stages)),
        components=tuple(draw(_TEXT) for _ in range(components)),
        step=step,
        steady=steady,
        predicted={form: draw(prediction) for form in forms},
        notes=tuple(draw(st.lists(_TEXT, max_size=2))),
        outcomes=(Outcome(1, 2, "wave", 4, 8, True, False, 0.5, None, 7, None, "slower"),),
    )


def _ranks(stages: int, microbatches: int, ranks: int) -> st.SearchStrategy[tuple[tuple[Action, ...], ...]]:
    span = st.tuples(st.integers(0, 9), st.integers(10, 12))
    plain = st.builds(Action, st.integers(0, stages - 1), st.sampled_from("FBIWT"), st.integers(0, microbatches - 1))
    action = st.one_of(plain, st.builds(piece, st.integers(0, 2), span, span))
    of_rank = st.lists(action, max_size=4).map(tuple)
    return st.lists(of_rank, min_size=ranks, max_size=ranks).map(tuple)


@given(plans())
def test_a_plan_is_read_back_from_its_text(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan
    assert str(Plan.parse(str(plan))) == str(plan)


@given(plans())
def test_a_plan_is_read_back_from_json(plan: Plan) -> None:
    read = Plan.from_dict(json.loads(json.dumps(plan.as_dict())))
    assert (read, read.outcomes) == (plan, plan.outcomes)


@given(plans())
def test_the_forms_of_a_step_share_its_actions(plan: Plan) -> None:
    if plan.steady is None:
        assert (plan.prologue, plan.epilogue) == (None, None)
        return
    assert plan.prologue is not None
    assert plan.epilogue is not None
    for steady, first, last in zip(plan.steady.ranks, plan.prologue.ranks, plan.epilogue.ranks, strict=True):
        assert sorted(steady) == sorted((*first, *last))


@given(plans())
def test_files_hold_either(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    folder = tmp_path_factory.mktemp("plans")
    assert Plan.load(plan.save(folder / "plan.json")) == plan
    (folder / "plan.txt").write_text(str(plan))
    assert Plan.load(folder / "plan.txt") == plan


def _without(line: str) -> Callable[[str], str]:
    return lambda text: "\n".join(other for other in text.split("\n") if not other.strip().startswith(line))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "", "no plan's text"),
        (lambda text: "hello\n" + text, "it begins with 'hello"),
        (_without("for "), "lacks its second line"),
        (_without("stage "), "lacks its second line or its stages"),
        (_without("schedule ") and (lambda text: text.split("\nschedule ")[0]), "no plan's text"),
        (lambda text: text.replace("stage  0 on rank", "stage  0 beside rank"), "no line 'stage  0 beside rank"),
        (lambda text: text.replace("0F0", "0X0"), "'0X0' on rank 0 is no action"),
    ],
)
def test_what_is_no_plan_is_refused(change: Callable[[str], str], message: str) -> None:
    staged = Staged((0, 2), ((0,),), "1f1b", False, 1)
    step = Schedule.parse("schedule 1f1b: 1 stage, 1 micro-batch\nrank 0: 0F0 0B0")
    plan = Plan("ab", "1xV100", "V100", 4, 1, PlannedCut(24, 4), staged, ("all",), (), step)
    with pytest.raises((CompileError, ScheduleError), match=message):
        Plan.parse(change(str(plan)))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("batch_size", "4", "batch_size is '4'; give an integer"),
        ("batch_size", True, "batch_size is True; give an integer"),
        ("num_microbatches", 5, "4 samples cannot be cut into 5 micro-batches"),
        ("cost_model", None, "cost_model is None; give a text"),
        ("labels", "all", "labels is 'all'; give a list"),
        ("labels", [], "has 2 boundaries, ranks of 1 stages and labels of 0"),
        ("step", ["rank 0: 0F0 0B0", 1], r"step\[1\] is 1; give a text"),
        ("steady", [], "one line per rank"),
        ("predicted", {"step": {"seconds": float("nan")}}, r"predicted\.step\.idle is missing"),
        ("cut", {"num_blocks": 24, "num_samples": 0}, "num_samples of the plan's cut is 0"),
        ("staged", {"boundaries": [0, "2"]}, "staged.stage_ranks is missing"),
        ("stedy", None, "stedy is nothing it has"),
        ("outcomes", [{"Pipelines": 1}], r"outcomes\[0\].pipelines is missing"),
    ],
)
def test_json_of_other_types_is_refused(name: str, value: object, message: str) -> None:
    staged = Staged((0, 2), ((0,),), "1f1b", False, 1)
    step = Schedule.parse("schedule 1f1b: 1 stage, 1 micro-batch\nrank 0: 0F0 0B0")
    data = Plan("ab", "1xV100", "V100", 4, 1, PlannedCut(24, 4), staged, ("all",), (), step).as_dict()
    with pytest.raises(CompileError, match=message):
        Plan.from_dict({**data, name: value})
    with pytest.raises(CompileError, match=r"staged\.prefech is nothing it has"):
        Plan.from_dict({**data, "staged": {**data["staged"], "prefech": 2}})


def test_stages_are_trained_on_the_same_ranks_by_both_orders() -> None:
    head = "schedule 1f1b: 1 stage, 2 micro-batches\n"
    step = Schedule.parse(f"{head}rank 0: 0F0 0B0 0R0\nrank 1: 0F1 0B1 0R1")
    steady = Schedule.parse(f"{head}rank 0: 0F0 0F1 0B0 0B1\nrank 1: 0T[0:1]x0:4")
    staged = Staged((0, 2), ((0, 1),), "1f1b", False, 2)
    plan = Plan("ab", "2xV100", "V100", 4, 2, PlannedCut(24, 4), staged, ("all",), ("vae",), step, steady)
    says = ["stage 0 is on ranks 0, 1, in the steady schedule on rank 0; train it on the same ranks in both"]
    assert check(plan, 2, ["vae"]) == says
    assert check(replace(plan, steady=None), 2, ["vae"]) == []


@pytest.mark.parametrize("text", ['{"format": 1}', '{"format": 2}', "{", "[1]", "nonsense"])
def test_a_file_without_a_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(CompileError, match="plan"):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(CompileError, match="no plan in"):
        Plan.load(tmp_path / "missing.json")
