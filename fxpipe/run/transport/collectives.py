"""What replicas of a stage sum and tell each other, over torch.distributed: flat tensors, a collective for each dtype.

all_reduce        gradients of all      ->  their sums, on all
reduce_scatter    gradients of all      ->  a sum on its owner alone
gather            parameters of owners  ->  their values, on all; `broadcast` puts them where the parameters are
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from fxpipe.plan.transport import Pending, Transport
from fxpipe.run.transport import owned
from fxpipe.run.transport.grouped import Started


class Collectives(Transport):
    """One rank's part in them; `_reducing` are the process groups, by their ranks."""

    _reducing: dict[tuple[int, ...], dist.ProcessGroup]

    @abstractmethod
    def _named(self, what: str, peer: int | None) -> AbstractContextManager[None]:
        """Turns a backend's error into what is behind it."""

    @abstractmethod
    def _turn(self, edge: int | None) -> Callable[[], None]:
        """What to do before a wait for what has this edge."""

    @abstractmethod
    def _wait(self, work: Started, what: str, peer: int) -> None: ...

    def all_reduce(self, tensors: list[torch.Tensor], ranks: tuple[int, ...], edge: int) -> Pending[list[torch.Tensor]]:
        """The sum by dtype, as flat tensors: one collective each instead of one per gradient."""
        group, peer = self._reducing[ranks], ranks[(ranks.index(self.rank) + 1) % len(ranks)]
        what = f"the gradients of ranks {list(ranks)} (edge {edge})"
        started = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            positions = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            flat = torch.cat([tensors[i].detach().reshape(-1) for i in positions])
            with self._named(what, peer):
                work = dist.all_reduce(flat, group=group, async_op=True)
            assert work is not None
            started.append((work, flat, positions))
        shapes, turn = [tensor.shape for tensor in tensors], self._turn(edge)

        def wait() -> list[torch.Tensor]:
            turn()
            sums: dict[int, torch.Tensor] = {}
            for work, flat, positions in started:
                self._wait(work, what, peer)
                parts = flat.split([shapes[i].numel() for i in positions])
                sums |= {i: part.view(shapes[i]) for i, part in zip(positions, parts, strict=True)}
            return [sums[i] for i in range(len(shapes))]

        return Pending(wait)

    def reduce_scatter(
        self, tensors: list[torch.Tensor], owners: tuple[int, ...], ranks: tuple[int, ...], edge: int
    ) -> Pending[list[torch.Tensor]]:
        """Each rank sends the others what is theirs, in one exchange by dtype, and adds what it gets to its own, in
        their order: as many bytes as a ring of equal shares sends, for shares of any sizes."""
        group, peer = self._reducing[ranks], ranks[(ranks.index(self.rank) + 1) % len(ranks)]
        what, started = f"the gradients of ranks {list(ranks)} (edge {edge})", []
        for of in _by_dtype(tensors, owners):
            sums = of.get(self.rank, [])
            given = [of.get(rank, []) if rank != self.rank else [] for rank in ranks]
            flat = _flat([tensor for of_rank in given for tensor in of_rank], next(iter(of.values()))[0])
            sizes = [_num_elements(sums) if rank != self.rank else 0 for rank in ranks]
            taken = flat.new_empty(sum(sizes))
            with self._named(what, peer):
                work = dist.all_to_all_single(
                    taken, flat, sizes, [_num_elements(of_rank) for of_rank in given], group=group, async_op=True
                )
            assert work is not None
            started.append((work, flat, taken, sums))
        turn, mine = self._turn(edge), owned(tensors, owners).get(self.rank, [])

        def wait() -> list[torch.Tensor]:
            turn()
            for work, _, taken, sums in started:
                self._wait(work, what, peer)
                for row in taken.view(len(ranks) - 1, _num_elements(sums)):
                    for total, part in zip(sums, row.split([tensor.numel() for tensor in sums]), strict=True):
                        total.add_(part.view(total.shape))
            started.clear()
            return mine

        return Pending(wait)

    def gather(
        self, tensors: list[torch.Tensor], owners: tuple[int, ...], ranks: tuple[int, ...], edge: int
    ) -> Pending[list[torch.Tensor]]:
        """Each owner's as flat tensors, a collective for every dtype."""
        what, started = f"the parameters of ranks {list(ranks)} (edge {edge})", []
        tensors = [tensor.detach() for tensor in tensors]
        for of in _by_dtype(tensors, owners):
            for owner, values in sorted(of.items()):
                flat = _flat(values, values[0]) if owner == self.rank else values[0].new_empty(_num_elements(values))
                with self._named(what, owner):
                    work = dist.broadcast(flat, owner, group=self._reducing[ranks], async_op=True)
                assert work is not None
                started.append((work, flat, owner, values))
        turn = self._turn(edge)

        def wait() -> list[torch.Tensor]:
            turn()
            found: dict[int, torch.Tensor] = {}  # by the tensor's id
            for work, flat, owner, values in started:
                self._wait(work, what, owner)
                if owner != self.rank:
                    parts = flat.split([tensor.numel() for tensor in values])
                    found |= {id(t): part.view(t.shape) for t, part in zip(values, parts, strict=True)}
            return [found.get(id(tensor), tensor) for tensor in tensors]

        return Pending(wait)


def _by_dtype(tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Iterator[dict[int, list[torch.Tensor]]]:
    """The tensors of every owner, one dtype after the other."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        mine = [(tensor, owner) for tensor, owner in zip(tensors, owners, strict=True) if tensor.dtype == dtype]
        yield owned([tensor for tensor, _ in mine], [owner for _, owner in mine])


def _flat(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """A copy, one tensor after the other; where there is none, nothing."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)


def _num_elements(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
