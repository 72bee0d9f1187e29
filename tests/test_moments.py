"""Moments of patches: merged they are those of the whole; corrected they are DistriFusion's, and nothing cancels."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fxpipe.plan.displaced_ops import advanced, corrected, kept_going
from fxpipe.plan.row_ops import merge_moments, moments

GROUPS = 2
rows = st.lists(st.integers(1, 6), min_size=1, max_size=4)
seeds = st.integers(0, 2**20)


def patches(sizes: list[int], seed: int, mean: float = 0.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [mean + torch.randn(2, 4, size, 5, generator=generator, dtype=torch.float64) for size in sizes]


def counts(values: list[Tensor]) -> list[int]:
    return [value[0].numel() // GROUPS for value in values]


def of(values: list[Tensor]) -> list[Tensor]:
    return [moments(value, GROUPS) for value in values]


@given(rows, seeds)
def test_merged_moments_are_those_of_the_whole(sizes: list[int], seed: int) -> None:
    values = patches(sizes, seed)
    whole = moments(torch.cat(values, 2), GROUPS)
    assert torch.allclose(merge_moments(of(values), counts(values)), whole, rtol=0, atol=1e-13)


@given(rows, seeds)
def test_with_all_patches_fresh_the_correction_is_exact(sizes: list[int], seed: int) -> None:
    now, before = patches(sizes, seed), patches(sizes, seed + 1)
    everyone = list(range(len(sizes)))
    found, _ = corrected(of(now), of(before), everyone, counts(now))
    assert torch.equal(found, merge_moments(of(now), counts(now)))


@given(rows, seeds, st.data())
def test_where_nothing_moves_the_correction_is_nothing(sizes: list[int], seed: int, data: st.DataObject) -> None:
    values = patches(sizes, seed)
    fresh = sorted(data.draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1)))
    found, _ = corrected(of(values), [of(values)[i] for i in fresh], fresh, counts(values))
    assert torch.equal(found, merge_moments(of(values), counts(values)))


@given(rows, seeds, st.data())
def test_one_fresh_patch_is_the_papers_formula(sizes: list[int], seed: int, data: st.DataObject) -> None:
    """Eq. 2 is of means and means of squares: the stale whole's, plus what one's own have changed."""
    before = patches(sizes, seed, 1.0)
    now = [value + 0.1 * change for value, change in zip(before, patches(sizes, seed + 1), strict=True)]
    own, n = data.draw(st.sampled_from(range(len(sizes)))), counts(now)
    latest = [of(now)[i] if i == own else of(before)[i] for i in range(len(sizes))]
    found, _ = corrected(latest, [of(before)[own]], [own], n)

    def raw(part: Tensor) -> Tensor:
        return torch.stack([part[0], part[1] + part[0].square()])

    stale = sum(c / sum(n) * raw(part) for c, part in zip(n, of(before), strict=True))
    mean, squares = stale + raw(of(now)[own]) - raw(of(before)[own])
    paper, merged = torch.stack([mean, squares - mean.square()]), merge_moments(latest, n)
    usable = paper[1] > merged[1] / 4
    assert torch.allclose(found, torch.where(usable, paper, merged), rtol=1e-9, atol=1e-11)


def test_large_means_cost_no_digits() -> None:
    """Mean 100 times the deviation: raw moments would lose 4 digits of float32, and all of half precision."""
    before = patches([3, 5, 8], 0, 100.0)
    now = [value + 0.1 * change + 0.05 for value, change in zip(before, patches([3, 5, 8], 1), strict=True)]

    def found(dtype: torch.dtype) -> Tensor:
        told = [of([value.to(dtype) for value in values]) for values in (now, before)]
        return corrected([told[0][0], *told[1][1:]], [told[1][0]], [0], counts(now))[0].double()

    assert ((found(torch.float32) - found(torch.float64))[1] / found(torch.float64)[1]).abs().max() < 3e-6
    assert moments(now[0].half(), GROUPS).dtype == torch.float32


def test_patches_that_move_apart_fall_back_to_the_merged_moments() -> None:
    before = [torch.randn(1, 4, 3, 5, dtype=torch.float64), torch.randn(1, 4, 3, 5, dtype=torch.float64) + 8]
    now = before[0] + 8  # which the other does not: corrected, the whole would have nearly no variance, or less
    told = [moments(now, GROUPS), moments(before[1], GROUPS)]
    found, _ = corrected(told, [moments(before[0] - 8, GROUPS)], [0], [30, 30])
    assert torch.equal(found, merge_moments(told, [30, 30]))


@given(st.integers(-8, 24), seeds)
def test_alpha_is_how_much_of_a_change_came_again(eighths: int, seed: int) -> None:
    """In eighths, which are exact; never back, never further than the last change, and nothing where nothing moved."""
    change = torch.randint(-8, 8, (5,), generator=torch.Generator().manual_seed(seed)).double()
    alpha = kept_going(eighths / 8 * change, change)
    wanted = min(max(eighths / 8, 0), 1) if change.any() else 0
    assert abs(alpha - wanted) < 1e-12
    last = torch.ones_like(change)
    assert torch.allclose(advanced(last, change, alpha), last + wanted * change)
    half = kept_going(change.half(), change.half())
    assert half == (1.0 if change.any() else 0.0)
    assert advanced(last.half(), change.half(), half).dtype == torch.float16
