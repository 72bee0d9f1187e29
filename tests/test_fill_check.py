"""The checker of fills: a valid one, spoilt in every way, is refused for the right reason."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from passes.costs.layer import FrozenComponent
from passes.fill.per_device import per_device
from passes.fill.problem import FillProblem
from passes.fill.result import Fill, Piece
from tests.fill_check import check, require
from tests.fill_problems import affine, fill

VAE = FrozenComponent("vae", (affine(0.001, 0.001),) * 4)
TEXT = FrozenComponent("text", (affine(0.001, 0.000125),) * 4)
TWO_RANKS = FillProblem(0.1, (((0.0, 0.04),), ((0.06, 0.1),)), (VAE, TEXT), 16)


def corrupted(change: Callable[[list[list[Piece]]], object]) -> Fill:
    found = require(TWO_RANKS, per_device(TWO_RANKS))
    ranks = [list(pieces) for pieces in found.ranks]
    change(ranks)
    return replace(found, ranks=tuple(map(tuple, ranks)))


def shift(piece: Piece, seconds: float) -> Piece:
    return replace(piece, start_seconds=piece.start_seconds + seconds, end_seconds=piece.end_seconds + seconds)


CORRUPTIONS: dict[str, tuple[Callable[[list[list[Piece]]], object], str]] = {
    "left out": (lambda r: r[0].pop(), "runs 0 times"),
    "twice": (lambda r: r[0].append(shift(r[0][0], 0.2)), "runs 2 times"),
    "too early": (lambda r: r[1].__setitem__(0, shift(r[1][0], -0.01)), "not idle all that time"),
    "too long": (
        lambda r: r[0].__setitem__(-1, replace(r[0][-1], end_seconds=r[0][-1].end_seconds + 1e-4)),
        "its layers take",
    ),
    "reversed": (lambda r: r[0].reverse(), "starts before the piece before ends"),
    "overlap": (lambda r: r[0].__setitem__(1, shift(r[0][1], -1e-3)), "starts before the piece before ends"),
    "no such component": (lambda r: r[0].__setitem__(0, replace(r[0][0], component=7)), "there is no component 7"),
    "no such layer": (lambda r: r[0].__setitem__(0, replace(r[0][0], last_layer=9)), "has 4 layers"),
    "no such sample": (lambda r: r[0].__setitem__(0, replace(r[0][0], last_sample=17)), "has 16 samples"),
    "one rank less": (lambda r: r[0].extend(r.pop()), "it has 1 ranks"),
    "later than it says": (lambda r: r[1].__setitem__(-1, shift(r[1][-1], 0.5)), "the tail is"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_checker_sees(name: str) -> None:
    change, message = CORRUPTIONS[name]
    broken = corrupted(change)
    assert any(message in fault.message for fault in check(TWO_RANKS, broken))


def test_the_checker_sees_inputs_that_come_later() -> None:
    problem = replace(TWO_RANKS, components=(VAE, replace(TEXT, depends=(0,))))
    reverse = replace(TWO_RANKS, components=(VAE, TEXT))
    found = fill(reverse)
    swapped = {0: 1, 1: 0}
    ranks = tuple(tuple(replace(p, component=swapped[p.component]) for p in pieces) for pieces in found.ranks)
    turned = replace(problem, components=(TEXT, replace(VAE, depends=(0,))))
    faults = check(turned, replace(found, ranks=ranks))
    assert any("before its inputs" in fault.message for fault in faults)


def test_the_checker_sees_samples_that_move_or_may_not_be_cut() -> None:
    problem = replace(TWO_RANKS, idle=(((0.0, 0.03),), ((0.03, 0.06),)), components=(VAE,))
    moved = fill(problem, "greedy")
    assert not check(problem, moved)
    assert any("another rank before" in f.message for f in check(problem, replace(moved, stays=True)))
    assert any("which is not permitted" in f.message for f in check(replace(problem, partial=False), moved))
    assert any("no local batch" in f.message for f in check(replace(problem, local_batches=(96,)), moved))
    assert any("can't be taken apart" in f.message for f in check(only(problem, whole=True), moved))
    assert any("ranks (0,) only" in f.message for f in check(only(problem, ranks=(0,)), moved))


def only(problem: FillProblem, **changes: object) -> FillProblem:
    return replace(problem, components=(replace(problem.components[0], **changes),))  # type: ignore[arg-type]
