"""One model on several ranks, each of which trains a part of it: what travels so that it is trained as on one device.

    before a step     values that this program needs where they are not trained        owner -> borrower
    after it          gradients that arose where they are not trained                  giver -> owner
    on demand         the values of all owners, to one rank or to all; the norms of all gradients

Where one program trains the model, the first two are empty.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxpipe.plan.transport import Transport
from fxpipe.run.agreement import everyones
from fxpipe.run.ownership import claim, outdate, owners, renew, watch


class SharedModel:
    """A model and one engine's part in it.

    Args:
        held: names of trainable parameters that this rank's program reads; `given` those it makes gradients of.
    """

    def __init__(self, model: nn.Module, transport: Transport, held: Collection[str], given: Collection[str]) -> None:
        self.parameters = dict(model.named_parameters())
        self._transport, self._rank = transport, transport.rank
        self._holders = _ranks(everyones(transport, sorted(held)))
        self._givers = _ranks(everyones(transport, sorted(given)))
        for name, ranks in self._givers.items():
            claim(self.parameters[name], ranks)
        self.borrow()
        watch(model, self._rank)

    def hold(self, held: Collection[str]) -> None:
        """Collective: this rank reads these from now on."""
        self._holders = _ranks(everyones(self._transport, sorted(held)))
        self.borrow()

    @property
    def trained_here(self) -> dict[str, nn.Parameter]:
        """Those of the program that get their gradient on this rank, and those it holds that get none anywhere."""
        names = dict.fromkeys((*self._givers, *self._holders))
        ranks = {name: owners(self.parameters[name]) or self._holders.get(name, ()) for name in names}
        return {name: p for name, p in self.parameters.items() if self._rank in ranks.get(name, ())}

    @property
    def borrows(self) -> bool:
        """Whether the program reads something on a rank that does not own it."""
        return bool(self._copies(self._holders))

    def borrow(self) -> None:
        """Collective: bring it there."""
        self._bring(self._holders)

    def give(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Collective: the gradients of what this rank owns, wherever they arose. Those of other ranks age by it."""
        copies, taken = [], {n: g for n, g in gradients.items() if self._rank in owners(self.parameters[n])}
        for name, givers in self._givers.items():
            for owner in owners(self.parameters[name]):
                if owner not in givers:
                    tensor = gradients.get(name, self.parameters[name])
                    if owner == self._rank:
                        tensor = taken[name] = torch.empty_like(self.parameters[name], requires_grad=False)
                    copies.append((tensor, givers[0], owner))
        self._transport.copy_values(copies, "gradients of what other ranks train")
        outdate(p for p in self.parameters.values() if owners(p) and self._rank not in owners(p))
        return taken

    def bring(self, ranks: Sequence[int]) -> None:
        """Collective: the values of all owners to these ranks."""
        self._bring(dict.fromkeys(self.parameters, tuple(ranks)))
        if self._rank in ranks:
            renew(self.parameters.values())

    def norms(self, norm_type: float) -> list[torch.Tensor]:
        """Collective: of every gradient of the model, in the order of its parameters, each counted once."""
        gradients = [p.grad if self._counts(p) else None for p in self.parameters.values()]
        norms = [torch.linalg.vector_norm(g.detach(), norm_type) for g in gradients if g is not None]
        mine = torch.zeros(2, len(gradients), dtype=torch.float64)
        if norms:
            found = torch.tensor([g is not None for g in gradients])
            mine[0, found], mine[1] = torch.stack(norms).to("cpu", torch.float64), found.double()
        values, counts = torch.stack(self._transport.all_gather(mine, "the norms of every rank")).sum(0)
        pairs = zip(self.parameters.values(), values, counts, strict=True)
        return [value.to(p.dtype.to_real()) for p, value, count in pairs if count]

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether its gradient is counted on this rank: where it is trained, else on the first."""
        return self._rank == (owners(parameter) or (0,))[0]

    def _bring(self, wanted: Mapping[str, Iterable[int]]) -> None:
        self._transport.copy_values(self._copies(wanted), "parameters that other ranks train")

    def _copies(self, wanted: Mapping[str, Iterable[int]]) -> list[tuple[torch.Tensor, int, int]]:
        """(parameter, its owner, the rank that wants it and is none)."""
        copies: list[tuple[torch.Tensor, int, int]] = []
        for name, ranks in wanted.items():
            parameter = self.parameters[name]
            have = owners(parameter)
            copies += [(parameter, have[0], rank) for rank in ranks if have and rank not in have]
        return copies


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
