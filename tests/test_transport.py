"""Transports: order, matching, failures and standstills, with ranks as threads and as processes."""

import itertools
import os
import signal
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import RunError
from fxpipe.plan.transport import Transport
from fxpipe.run.transport import distributed, run_ranks, watchdog
from fxpipe.run.transport.answering import Answering
from fxpipe.run.transport.distributed import DistributedTransport
from tests.distributed import run_processes, start_processes, start_torchrun

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
SHAPES = ((), (0,), (3, 0, 2), (1,), (2, 3))


def every_kind() -> list[torch.Tensor]:
    """A tensor of every dtype and kind of shape a rank program may send."""
    return [torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) for dtype in DTYPES for shape in SHAPES]


def exchange(transport: Transport, steps: int = 2) -> list[torch.Tensor]:
    """Every rank sends every kind of tensor, plus its rank, round the ring; the received, last posted waited first."""
    dst, src = (transport.rank + 1) % transport.world_size, (transport.rank - 1) % transport.world_size
    received = []
    for step in range(steps):
        transport.set_action(f"step {step}")
        kinds = every_kind()
        for edge, tensor in enumerate(kinds):
            transport.send(tensor + transport.rank if tensor.dtype != torch.bool else tensor, dst, edge)
        posted = [transport.recv(src, e, tuple(t.shape), t.dtype, CPU) for e, t in enumerate(kinds)]
        received = [pending.wait() for pending in reversed(posted)][::-1]
        transport.flush()
    return received


def expected_of(rank: int, world_size: int) -> list[torch.Tensor]:
    return [t + (rank - 1) % world_size if t.dtype != torch.bool else t for t in every_kind()]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(g.dtype == w.dtype and torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_every_kind_of_tensor_arrives_and_is_counted() -> None:
    def rank_main(transport: Transport) -> tuple[list[torch.Tensor], dict[tuple[int, int], int]]:
        return exchange(transport), transport.sent_bytes()

    per_step = sum(t.numel() * t.element_size() for t in every_kind())
    for rank, (received, sent_bytes) in enumerate(run_ranks(3, rank_main)):
        assert same(received, expected_of(rank, 3))
        assert sent_bytes == {(rank, (rank + 1) % 3): 2 * per_step}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda c: c[0] != c[1]), max_size=30))
def test_any_order_of_messages_that_both_ends_share_runs(messages: list[tuple[int, int]]) -> None:
    def rank_main(transport: Transport) -> list[float]:
        got = []
        for edge, (src, dst) in enumerate(messages):
            if transport.rank == src:
                transport.send(torch.tensor(float(edge)), dst, edge)
            if transport.rank == dst:
                got.append(transport.recv(src, edge, (), torch.float32, CPU).wait().item())
        transport.flush()
        return got

    for rank, got in enumerate(run_ranks(4, rank_main)):
        assert got == [edge for edge, (_, dst) in enumerate(messages) if dst == rank]


def test_control_objects() -> None:
    def rank_main(transport: Transport) -> tuple[str, list[int] | None]:
        plan = transport.broadcast_object("" if transport.rank else "plan")
        return plan, transport.gather_object(transport.rank * 10)

    assert run_ranks(3, rank_main) == [("plan", [0, 10, 20]), ("plan", None), ("plan", None)]


