"""One rank's part in what is exchanged, of a plan and of a program alike: values are buffers there, nodes here.

post(h[2])       recv h[0], recv h[1], recv h[2]     receives are posted in the order of their channel
receive(h[0])    wait h[0]                           and waited for once
end of step      tied gradients and the loss go to the first rank that has one, their sums to all that want them, in
                 binomial trees: 3 -> 2, 1 -> 0, 2 -> 0, then 0 -> 2, 0 -> 1, 2 -> 3
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from fxpipe.plan.actions import Action
from fxpipe.simulate.op_lists import Transfer

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
    """A weight of several ranks: `givers` have gradients, the first gets their sum, which goes to all `holders`."""

    name: str
    num_bytes: int
    givers: tuple[int, ...]
    holders: tuple[int, ...]


def closing_sends(
    tied: Sequence[TiedGradient], loss_ranks: Sequence[int], num_ranks: int
) -> Iterator[tuple[int, int, TiedGradient | None]]:
    """(source, destination, gradient or None for the loss), every one after those that it waits for."""
    for gradient in tied:
        yield from ((a, b, gradient) for a, b in _tree(gradient.givers[0], gradient.givers))
    for gradient in tied:
        yield from ((b, a, gradient) for a, b in reversed(_tree(gradient.givers[0], gradient.holders)))
    for first in loss_ranks[:1]:
        yield from ((a, b, None) for a, b in _tree(first, loss_ranks))
        yield from ((b, a, None) for a, b in reversed(_tree(first, range(num_ranks))))


def _tree(root: int, ranks: Iterable[int]) -> list[tuple[int, int]]:
    """(child, parent) of a binomial tree, children before what their parents send; ranks far from the root on top.

    In it messages one after another are as many as the number of ranks has digits, and neighbours, which are of one
    node, meet first (Thakur, Rabenseifner, Gropp, IJHPCA 19, 2005, section 3).
    """
    members = [root, *sorted({*ranks} - {root})]
    numbers = sorted(range(1, len(members)), key=lambda number: number & -number)
    return [(members[number], members[number & (number - 1)]) for number in numbers]


def _rises(message: Sent, root: int) -> bool:
    """Whether a message of the end of a step is on its way to the root of its tree."""
    return message.dst == root or (message.src != root and message.dst < message.src)


Message = TypeVar("Message", bound=Sent)
Value = TypeVar("Value")


class MessageWriter(Generic[Message, Value]):
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
        """Sum gradients of tied parameters, and give the sum to every rank that holds them."""
        messages: dict[str, list[Message]] = {}
        for message in (message for message in self._closing if message.kind == "gradient"):
            messages.setdefault(message.value, []).append(message)
        for gradient in tied:
            if self.rank in gradient.givers:
                of = messages.get(gradient.name, ())
                gradients[gradient.name] = self._reduce(of, gradient.givers[0], gradients[gradient.name])
        for gradient in tied:
            if self.rank in gradient.holders:
                of, own = messages.get(gradient.name, ()), gradients.get(gradient.name)
                gradients[gradient.name] = self._broadcast(of, gradient.givers[0], own)

    def share_loss(self, first: int, loss: Value | None) -> Value:
        """Add up all parts of the loss, and tell every rank."""
        messages = [message for message in self._closing if message.kind == "loss"]
        if loss is not None:
            loss = self._reduce(messages, first, loss)
        return self._broadcast(messages, first, loss)

    def _reduce(self, messages: Iterable[Message], root: int, own: Value) -> Value:
        """The sum of this rank's part and what comes up to it, sent on to the root."""
        rising = [message for message in messages if _rises(message, root)]
        total = self.add([own, *(self.receive(message) for message in rising if message.dst == self.rank)])
        for message in rising:
            if message.src == self.rank:
                self.send(message, total)
        return total

    def _broadcast(self, messages: Iterable[Message], root: int, own: Value | None) -> Value:
        """What comes down from the root, whose own it is, sent on."""
        falling = [message for message in messages if not _rises(message, root)]
        for message in falling:
            if message.dst == self.rank:
                own = self.receive(message)
        assert own is not None, f"nobody tells rank {self.rank}"
        for message in falling:
            if message.src == self.rank:
                self.send(message, own)
        return own
