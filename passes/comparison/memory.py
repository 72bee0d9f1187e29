"""The most bytes a rank needs, from block costs and the order of its work.

    0T0:32  0F0  0F1  0F2  0B0 ...      held: weights, gradients, optimizer state, frozen weights, inputs
    temp.   +s   +s   +s   -s           saved: from a forward to its backward; and the largest temporary of each action

As the tuner counts (`passes.room`), with inputs, frozen work and what it makes besides.
"""

from collections.abc import Collection, Sequence

from fxpipe.memory import ADAMW_BYTES
from fxpipe.schedule import Action, Schedule
from fxpipe.staged import Staged
from passes.comparison.case import Case
from passes.comparison.data_parallel import local_sizes
from passes.comparison.pieces import Piece, items
from passes.room import saved_bytes


def state_bytes(case: Case, blocks: Collection[int]) -> int:
    """Weights that these blocks read, gradients and AdamW's averages of those that train; each weight once."""
    return sum(
        w.num_bytes + w.trained * (w.num_bytes + ADAMW_BYTES * w.num_elements) for w in case.costs.weights_of(blocks)
    )


def ddp_peak_bytes(case: Case, num_microbatches: int, recompute: bool = False) -> int:
    """The whole state, and the fullest moment of a micro-batch."""
    return state_bytes(case, case.blocks) + _local_step_bytes(case, num_microbatches, recompute)


def zero_peak_bytes(case: Case, num_microbatches: int, recompute: bool = False) -> int:
    """A share of the state, the weights of two gathered blocks, and one's gradients before they are scattered."""
    gathered = sum(sorted(case.costs.parameter_bytes)[-2:]) + max(case.costs.trained_bytes)
    share = -(-state_bytes(case, case.blocks) // case.world_size)
    return share + gathered + _local_step_bytes(case, num_microbatches, recompute)


def _local_step_bytes(case: Case, num_microbatches: int, recompute: bool) -> int:
    """What a rank holds beside its state: frozen weights, inputs, and what a micro-batch leaves for its backward.

    Recomputed block by block, as under activation checkpointing: every block keeps its inputs, one block all it saves.
    """
    costs, sizes = case.costs, local_sizes(case, num_microbatches)[0]
    size = max(sizes)
    saved = costs.stage_saved_bytes(case.blocks, size)
    if recompute:
        value_bytes = costs.values.sizes.at(size)
        kept = frozenset[int]().union(*costs.values.read)
        saved = int(sum(value_bytes[value] for value in kept)) + max(costs.saved_bytes(size))
    training = saved + max(costs.temporary_bytes(size))
    inputs = costs.given_bytes(case.blocks, sum(sizes))
    return sum(costs.component_bytes) + inputs + max(training, _largest_frozen(case, size))


def pipeline_peak_bytes(
    case: Case,
    staged: Staged,
    schedule: Schedule,
    sizes: Sequence[int],
    pieces: Sequence[Sequence[Piece]] = (),
    whole_batch: bool = False,
) -> int:
    """Of the fullest rank of a pipeline.

    Args:
        pieces: frozen work beside the schedule's actions.
        whole_batch: whether every rank holds all samples' inputs, as fxpipe's do; else its share.
    """
    by_size = {size: saved_bytes(case.costs, staged, size) for size in set(sizes)}
    return max(
        _rank_bytes(case, staged, schedule, rank, sizes, by_size, pieces[rank] if pieces else (), whole_batch)
        for rank in range(case.world_size)
    )


def _rank_bytes(
    case: Case,
    staged: Staged,
    schedule: Schedule,
    rank: int,
    sizes: Sequence[int],
    saved: dict[int, tuple[int, ...]],
    pieces: Sequence[Piece],
    whole_batch: bool,
) -> int:
    costs, actions = case.costs, schedule.ranks[rank]
    stages = sorted({action.stage for action in actions if action.kind == "F"})
    blocks = [block for stage in stages for block in staged.blocks(stage)]
    split = {action.stage for action in actions if action.kind == "W"}
    inputs = costs.given_bytes(blocks, case.batch_size if whole_batch else -(-case.batch_size // case.world_size))
    level = state_bytes(case, blocks) + sum(costs.component_bytes) + inputs
    level += _made_bytes(case, staged, schedule, rank, sizes) * (2 if any(piece.ahead for piece in pieces) else 1)
    most = level
    for _, item in items(actions, pieces):
        if isinstance(item, Piece):
            most = max(most, level + _piece_bytes(case, item))
            continue
        if item.kind == "R":
            continue
        size = sizes[item.microbatch]
        if item.kind == "T":
            most = max(most, level + int(max(case.frozen.largest_at(size)[item.stage], default=0.0)))
            continue
        kept = saved[size][item.stage]
        level += kept * (item.kind == "F")
        most = max(most, level + _temporary_bytes(case, staged, item, size))
        level -= kept * (item.kind == "W" or (item.kind in "BI" and item.stage not in split))
    return most


def _temporary_bytes(case: Case, staged: Staged, action: Action, size: int) -> int:
    """The largest operation of a stage, beside all that is computed again."""
    blocks = staged.blocks(action.stage)
    largest = case.costs.temporary_bytes(size)
    again = action.kind in "BI" and action.stage in staged.recompute
    return max((largest[b] for b in blocks), default=0) + again * case.costs.stage_saved_bytes(blocks, size)


def _piece_bytes(case: Case, piece: Piece) -> int:
    largest = case.frozen.largest_at(piece.stop - piece.start)[piece.component]
    return int(max(largest[piece.first_layer : piece.last_layer], default=0.0))


def _largest_frozen(case: Case, size: int) -> int:
    return int(max((most for layers in case.frozen.largest_at(size) for most in layers), default=0.0))


def _made_bytes(case: Case, staged: Staged, schedule: Schedule, rank: int, sizes: Sequence[int]) -> int:
    """What frozen components have made for the micro-batches that a rank's stages read it for."""
    seen = {(a.microbatch, a.stage) for a in schedule.ranks[rank] if a.kind == "F"}
    total = 0
    for edge in (edge for edge in case.graph.edges if isinstance(edge.producer, str)):
        readers = {staged.stage_of_block[c] for c in edge.consumers if isinstance(c, int)}
        total += sum(edge.num_bytes(sizes[m]) for m in {m for m, stage in seen if stage in readers})
    return total