def receives(edge: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rank 0 sends edges 4 and 5, both float32[2, 3]; rank 1 expects something else first."""

    def rank_main(transport: Transport) -> None:
        transport.set_action("0F0")
        if transport.rank == 0:
            transport.send(torch.zeros(2, 3), 1, 4)
            transport.send(torch.ones(2, 3), 1, 5)
        else:
            transport.recv(0, edge, shape, dtype, CPU).wait()
        transport.flush()

    run_ranks(2, rank_main)


@pytest.mark.parametrize(
    ("edge", "shape", "dtype", "expected"),
    [
        (5, (2, 3), torch.float32, r"edge 5 float32\[2, 3\]"),
        (4, (3, 2), torch.float32, r"edge 4 float32\[3, 2\]"),
        (4, (2, 3), torch.float64, r"edge 4 float64\[2, 3\]"),
    ],
)
def test_a_message_other_than_the_expected_is_refused(
    edge: int, shape: tuple[int, ...], dtype: torch.dtype, expected: str
) -> None:
    match = rf"rank 1 failed in 0F0: rank 1 expects {expected} of step 0 from rank 0, but .* edge 4 float32\[2, 3\]"
    with pytest.raises(RunError, match=match):
        receives(edge, shape, dtype)


def test_a_message_nobody_receives_is_named() -> None:
    with pytest.raises(RunError, match=r"edge 5 from rank 0 to rank 1 is not received|without receiving edges \[5\]"):
        receives(4, (2, 3), torch.float32)


def crossing(transport: Transport) -> list[float]:
    """Four steps round the ring, each of whose messages is waited for a step later, under the edge of the next one."""
    dst, src = (transport.rank + 1) % transport.world_size, (transport.rank - 1) % transport.world_size
    received, pending, sent = [], None, list[weakref.ref[torch.UntypedStorage]]()
    for step in range(4):
        transport.set_action(f"step {step}")
        value = torch.tensor(float(10 * step + transport.rank))
        sent.append(weakref.ref(value.untyped_storage()))
        transport.send(value, dst, 0)
        posted = transport.recv(src, 0, (), torch.float32, CPU)
        if pending is not None:
            received.append(pending.wait().item())
        pending = posted
        transport.advance()
        if isinstance(transport, DistributedTransport):
            assert all(storage() is None for storage in sent[:-2])
    assert pending is not None
    received.append(pending.wait().item())
    transport.flush()
    return received


def test_messages_cross_from_a_step_to_the_next() -> None:
    assert run_ranks(3, crossing) == [[10.0 * step + (rank - 1) % 3 for step in range(4)] for rank in range(3)]


def crossing_processes() -> list[float]:
    transport = DistributedTransport()
    received = crossing(transport)
    transport.close()
    return received


def test_messages_cross_between_processes() -> None:
    assert run_processes(2, crossing_processes) == [[1.0, 11.0, 21.0, 31.0], [0.0, 10.0, 20.0, 30.0]]


@pytest.mark.parametrize("ended", ["advance", "flush"])
def test_a_receive_is_of_the_step_in_which_it_was_posted(ended: str) -> None:
    def rank_main(transport: Transport) -> None:
        if transport.rank == 0:
            getattr(transport, ended)()
            transport.send(torch.zeros(1), 1, 0)
        else:
            pending = transport.recv(0, 0, (1,), torch.float32, CPU)
            transport.advance()
            pending.wait()

    with pytest.raises(RunError, match=r"of step 0 from rank 0, but .* of step 1"):
        run_ranks(2, rank_main)


def test_what_crosses_must_be_waited_for_in_the_end() -> None:
    def rank_main(transport: Transport) -> None:
        transport.send(torch.zeros(1), 1 - transport.rank, 0)
        transport.recv(1 - transport.rank, 0, (1,), torch.float32, CPU)
        transport.advance()
        transport.flush()

    with pytest.raises(RunError, match="posted receives without waiting for them"):
        run_ranks(2, rank_main)


def test_a_standstill_is_found_at_once_and_names_every_wait() -> None:
    def rank_main(transport: Transport) -> None:
        if transport.rank < 2:
            transport.recv(1 - transport.rank, 3, (2,), torch.float32, CPU).wait()

    match = r"no rank can go on: rank 0 waits for edge 3 float32\[2\] from rank 1; rank 1 waits for .*; .*ended: \[2\]"
    with pytest.raises(RunError, match=match):
        run_ranks(3, rank_main, timeout_seconds=1e6)


def test_a_receive_gives_up_after_the_timeout() -> None:
    release = threading.Event()

    def rank_main(transport: Transport) -> None:
        transport.set_action(f"{transport.rank}F0")
        if transport.rank == 0:
            release.wait(60)
            transport.set_action("end")  # raises: rank 1 has failed
        else:
            try:
                transport.recv(0, 3, (2,), torch.float32, CPU).wait()
            finally:
                release.set()

    with pytest.raises(RunError, match=r"rank 1 failed in 1F0: waited 0.1 s for edge 3 float32\[2\] from rank 0"):
        run_ranks(2, rank_main, timeout_seconds=0.1)


def test_ranks_of_a_process_wait_as_long_as_another_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    minutes = itertools.count(0, 600)
    monkeypatch.setattr("fxpipe.run.transport.mailboxes.time", SimpleNamespace(monotonic=lambda: next(minutes)))
    for rank, received in enumerate(run_ranks(2, exchange)):
        assert same(received, expected_of(rank, 2))


def test_the_first_failure_ends_every_rank_and_keeps_its_cause() -> None:
    def rank_main(transport: Transport) -> None:
        transport.set_action(f"{transport.rank}F0")
        if transport.rank == 2:
            raise ZeroDivisionError("no samples")
        if transport.rank == 3:
            while True:  # computes, and never waits
                transport.set_action("3F1")
                time.sleep(0.001)
        transport.recv(2, 0, (1,), torch.float32, CPU).wait()

    with pytest.raises(RunError, match=r"^rank 2 failed in 2F0: ZeroDivisionError: no samples$") as caught:
        run_ranks(4, rank_main)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


class _Sent:
    """A send of a communicator, which tells when it has arrived."""

    def __init__(self) -> None:
        self.has_arrived = False

    def is_completed(self) -> bool:
        return self.has_arrived


def test_what_is_sent_is_let_go_as_it_arrives_within_an_action() -> None:
    transport, works = DistributedTransport.__new__(DistributedTransport), list[_Sent]()
    transport.rank, transport._sends, transport._sent_bytes = 0, [], {}

    def send(tensor: torch.Tensor, dst: int, edge: int, tag: int) -> _Sent:
        works.append(_Sent())
        return works[-1]

    transport._grouped = SimpleNamespace(send=send)  # type: ignore[assignment]

    def sent(count: int) -> None:
        for _ in range(count):
            transport.send(torch.zeros(3), 1, len(works))

    sent(3)
    assert len(transport._sends) == 3
    works[0].has_arrived = works[1].has_arrived = True
    sent(1)
    assert [work for work, *_ in transport._sends] == works[2:]
    works[3].has_arrived = True  # what comes later is held until what was sent before it is there
    sent(1)
    assert [work for work, *_ in transport._sends] == works[2:]
    works[2].has_arrived = True
    sent(1)
    assert [work for work, *_ in transport._sends] == works[4:]
    assert transport.sent_bytes() == {(0, 1): 6 * 12}


def test_ranks_compute_with_one_thread_and_the_setting_returns() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert run_ranks(2, lambda transport: torch.get_num_threads()) == [1, 1]
        assert torch.get_num_threads() == 2
        inherited = []
        thread = threading.Thread(target=lambda: inherited.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert inherited == [2]
    finally:
        torch.set_num_threads(before)


def process_main() -> tuple[list[torch.Tensor], dict[tuple[int, int], int], str, list[int] | None]:
    """What the tests of the in-process transport do, over gloo."""
    DistributedTransport().close()
    transport = DistributedTransport()
    received = exchange(transport)
    plan = transport.broadcast_object("" if transport.rank else "plan")
    gathered = transport.gather_object(transport.rank * 10)
    transport.close()
    return received, transport.sent_bytes(), plan, gathered


def test_processes_receive_what_threads_receive() -> None:
    threads = run_ranks(3, lambda transport: (exchange(transport), transport.sent_bytes()))
    for rank, (received, sent_bytes, plan, gathered) in enumerate(run_processes(3, process_main)):
        assert same(received, threads[rank][0])
        assert sent_bytes == threads[rank][1]
        assert (plan, gathered) == ("plan", [0, 10, 20] if rank == 0 else None)


def failing_main(how: str, failing_rank: str, heartbeat_seconds: str = "0.5") -> None:
    """Every rank waits for its successor; one fails first, in the given way."""
    seconds = float(heartbeat_seconds)
    transport = DistributedTransport(heartbeat_seconds=seconds, lost_after_seconds=8 * seconds)
    transport.set_action(f"{transport.rank}F0")
    if transport.rank == int(failing_rank):
        if how == "killed":
            time.sleep(4 * seconds)  # for a heartbeat that tells the action
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise ZeroDivisionError("no samples")
        if how == "aborts":
            try:
                raise ZeroDivisionError("no samples")
            except ZeroDivisionError as error:
                transport.abort(error)
                raise SystemExit(3) from error
        if how == "leaves":
            return
        if how == "ends":
            try:
                raise ZeroDivisionError("no samples")
            finally:
                transport.close()
    transport.recv((transport.rank + 1) % transport.world_size, 0, (1,), torch.float32, CPU).wait()


@pytest.mark.parametrize(
    ("how", "failing_rank", "expected"),
    [
        ("aborts", "0", "rank 0 failed in 0F0: ZeroDivisionError: no samples"),
        ("killed", "1", "rank 1 was lost, last seen in 1F0: no sign of life"),
        ("killed", "0", "rank 0 was lost, last seen in 0F0: the store it hosts does not answer"),
        ("leaves", "1", "rank 0 in 0F0 needs rank 1, which has left"),
        ("ends", "1", "rank 0 in 0F0 needs rank 1, which has left after ZeroDivisionError: no samples"),
    ],
)
def test_a_failing_process_ends_the_others_and_is_named(how: str, failing_rank: str, expected: str) -> None:
    ended = start_processes(3, failing_main, how, failing_rank, timeout_seconds=60)
    for rank, process in enumerate(ended):
        if rank == int(failing_rank):
            assert process.returncode == {"aborts": 3, "killed": -signal.SIGKILL, "leaves": 0, "ends": 1}[how]
        else:
            assert process.returncode == 1, process.output
            assert expected in process.output


class Stopped:
    """A store whose host has been stopped."""

    def set(self, key: str, value: str) -> None:
        if value == "no":
            raise RuntimeError("refused")

    def get(self, key: str) -> None:
        threading.Event().wait()


def test_a_store_that_does_not_answer_is_not_waited_for() -> None:
    store = Answering(Stopped(), 0.1)
    store.set("key", "value")
    with pytest.raises(RuntimeError, match="refused"):
        store.set("key", "no")
    for call in (lambda: store.get("key"), lambda: store.set("key", "value")):
        with pytest.raises(RuntimeError, match=r"no answer for 0\.1 s"):
            call()


def test_a_process_that_is_held_up_does_not_count_as_a_silent_store(monkeypatch: pytest.MonkeyPatch) -> None:
    join, held_up = threading.Thread.join, [lambda *args: None]  # a timeout that ran out before any thread ran
    monkeypatch.setattr(threading.Thread, "join", lambda *args: (held_up.pop() if held_up else join)(*args))
    store = Answering(SimpleNamespace(check=lambda: time.sleep(0.1) or True), 5.0)
    assert store.check()
    assert not held_up


def stopped_main() -> None:
    distributed.STORE_SECONDS = 0.5
    transport = DistributedTransport(heartbeat_seconds=0.2, lost_after_seconds=6)
    host = transport.broadcast_object(os.getpid())
    if transport.rank == 1:
        os.kill(host, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(host, signal.SIGCONT)
    assert transport.gather_object(transport.rank) == ([0, 1] if transport.rank == 0 else None)
    transport.close()


def test_the_host_of_the_store_may_stand_still_as_long_as_others() -> None:
    run_processes(2, stopped_main)


def lingering_main() -> None:
    watchdog.GRACE_SECONDS = 0.2
    DistributedTransport(heartbeat_seconds=0.2, lost_after_seconds=6).abort(RunError("another step"))
    time.sleep(30)


def test_a_process_that_goes_on_after_a_failure_without_closing_is_told_why_it_ends() -> None:
    for ended in start_processes(2, lingering_main):
        assert ended.returncode == 1
        assert "is ended, 0.2 s after this, and without engine.close() since: rank" in ended.output, ended.output


def lonely_main() -> None:
    if os.environ["RANK"] == "0":
        with pytest.raises(RunError, match=r"rank 0 did not find all 2 ranks within 0\.5 s; see what ranks \[1\] said"):
            DistributedTransport(timeout_seconds=0.5)


def test_a_handler_of_sigterm_that_is_set_later_decides() -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    watching = watchdog.Watchdog(store, 0, 1, None, lambda: None, 0.01, 1.0)
    before, seen = signal.getsignal(signal.SIGTERM), list[int]()
    watching.beat()
    watching.start()
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01 * 3 * watchdog.TERMINATED_TICKS)
        watching.close()
        assert seen == [signal.SIGTERM]
        assert watching.failure is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM] * 2
    finally:
        watching.close()
        signal.signal(signal.SIGTERM, before)


def test_a_handler_of_sigterm_that_calls_the_one_before_ends_the_rank() -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    ended = threading.Event()
    watching = watchdog.Watchdog(store, 0, 1, None, ended.set, 0.01, 1.0)
    before = signal.getsignal(signal.SIGTERM)
    watching.beat()
    watching.start()
    try:
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        signal.signal(signal.SIGTERM, lambda number, frame: handler(number, frame))
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(10)
        assert watching.failure == "rank 0 was ended by SIGTERM in start"
        watching.close()
        calls: list[object] = []
        with pytest.MonkeyPatch.context() as patch:  # set again after the end
            patch.setattr(os, "kill", lambda process, number: calls.append((number, signal.getsignal(number))))
            handler(signal.SIGTERM, None)
        assert calls == [(signal.SIGTERM, signal.SIG_DFL)]
    finally:
        watching.close()
        signal.signal(signal.SIGTERM, before)


def test_a_rank_that_never_comes_is_missed() -> None:
    run_processes(2, lonely_main)


@pytest.mark.parametrize(
    ("how", "world_size", "expected"),
    [
        ("raises", 2, "rank 1 failed in 1F0: ZeroDivisionError: no samples"),
        ("killed", 3, "rank 1 was lost, last seen in 1F0: no sign of life"),
    ],
)
def test_a_rank_that_fails_under_torchrun_is_named_by_every_other(how: str, world_size: int, expected: str) -> None:
    torchrun, _ = start_torchrun(world_size, failing_main, how, "1", timeout_seconds=60)
    assert torchrun.returncode == 1
    for rank in {*range(world_size)} - {1}:
        assert f"rank {rank} in {rank}F0 stops: {expected}" in torchrun.output, torchrun.output
