"""One rank's ops as they are written, with the memory they touch: each buffer from where it is made to its last use.

h = make(4 KiB); run(forward); use(h); run(backward); use(h)      backward: freed 4 KiB
"""

from fxpipe.simulate.collectives import Collective
from fxpipe.simulate.op_lists import Bytes, Op, Transfer


class RankOps:
    """Ops and buffers; what is made or used belongs to the op that was written last."""

    def __init__(self) -> None:
        self._ops: list[tuple[str, str, float, Transfer | None, Collective | None]] = []
        self._most: dict[int, tuple[int, int]] = {}
        self._made: list[int] = []  # by buffer: the op that makes it, its category and bytes, last use, messages
        self._what: list[tuple[str, int]] = []
        self._last: list[int] = []
        self._edges: dict[int, tuple[int, ...]] = {}
        self._kept: set[int] = set()

    def no_op(self) -> None:
        """An op that takes no time, for what is there before others."""
        self._ops.append(("none", "", 0.0, None, None))

    def begin(self, action: str) -> None:
        self._ops.append(("begin", action, 0.0, None, None))

    def run(self, seconds: float, most: int | None = None) -> None:
        """Compute; `most` bytes at most beside what was held before, that of what it makes where left out."""
        if most is not None:
            self._most[len(self._ops)] = most, most
        self._ops.append(("run", "", seconds, None, None))

    def send(self, message: Transfer, buffer: int) -> None:
        self._ops.append(("send", "", 0.0, message, None))
        self.use(buffer)
        self._edges[buffer] = (*self._edges.get(buffer, ()), message.edge)

    def post(self, message: Transfer) -> int:
        """Into a new buffer."""
        self._ops.append(("post", "", 0.0, message, None))
        return self.make("transfers", message.num_bytes)

    def wait(self, message: Transfer, buffer: int) -> None:
        self._ops.append(("wait", "", 0.0, message, None))
        self.use(buffer)

    def issue(self, collective: Collective) -> None:
        self._ops.append((collective.kind, "", 0.0, None, collective))

    def wait_for(self, collective: Collective) -> None:
        self._ops.append((f"wait_{collective.kind}", "", 0.0, None, collective))

    # -- buffers

    def make(self, category: str, num_bytes: int) -> int:
        """Memory that the last op takes."""
        place = len(self._ops) - 1
        self._made.append(place)
        self._what.append((category, num_bytes))
        self._last.append(place)
        return len(self._last) - 1

    def use(self, buffer: int) -> None:
        """The last op reads it."""
        self._last[buffer] = len(self._ops) - 1

    def keep(self, buffer: int) -> None:
        """It is there to the end of the step and after."""
        self._kept.add(buffer)

    def num_bytes(self, buffer: int) -> int:
        return self._what[buffer][1]

    @property
    def position(self) -> int:
        """The place of the op that was written last."""
        return len(self._ops) - 1

    def goes_at(self, buffer: int) -> int | None:
        """The last use of a buffer so far; None where it stays."""
        return None if buffer in self._kept else self._last[buffer]

    def is_sent(self, buffer: int) -> bool:
        """Whether a message holds it until it has arrived."""
        return buffer in self._edges

    def see(self, position: int, most: int, most_kept: int) -> None:
        """Note the most bytes during an op, beside what was held before: if what is sent has arrived, if not."""
        self._most[position] = most, most_kept

    def ops(self) -> list[Op]:
        """All ops, with what they do to memory."""
        taken: dict[int, list[tuple[str, int]]] = {}
        freed: dict[int, list[tuple[str, int]]] = {}
        sent: dict[int, list[tuple[str, int, tuple[int, ...]]]] = {}
        kept, edges = self._kept, self._edges
        for buffer, (made, what, last) in enumerate(zip(self._made, self._what, self._last, strict=True)):
            if what[1]:
                taken.setdefault(made, []).append(what)
                if buffer in edges:
                    if buffer not in kept:
                        sent.setdefault(last, []).append((*what, edges[buffer]))
                elif buffer not in kept:
                    freed.setdefault(last, []).append(what)
        memory: list[Bytes | None] = [None] * len(self._ops)
        for place in taken.keys() | freed.keys() | sent.keys() | self._most.keys():
            takes = tuple(taken.get(place, ()))
            most = self._most.get(place) or (sum([size for _, size in takes]),) * 2
            memory[place] = Bytes(takes, tuple(freed.get(place, ())), tuple(sent.get(place, ())), *most)
        return [Op(*op, of_op) for op, of_op in zip(self._ops, memory, strict=True)]
