"""Pieces of the next batch's frozen work on one rank, and what it carries to the next step.

0T[0:4]x0:5    reads samples 0 to 4 of inputs, runs layers 0 to 3, has samples 0 to 4 of latents
end of step    latents of every micro-batch that the rank's stages read, each in memory of its own
"""

from collections.abc import Callable

from fxpipe.plan.actions import Action
from passes.step_ops.messages import PlannedMessage
from passes.step_ops.rank_ops import RankOps
from passes.step_ops.step import Step
from passes.step_ops.whole_batch import WholeBatchBuffers

Segment = tuple[int, int, "int | PlannedMessage"]
"""Samples of a value on this rank, from and to before: a buffer, or a message still to be received."""


Receive = Callable[[PlannedMessage], int]
"""Waits for a message: its buffer."""


class Pieces:
    """Writes one rank's pieces into its ops."""

    def __init__(self, step: Step, rank: int, ops: RankOps, batch: WholeBatchBuffers) -> None:
        self._step, self._rank, self._ops, self._batch = step, rank, ops, batch
        self._segments: dict[str, list[Segment]] = {}
        for message in step.incoming[rank]:
            if message.samples is not None:
                self._segments.setdefault(message.value, []).append((*message.samples, message))

    def run(self, piece: Action, receive: Receive) -> None:
        """Call the piece's layers one after the other."""
        step, ops, ahead, (start, stop) = self._step, self._ops, self._step.ahead, piece.samples
        for layer in range(*piece.layers):
            read = [self.part(name, (start, stop), receive) for name in ahead.reads(piece.stage, layer)]
            read += [self._batch.samples(name, start, stop) for name in step.given_of_layer(piece.stage, layer)]
            one = layer, layer + 1
            seconds = step.case.frozen.seconds_at(piece.num_samples)[piece.stage][layer]
            ops.run(seconds, step.calls.layers(piece.stage, one, piece.num_samples))
            for buffer in read:
                ops.use(buffer)
            for name in ahead.returns(piece.stage, layer):
                buffer = ops.make("activations", ahead.values[name].num_bytes(piece.num_samples))
                self._segments.setdefault(name, []).append((start, stop, buffer))

    def carry(self, receive: Receive) -> None:
        """What the rank's stages read in the next step."""
        for name, microbatch in self._step.ahead.kept[self._rank]:
            self._ops.keep(self.part(name, self._step.samples[microbatch], receive, apart=True))

    def part(self, name: str, samples: tuple[int, int], receive: Receive, apart: bool = False) -> int:
        """Samples of a value; `apart`: in memory of their own."""
        segments = sorted(self._segments[name], key=lambda s: (isinstance(s[2], PlannedMessage), s[0]))
        if not self._step.ahead.values[name].batched:
            return _buffer(segments[0], receive)
        (start, stop), parts = samples, list[int]()
        now = start
        whole = False
        while now < stop:
            segment = next(s for s in segments if s[0] <= now < s[1])
            end = min(stop, segment[1])
            parts.append(_buffer(segment, receive))
            whole = (now, end) == segment[:2]
            now = end
        if len(parts) == 1 and (whole or not apart):
            return parts[0]
        self._ops.run(0.0)
        for part in parts:
            self._ops.use(part)
        return self._ops.make("carried", self._step.ahead.values[name].num_bytes(stop - start))


def _buffer(segment: Segment, receive: Receive) -> int:
    return segment[2] if isinstance(segment[2], int) else receive(segment[2])
