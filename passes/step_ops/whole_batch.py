"""The whole-batch values of one batch on one rank: inputs, random draws, and what is computed of them at once.

pixels [B, 3, 64, 64]    an input: there from the start      samples 4:8 are a view
draw_0 [B, 4, 8, 8]      drawn when it is first read         samples 4:8 are a view
emb    [2, B, 8]         an input                            samples 4:8 are a copy
"""

from collections.abc import Collection, Mapping
from functools import cached_property

from fxpipe.capture.sizes import evaluate
from fxpipe.costs.block_values import BatchValue
from passes.step_ops.rank_ops import RankOps
from passes.step_ops.step import Step


class WholeBatchBuffers:
    """The buffers of whole-batch values; `reads` are those that the rank's units read."""

    def __init__(self, step: Step, ops: RankOps, reads: Collection[str]) -> None:
        self._step, self._ops = step, ops
        self._whole: dict[str, int] = {}
        wanted = set(reads) | {name for given in reads for name in self._given[given].made_from}
        for name in sorted(wanted):
            if self._given[name].kind == "input":
                self._whole[name] = ops.make("inputs", self._bytes(name))
                ops.keep(self._whole[name])

    @cached_property
    def _given(self) -> Mapping[str, BatchValue]:
        return self._step.given

    def _bytes(self, name: str) -> int:
        return int(evaluate(self._given[name].num_bytes, self._step.batch_size))

    def samples(self, name: str, start: int, stop: int) -> int:
        """A buffer of samples `start` to before `stop`."""
        whole, given = self._value(name), self._given[name]
        if given.shared or not given.copied:
            return whole
        part = self._ops.num_bytes(whole) * (stop - start) // self._step.batch_size
        return self._ops.make("inputs", part)

    def _value(self, name: str) -> int:
        if name not in self._whole:
            given, case = self._given[name], self._step.case
            if given.kind == "draw":
                size = self._bytes(name)
                self._ops.run(case.model.drawing_seconds(given.target, size), 2 * size)
                self._whole[name] = self._ops.make("inputs", size)
            else:
                self._run_whole()
        return self._whole[name]

    def _run_whole(self) -> None:
        """All whole-batch values at once."""
        wanted = [given for given in self._given.values() if given.kind == "whole"]
        for read in sorted({name for given in wanted for name in given.made_from}):
            self._value(read)
        self._ops.run(self._step.case.costs.whole_seconds_at(self._step.batch_size))
        for given in wanted:
            self._whole[given.name] = self._ops.make("activations", self._bytes(given.name))
