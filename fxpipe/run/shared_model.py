"""One model on several ranks, each of which trains a part of it: what travels so that it is trained as on one device.

    before a step     values that this program needs where they are not trained        owner -> borrower
    after it          gradients that arose where they are not trained                  giver -> owner
    on demand         the values of all owners, to one rank or to all; the norms of all gradients

Where one program trains the model, the first two are empty: what replicas of a stage train for each other is exchanged
within the program. So are weights that they share out: each is on its owner alone, but for what was brought on demand.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxpipe.plan.transport import Transport
from fxpipe.run.agreement import everyones
from fxpipe.run.ownership import (
    claim,
    empty,
    fill,
    is_empty,
    is_idle,
    num_claims,
    outdate,
    owners,
    renew,
    share_idle,
    watch,
)

Route = tuple[str, int, int]
"""A parameter's name, the rank that gives, the rank that takes."""


class SharedModel:
    """A model and one engine's part in it.

    Args:
        held: names of parameters that this rank's program reads; `refreshed` those of them that it brings here itself,
            `given` those it makes gradients of.
        shared_out: the owners of parameters that are held by these alone.
    """

    def __init__(
        self,
        model: nn.Module,
        transport: Transport,
        held: Collection[str],
        refreshed: Collection[str],
        given: Collection[str],
        shared_out: Mapping[str, int],
    ) -> None:
        self.parameters = dict(model.named_parameters())
        self._transport, self._rank = transport, transport.rank
        self._givers = _ranks(everyones(transport, sorted(given)))
        for name, ranks in self._givers.items():
            claim(self.parameters[name], ranks)
        for name, owner in shared_out.items():
            claim(self.parameters[name], (owner,))
        self._model = model
        self._shared_out = [self.parameters[name] for name in shared_out]
        self.hold(held, refreshed)
        watch(model, self._rank)

    def hold(self, held: Collection[str], refreshed: Collection[str]) -> None:
        """Collective: this rank reads these from now on; they are new here."""
        self._holders = _ranks(everyones(self._transport, sorted(held)))
        self._borrowers = _ranks(everyones(self._transport, sorted({*held} - {*refreshed})))
        self._known: _Routes | None = None
        self._copy(self._to(self._holders))
        for name, ranks in self._holders.items():
            if is_idle(self.parameters[name]):
                share_idle(self.parameters[name], ranks)

    @property
    def trained_here(self) -> dict[str, nn.Parameter]:
        """Those of the program that get their gradient on this rank, and those it holds that get none anywhere."""
        names = dict.fromkeys((*self._givers, *self._holders))
        ranks = {name: owners(self.parameters[name]) or self._holders.get(name, ()) for name in names}
        mine = {name: p for name, p in self.parameters.items() if self._rank in ranks.get(name, ())}
        return {name: p for name, p in mine.items() if p.requires_grad}

    @property
    def borrows(self) -> bool:
        """Whether the program reads something on a rank that does not own it."""
        return bool(self._routes.borrowed)

    def borrow(self) -> None:
        """Collective: bring it there."""
        self._copy(self._routes.borrowed)

    def let_go(self) -> None:
        """Of what is shared out keep what this rank owns."""
        empty(parameter for parameter in self._shared_out if self._rank not in owners(parameter))

    def release(self) -> int:
        """Keep what this rank trains or reads, now and after values were brought; how many bytes are let go.

        What nobody trains is on the ranks that read it, and on the first where none does.
        """
        for name, parameter in self.parameters.items():
            if not owners(parameter):
                share_idle(parameter, self._holders.get(name, (0,)))
        ranks = {name: (*owners(p), *self._holders.get(name, ())) for name, p in self.parameters.items()}
        self._shared_out = [p for name, p in self.parameters.items() if self._rank not in ranks[name]]
        size = sum(p.nbytes for p in self._shared_out if not is_empty(p))
        self.let_go()
        watch(self._model, self._rank)
        return size

    def give(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Collective: the gradients of what this rank owns, wherever they arose. What it does not own ages by it."""
        routes = self._routes
        taken = {name: gradient for name, gradient in gradients.items() if name in routes.owned}
        copies = []
        for name, giver, owner in routes.given:
            tensor = gradients[name] if giver == self._rank else self.parameters[name]
            if owner == self._rank:
                tensor = taken[name] = torch.empty_like(self.parameters[name], requires_grad=False)
            copies.append((tensor, giver, owner))
        self._transport.copy_values(copies, "gradients of what other ranks train")
        outdate(routes.foreign)
        return taken

    def bring(self, ranks: Sequence[int]) -> None:
        """Collective: the values of all owners to these ranks."""
        self._copy(self._to(dict.fromkeys(self.parameters, tuple(ranks))))
        if self._rank in ranks:
            renew(self.parameters.values())

    def bring_averages(self, averages: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Collective: what was averaged of parameters, by their names, from their owners to all ranks.

        Of what nobody trains, a rank may hold it since its averages began.
        """
        routes = self._to(dict.fromkeys(averages, range(self._transport.world_size)))
        idle = {name: owners(self.parameters[name]) for name in averages if is_idle(self.parameters[name])}
        routes += [(name, first, later) for name, (first, *others) in idle.items() for later in others]
        copies = [(tensor, src, dst) for name, src, dst in routes for tensor in averages[name]]
        self._transport.copy_values(copies, "averages of what other ranks train")

    def norms(self, norm_type: float, names: Collection[str] | None) -> list[torch.Tensor]:
        """Collective: of every gradient of the model, in the order of its parameters, each counted once; or of those of
        these parameters."""
        parameters = [p for name, p in self.parameters.items() if names is None or name in names]
        gradients = [p.grad if self._counts(p) else None for p in parameters]
        norms = [torch.linalg.vector_norm(g.detach(), norm_type) for g in gradients if g is not None]
        mine = torch.zeros(2, len(gradients), dtype=torch.float64)
        if norms:
            found = torch.tensor([g is not None for g in gradients])
            mine[0, found], mine[1] = (
                torch.stack([n.to(norms[0].device) for n in norms]).to("cpu", torch.float64),
                found.double(),
            )
        values, counts = torch.stack(self._transport.all_gather(mine, "the norms of every rank").wait()).sum(0)
        pairs = zip(parameters, values, counts, strict=True)
        return [value.to(p.dtype.to_real()) for p, value, count in pairs if count]

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether its gradient is counted on this rank: where it is trained, else on the first."""
        return self._rank == (owners(parameter) or (0,))[0]

    def _copy(self, routes: Sequence[Route]) -> None:
        for name, _, dst in routes:
            if dst == self._rank:
                fill(self.parameters[name])
        copies = [(self.parameters[name], src, dst) for name, src, dst in routes]
        self._transport.copy_values(copies, "parameters that other ranks train")
        renew(self.parameters[name] for name, _, dst in routes if dst == self._rank)

    def _to(self, wanted: Mapping[str, Iterable[int]]) -> list[Route]:
        """From its first owner to each rank that wants it and owns it not."""
        had = {name: owners(self.parameters[name]) for name in wanted}
        return [
            (name, had[name][0], rank)
            for name in wanted
            for rank in wanted[name]
            if had[name] and rank not in had[name]
        ]

    @property
    def _routes(self) -> "_Routes":
        """Made anew where another engine has come to own something."""
        if self._known is None or self._known.num_claims != num_claims():
            had = {name: owners(p) for name, p in self.parameters.items()}
            given = [(n, by[0], to) for n, by in self._givers.items() for to in had[n] if to not in by]
            owned = {name for name, ranks in had.items() if self._rank in ranks}
            foreign = [p for name, p in self.parameters.items() if had[name] and name not in owned]
            self._known = _Routes(num_claims(), self._to(self._borrowers), given, frozenset(owned), foreign)
        return self._known


@dataclass(frozen=True)
class _Routes:
    """What a step takes before it begins and gives after it, and what is trained here and elsewhere."""

    num_claims: int
    borrowed: list[Route]
    given: list[Route]
    owned: frozenset[str]
    foreign: list[nn.Parameter]


def state_copy(model: nn.Module, trainable_only: bool) -> dict[str, Any]:
    """The model's own state dict, copied to the CPU; of its trainable parameters alone where asked for."""
    state = model.state_dict()
    if trainable_only:
        trainable = {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        state = {name: value for name, value in state.items() if name in trainable}
    return {n: v.detach().to("cpu", copy=True) if isinstance(v, torch.Tensor) else v for n, v in state.items()}


def _ranks(names: Sequence[Sequence[str]]) -> dict[str, tuple[int, ...]]:
    """By name, which ranks have it; in the same order on all of them."""
    found: dict[str, tuple[int, ...]] = {}
    for rank, of_rank in enumerate(names):
        for name in of_rank:
            found[name] = (*found.get(name, ()), rank)
    return found
