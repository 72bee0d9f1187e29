"""What a step writes into the model's own tensors, run on these.

before the programs    w        on the ranks that train it
after them             n        on all ranks, as buffers are, which are sent what the step has seen for it
                       u        on those that train what it is made of, and from the first of these to the others
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from fxpipe.errors import RunError
from fxpipe.plan.state_update import StateUpdate
from fxpipe.run.ownership import owners


class StateUpdates:
    """Those of a plan, on tensors by name."""

    def __init__(self, updates: Sequence[StateUpdate], state: Mapping[str, torch.Tensor]) -> None:
        self._state, self._run = state, {update.name: update.bound(state) for update in updates}

    @torch.no_grad()
    def write(self, updates: Iterable[StateUpdate], seen: Mapping[str, torch.Tensor]) -> None:
        """Those after a step, which has `seen` what it has, are all computed before the first of them is written; those
        before it are not made of each other."""
        values = dict[str, torch.Tensor]()
        for update in updates:
            value = self._run[update.name](*(seen[name] for name in update.seen))
            if update.is_first:
                self._state[update.name].copy_(value)
            else:
                values[update.name] = value.clone()
        for name, value in values.items():
            self._state[name].copy_(value)


def routes(update: StateUpdate, state: Mapping[str, torch.Tensor], world_size: int) -> tuple[list[int], list[int]]:
    """The ranks that compute a new value, which have all that it is made of, and those that are sent it.

    Raises:
        RunError: no rank has all.
    """
    have = [set(owners(state[name]) or range(world_size)) for name in (*update.reads, update.name)]
    by = sorted(set.intersection(*have))
    if not by:
        raise RunError(
            f"forward writes {update.name} by {', '.join(update.reads)}, which no rank has together since weights were "
            "let go: leave engine.release() out, or write it outside of forward"
        )
    return by, sorted(have[-1].difference(by))


@contextmanager
def put_back(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """What is written into these inside is what this gives afterwards, and they are as they were."""
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    written: dict[str, torch.Tensor] = {}
    try:
        yield written
    finally:
        with torch.no_grad():
            for name, tensor in tensors.items():
                written[name] = tensor.detach().clone()
                tensor.copy_(before[name])
