"""One micro-batch's block, repeated: every operation in its first free place."""

from hypothesis import given, settings
from hypothesis import strategies as st

from passes.schedules.blocks import Operation, placed, shortest_block


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=100)
def test_a_block_never_overlaps_its_repetitions(operations: list[tuple[int, int, int]], random: object) -> None:
    made = []
    for number, (rank, ticks, gap) in enumerate(operations):
        needs = ((number - 1, gap),) if number and gap else ()
        made.append(Operation(rank, ticks, needs))
    load = max(sum(o.ticks for o in made if o.rank == rank) for rank in range(3))
    block = shortest_block(lambda period: made, load)
    assert block.period >= load
    for i, a in enumerate(made):
        assert all(block.starts[i] >= block.starts[need] + gap for need, gap in a.needs)
        for j, b in enumerate(made[:i]):
            if a.rank == b.rank:
                ahead = (block.starts[i] - block.starts[j]) % block.period
                assert b.ticks <= ahead <= block.period - a.ticks
    assert placed(made, load - 1) is None
