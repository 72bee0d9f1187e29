"""Equal pipelines: the ops of most are those of another with other micro-batches, peers and message ids.

    rank 2: begin 0F1 | run | send edge 8 to 3       rank 4: begin 0F2 | run | send edge 16 to 5
    rank 3: begin 1F1 | wait edge 8 | run       ->   rank 5: begin 1F2 | wait edge 16 | run

The first of those that have as many messages at the end of the step, for sums of all pipelines, stands for the others.
"""

from collections.abc import Iterator, Mapping, Sequence

from fxpipe.simulate.op_lists import Bytes, Op
from passes.step_ops.closing import Closing
from passes.step_ops.messages import PlannedMessage
from passes.step_ops.step import Step


def models(step: Step, closing: Closing) -> dict[int, int]:
    """By rank: the one at its place in another pipeline that stands for it. Empty where they may differ."""
    if (
        step.units.staged.gathered
        or step.schedule.is_scattered
        or any(a.is_piece for actions in step.schedule.ranks for a in actions)
    ):
        return {}  # each holds other weights; samples go where there is room
    first, found = dict[tuple[object, ...], int](), dict[int, int]()
    for pipeline in step.units.staged.pipelines[1:]:
        for place, rank in enumerate(pipeline):
            model = first.setdefault((place, *((m.kind, m.src == rank) for m in closing.of_rank[rank])), rank)
            if model != rank:
                found[rank] = model
    return found


def copied(step: Step, closing: Closing, ops: Sequence[Op], model: int, rank: int) -> list[Op] | None:
    """A rank's ops, from those of its model; None where the two do other things."""
    mine, theirs, sizes = step.schedule.ranks[rank], step.schedule.ranks[model], step.sizes
    microbatches = {-1: -1}
    for a, b in zip(theirs, mine, strict=False):
        if (a.stage, a.kind) != (b.stage, b.kind):
            return None
        if a.kind != "R" and microbatches.setdefault(a.microbatch, b.microbatch) != b.microbatch:
            return None
    alike = len(mine) == len(theirs) and all(sizes[a] == sizes[b] for a, b in microbatches.items() if a >= 0)
    messages = _paired(_messages(step, closing, model), _messages(step, closing, rank), microbatches)
    if messages is None or not alike:
        return None
    renamed = _renamed(ops, messages, list(map(str, mine)))
    return [_resized(closing, op, model, rank) for op in renamed] if closing.owners else list(renamed)


def _messages(step: Step, closing: Closing, rank: int) -> list[PlannedMessage]:
    """All that a rank sends and receives."""
    own = [message for of_action in step.sends[rank] for message in of_action]
    return [*own, *step.incoming[rank], *closing.of_rank[rank]]


def _paired(
    model: Sequence[PlannedMessage], own: Sequence[PlannedMessage], microbatches: Mapping[int, int]
) -> dict[int, PlannedMessage] | None:
    """Messages by the edges of the model's; None unless they carry the same, between ranks in the same order."""
    if len(model) != len(own):
        return None
    peers: dict[int, int] = {}
    for a, b in zip(model, own, strict=True):
        same = (a.num_bytes, a.kind, a.value) == (b.num_bytes, b.kind, b.value)
        if not same or microbatches.get(a.microbatch) != b.microbatch:
            return None
        if (peers.setdefault(a.src, b.src), peers.setdefault(a.dst, b.dst)) != (b.src, b.dst):
            return None
    in_order = [peers[rank] for rank in sorted(peers)]
    return {a.edge: b for a, b in zip(model, own, strict=True)} if in_order == sorted(in_order) else None


def _renamed(ops: Sequence[Op], messages: dict[int, PlannedMessage], actions: Sequence[str]) -> Iterator[Op]:
    begun = iter(actions)
    for op in ops:
        kind, call, seconds, message, collective, memory = op
        if memory is not None and memory.sent:
            sent = [(what, size, tuple([messages[e].edge for e in edges])) for what, size, edges in memory.sent]
            memory = Bytes(memory.taken, memory.freed, tuple(sent), memory.most, memory.most_kept)
        elif message is None and kind != "begin":
            yield op
            continue
        if kind == "begin":
            call = next(begun, call)
        new = None if message is None else messages[message.edge]
        yield Op(kind, call, seconds, new, collective, memory)


def _resized(closing: Closing, op: Op, model: int, rank: int) -> Op:
    """Sums of gradients over replicas take what is this rank's own."""
    if op.collective is None or op.memory is None or op.collective.edge not in closing.reduced:
        return op
    stage = closing.reduced[op.collective.edge]
    (_, before), (own, moved) = closing.scattered(stage, model), closing.scattered(stage, rank)
    if op.kind == "reduce_scatter":
        gains = (*((("gradients", own),) * bool(own)), *((("transfers", moved),) * bool(moved)))
        return op._replace(memory=Bytes(gains, op.memory.freed, op.memory.sent, moved, moved))
    less = tuple((what, moved if (what, size) == ("transfers", before) else size) for what, size in op.memory.freed)
    return op._replace(memory=Bytes((), less, op.memory.sent, 0, 0))
