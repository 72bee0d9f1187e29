"""One rank's part in what is exchanged, of a plan and of a program alike: values are buffers there, nodes here.

post(h[2])       recv h[0], recv h[1], recv h[2]     receives are posted in the order of their channel
receive(h[0])    wait h[0]                           and waited for once
end of step      tied gradients and the loss go to the first rank that has one, their sums to all that want them
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from fxpipe.plan.actions import Action
from fxpipe.simulate.op_lists import Transfer

PREFETCH = 1  # actions ahead of its use that a receive is posted

Use = tuple[str, int, bool]
"""A value, a micro-batch, whether it is the gradient."""


class Sent(Transfer, Protocol):
    """A message, planned or of a program."""

    @property
    def kind(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def microbatch(self) -> int: ...


@dataclass(frozen=True)
class TiedGradient:
    """A weight of several ranks: `givers` have gradients, the first sums them and sends the sum to all `holders`."""

    name: str
    num_bytes: int
    givers: tuple[int, ...]
    holders: tuple[int, ...]


def closing_sends(
    tied: Sequence[TiedGradient], loss_ranks: Sequence[int], num_ranks: int
) -> Iterator[tuple[int, int, TiedGradient | None]]:
    """(source, destination, gradient or None for the loss), every one after those that it waits for."""
    for gradient in tied:
        yield from ((giver, gradient.givers[0], gradient) for giver in gradient.givers[1:])
    for gradient in tied:
        owner = gradient.givers[0]
        yield from ((owner, holder, gradient) for holder in gradient.holders if holder != owner)
    for first in loss_ranks[:1]:
        yield from ((rank, first, None) for rank in loss_ranks[1:])
        yield from ((first, rank, None) for rank in range(num_ranks) if rank != first)


Message = TypeVar("Message", bound=Sent)
Value = TypeVar("Value")


class Exchange(Generic[Message, Value]):
    """What a rank receives and sends; `closing` are the messages from it and to it after the last action, by edge."""

    def __init__(self, rank: int, incoming: Sequence[Message], closing: Sequence[Message]) -> None:
        self.rank, self._closing = rank, closing
        self._posted: dict[int, Value] = {}
        self._arrived: dict[int, Value] = {}
        self._queues: dict[int, list[Message]] = {}  # receives not yet posted, by channel, the next one last
        self._by_use: dict[Use, list[Message]] = {}
        self.values: dict[tuple[str, int], Value] = {}  # by name and micro-batch
        self.gradients: dict[tuple[str, int], list[Value]] = {}  # of this rank's stages, by value and micro-batch
        for message in reversed(incoming):
            self._queues.setdefault(message.src, []).append(message)
        for message in incoming:
            use = message.value, message.microbatch, message.kind == "gradient"
            self._by_use.setdefault(use, []).append(message)

    # -- of a plan or a program

    def start_receive(self, message: Message) -> Value:
        raise NotImplementedError

    def wait(self, message: Message, posted: Value) -> Value:
        raise NotImplementedError

    def send(self, message: Message, value: Value) -> None:
        raise NotImplementedError

    def add(self, parts: Sequence[Value]) -> Value:
        """The sum of one or more values, from first to last."""
        raise NotImplementedError

    def fetch(self, name: str, microbatch: int) -> Value:
        """A value that no rank makes in this step."""
        raise NotImplementedError

    def uses(self, action: Action) -> Iterable[Use]:
        """What an action waits for."""
        raise NotImplementedError

    # -- receives

    def post_all(self, action: Action) -> None:
        """Post every receive that an action needs, and those before it on the same channels."""
        for use in self.uses(action):
            for message in self._by_use.get(use, ()):
                self.post(message)

    def post(self, message: Message) -> None:
        queue = self._queues[message.src]
        while message.edge not in self._posted:
            following = queue.pop()
            self._posted[following.edge] = self.start_receive(following)

    def receive(self, message: Message) -> Value:
        self.post(message)
        if message.edge not in self._arrived:
            self._arrived[message.edge] = self.wait(message, self._posted[message.edge])
        return self._arrived[message.edge]

    def read(self, name: str, microbatch: int) -> Value:
        """A value of one micro-batch: made here, received, or of what is there from the start."""
        key = name, microbatch
        if key not in self.values:
            messages = self._by_use.get((name, microbatch, False))
            self.values[key] = self.receive(messages[0]) if messages else self.fetch(name, microbatch)
        return self.values[key]

    # -- gradients of values

    def summed(self, name: str, microbatch: int) -> Value:
        """This rank's gradient of a value: its stages' parts, summed once."""
        parts = self.gradients[name, microbatch]
        parts[:] = [self.add(parts)]
        return parts[0]

    def gradient(self, name: str, microbatch: int) -> Value | None:
        """The sum of what a value's readers give, in the order of their ranks; None if none does."""
        messages = {message.src: message for message in self._by_use.get((name, microbatch, True), ())}
        own = [self.rank] if (name, microbatch) in self.gradients else []
        parts = [
            self.summed(name, microbatch) if rank == self.rank else self.receive(messages[rank])
            for rank in sorted([*messages, *own])
        ]
        return self.add(parts) if parts else None

    # -- the end of the step

    def sum_tied(self, tied: Sequence[TiedGradient], gradients: dict[str, Value]) -> None:
        """Sum gradients of tied parameters on their first rank, and give the sum to every rank that holds them."""
        messages: dict[str, list[Message]] = {}
        for message in (message for message in self._closing if message.kind == "gradient"):
            messages.setdefault(message.value, []).append(message)
        for gradient in tied:
            for message in messages.get(gradient.name, ()):
                if message.dst == gradient.givers[0] != self.rank:
                    self.send(message, gradients[gradient.name])
        for gradient in tied:
            if self.rank == gradient.givers[0]:
                received = [self.receive(m) for m in messages.get(gradient.name, ()) if m.dst == self.rank]
                gradients[gradient.name] = self.add([gradients[gradient.name], *received])
        for gradient in tied:
            for message in messages.get(gradient.name, ()):
                if message.src == gradient.givers[0] == self.rank:
                    self.send(message, gradients[gradient.name])
                elif message.src == gradient.givers[0]:
                    gradients[gradient.name] = self.receive(message)

    def share_loss(self, first: int, loss: Value | None) -> Value:
        """The first rank that has a part of the loss adds up all parts and tells every rank."""
        messages = [message for message in self._closing if message.kind == "loss"]
        if self.rank != first:
            for message in messages:
                if message.src == self.rank:
                    assert loss is not None
                    self.send(message, loss)
            (told,) = (message for message in messages if message.src == first)
            return self.receive(told)
        assert loss is not None
        total = self.add([loss, *(self.receive(message) for message in messages if message.dst == first)])
        for message in messages:
            if message.src == first:
                self.send(message, total)
        return total
