"""The most bytes a rank of a pipeline needs, from block costs and the order of its work.

    0T0:32  0F0  0F1  0F2  0B0 ...      held: weights, gradients, optimizer state, frozen weights, inputs
    temp.   +s   +s   +s   -s           saved: from a forward to its backward; and the largest temporary of each action

As the tuner counts (`passes.room`), but with every piece of frozen work where it runs.
"""

from collections.abc import Callable, Mapping, Sequence

from fxpipe.schedule import Action, Schedule
from fxpipe.staged import Staged
from passes.fill import among
from passes.rehearsal.case import Case
from passes.rehearsal.pieces import Piece
from passes.room import computed_again_bytes, frozen_weights, saved_bytes, saved_levels, stages_of, state_bytes


def frozen_bytes(case: Case, size: int) -> int:
    """The largest operation of frozen work on so many samples."""
    return int(max((most for layers in case.frozen.largest_at(size) for most in layers), default=0.0))


def held_bytes(
    case: Case, staged: Staged, schedule: Schedule, sizes: Sequence[int], whole_batch: bool = False
) -> list[int]:
    """What every rank of a pipeline holds all step long, with what frozen work makes for its stages.

    `whole_batch`: every rank has all samples' inputs, as fxpipe's do; else its share.
    """
    found = []
    samples = case.batch_size if whole_batch else -(-case.batch_size // case.world_size)
    for rank, actions in enumerate(schedule.ranks):
        blocks = [block for stage in stages_of(actions) for block in staged.blocks(stage)]
        held = state_bytes(case.costs, blocks) + case.costs.given_bytes(blocks, samples)
        held += frozen_weights(case.costs, staged, rank)
        found.append(held + _made_bytes(case, staged, actions, sizes))
    return found


def pipeline_peak_bytes(
    case: Case,
    staged: Staged,
    schedule: Schedule,
    sizes: Sequence[int],
    pieces: Sequence[Sequence[Piece]] = (),
    whole_batch: bool = False,
) -> int:
    """Of the fullest rank; `pieces` are frozen work of the next batch, whose results are held beside this one's."""
    held = held_bytes(case, staged, schedule, sizes, whole_batch)
    walk = _Walk(case, staged, sizes)
    most = 0
    for rank, actions in enumerate(schedule.ranks):
        ahead = _made_bytes(case, staged, actions, sizes) if pieces else 0
        most = max(most, held[rank] + ahead + walk.most(actions, pieces[rank] if pieces else ()))
    return most


class _Walk:
    """The most that activations and temporaries take on a rank beside what it holds."""

    def __init__(self, case: Case, staged: Staged, sizes: Sequence[int]) -> None:
        self._case, self._staged, self._sizes = case, staged, sizes
        self._saved = {size: saved_bytes(case.costs, staged, size) for size in set(sizes)}
        self._again = {size: computed_again_bytes(case.costs, staged, size) for size in set(sizes)}
        self._largest = {size: case.costs.temporary_bytes(size) for size in set(sizes)}

    def most(self, actions: Sequence[Action], pieces: Sequence[Piece]) -> int:
        training = [action for action in actions if action.kind in "FBIW"]
        levels = saved_levels(training, self._of(self._saved), self._of(self._again))
        level = most = 0
        for _, item in among(actions, pieces):
            if isinstance(item, Piece):
                most = max(most, level + _piece_bytes(self._case, item))
            elif item.kind == "T":
                layers = self._case.frozen.largest_at(self._sizes[item.microbatch])[item.stage]
                most = max(most, level + int(max(layers, default=0.0)))
            elif item.kind != "R":
                during, level = next(levels)
                most = max(most, during + self._temporary_bytes(item))
        return most

    def _of(self, sizes: Mapping[int, Sequence[int]]) -> Callable[[Action], int]:
        return lambda action: sizes[self._sizes[action.microbatch]][action.stage]

    def _temporary_bytes(self, action: Action) -> int:
        """The largest operation of a stage, beside all that is computed again."""
        size = self._sizes[action.microbatch]
        largest = max((self._largest[size][b] for b in self._staged.blocks(action.stage)), default=0)
        return largest + self._again[size][action.stage] * (action.kind in "BI")


def _piece_bytes(case: Case, piece: Piece) -> int:
    largest = case.frozen.largest_at(piece.stop - piece.start)[piece.component]
    return int(max(largest[piece.first_layer : piece.last_layer], default=0.0))


def _made_bytes(case: Case, staged: Staged, actions: Sequence[Action], sizes: Sequence[int]) -> int:
    """What frozen components have made for the micro-batches that a rank's stages read it for."""
    seen = {(a.microbatch, a.stage) for a in actions if a.kind == "F"}
    total = 0
    for edge in (edge for edge in case.graph.edges if isinstance(edge.producer, str)):
        readers = {staged.stage_of_block[c] for c in edge.consumers if isinstance(c, int)}
        total += sum(edge.num_bytes(sizes[m]) for m in {m for m, stage in seen if stage in readers})
    return total
