"""What whoever started this process says of it, and the store through which a launch's processes find each other."""

import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fxpipe.errors import FxpipeError, RunError
from fxpipe.run.transport.presence import Presence

_present: dict[tuple[str, int], Presence] = {}
"""This process in a launch, by the address of its store."""
_stores: dict[tuple[str, int], Any] = {}
"""The launch's store, by its address: a process connects to it once, for its host may not listen twice."""
_num_shared = itertools.count()
_JOIN_TIMEOUT = timedelta(seconds=300)
"""How much later than another a process of a launch may come: they import and load their models first."""
_TELL_TIMEOUT = timedelta(seconds=10)
"""How long a rank 0 that has no plan stays, so that the others may read why from the store it hosts."""


@dataclass(frozen=True)
class Launch:
    """What torchrun, or whoever set its variables, says about this process."""

    rank: int
    world_size: int
    address: tuple[str, int]
    attempt: str
    launcher_hosts: bool

    @staticmethod
    def from_environment() -> "Launch":
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise FxpipeError(f"{', '.join(missing)} not set: start this program with torchrun --nproc-per-node N")
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        launcher_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Launch(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), address, attempt, launcher_hosts)

    def store(self, name: str, timeout: timedelta) -> Any:
        """The launch's store, with keys of their own for `name`. Rank 0 is its host where nobody else is."""
        if self.address not in _stores:
            _stores[self.address] = dist.TCPStore(  # type: ignore[attr-defined]
                *self.address, self.world_size, timeout=timeout, wait_for_workers=False,
                is_master=self.rank == 0 and not self.launcher_hosts and not dist.is_initialized(),
            )  # fmt: skip
        return dist.PrefixStore(f"fxpipe/{self.attempt}/{name}", _stores[self.address])  # type: ignore[attr-defined]

    def presence(self, timeout: timedelta) -> Presence:
        """This process in it, which gives signs of life from the first call on."""
        if self.address not in _present:
            own = self.store("presence", timeout).clone()  # a connection of its own: others are waited on
            is_host = self.rank == 0 and not self.launcher_hosts
            _present[self.address] = Presence(own, self.rank, is_host)
        return _present[self.address]

    def meet(self, store: Any, timeout: timedelta) -> None:
        """Collective: all ranks are here.

        Raises:
            RunError: one was lost, has left, or has not come in time.
        """
        store.append("here", f"{self.rank} ")
        present = self.presence(timeout)
        seconds = timeout.total_seconds()
        missing = present.await_ranks(range(self.world_size), lambda: _ranks(store, "here"), seconds, "all to begin")
        if missing:
            raise RunError(
                f"rank {self.rank} did not find all {self.world_size} ranks within {seconds:g} s; see what ranks "
                f"{missing} said"
            )
        present.met()


def _ranks(store: Any, key: str) -> set[int]:
    """Which have written their number there."""
    return {int(rank) for rank in store.get(key).decode().split()}


def join_launch() -> int:
    """This process's rank, connected to the launch's store, so that a rank 0 that is gone from now on is missed.

    Raises:
        RunError: there is no rank 0 to connect to.
    """
    launch = Launch.from_environment()
    try:
        launch.presence(_JOIN_TIMEOUT)
    except RuntimeError as error:
        where = ":".join(map(str, launch.address))
        raise RunError(f"no rank 0 at {where} after {_JOIN_TIMEOUT}: {str(error).splitlines()[0]}") from None
    return launch.rank


def from_rank_zero(make: Callable[[], str], timeout_seconds: float) -> str:
    """Collective over the ranks of a launch: what `make` gives on rank 0, where alone it is called.

    Raises:
        RunError: rank 0 raised, which it does itself, or gave nothing in time.
    """
    launch = Launch.from_environment()
    store = launch.store(f"shared/{next(_num_shared)}", timedelta(seconds=timeout_seconds))
    present = launch.presence(_JOIN_TIMEOUT)

    def wait_for_readers(timeout: timedelta) -> None:  # who has not come by then will not
        others = range(1, launch.world_size)
        present.await_ranks(others, lambda: _ranks(store, "read"), timeout.total_seconds(), "others to read its plan")

    if launch.rank == 0:
        store.set("read", "")
        try:
            text = make()
        except BaseException as error:
            store.set("text", f"-{type(error).__name__}: {error}")
            with suppress(RuntimeError):  # one has ended meanwhile
                wait_for_readers(_TELL_TIMEOUT)
            raise
        store.set("text", f"+{text}")
        wait_for_readers(_JOIN_TIMEOUT)
        return text
    try:
        if present.await_ranks([0], lambda: [0] if store.check(["text"]) else [], timeout_seconds, "rank 0's plan"):
            raise RunError(f"waited {timeout_seconds:g} s for rank 0's plan")
        found = str(store.get("text").decode())
        store.append("read", f"{launch.rank} ")
    except RunError:
        raise
    except RuntimeError as error:
        raise RunError(f"lost rank 0 before it gave its plan: {str(error).splitlines()[0]}") from None
    if found.startswith("-"):
        raise RunError(f"rank 0 has no plan: {found[1:]}")
    return found[1:]
