"""Measures the links between processes of this machine, and prints them as a cluster that fxpipe reads.

    python benchmarks/network.py > mine.toml                    2 processes, gloo
    fxpipe compile MODEL --world-size 2 --cluster mine.toml

    torchrun --nnodes 2 --nproc-per-node 1 ... benchmarks/network.py          the link between two machines

Between ranks 0 and 1 by gloo. Latency is half a round trip of 4 bytes; bandwidth is by what a message of 32 MiB takes
longer than one of 16: what a link lets through at once counts for nothing, which was 12 % through 100 Mbit/s of tc, by
messages of 256 KiB. It is taken one direction at a time, and both at once, which shows whether they share the link;
where they do not, that of both at once counts, as programs use it. Each is the tenth percentile of many, so that other
work on the machine counts little. Both directions beside matrix products show what the bytes of messages take from
computation, and many messages of 4 bytes beside products what every message takes, whatever its bytes: medians, since
where threads of the network share their cores with computation it is 0.05 or 1 ms as the system places them, of runs
that take turns, since a machine's speed drifts, and which both ranks begin and end together: with a rank late
by the run before, what bytes take was 0.1 to 1.4 of a message's time from one run to the next. Rank 0 prints.
"""

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist  # noqa: TID251 (measures what the transport runs on)

from fxpipe.cluster import Cluster, Level
from fxpipe.cluster.links import Link

SMALL, LARGE = 4, 1 << 24
SMALL_ROUNDS, LARGE_ROUNDS, MANY_ROUNDS = 300, 30, 20
BESIDE_SECONDS = 0.025  # that a message at least takes beside products: what it takes of them would drown in noise
MANY, MANY_SECONDS = 32, 0.1  # small messages beside work of so long, as a step has them
PRODUCT = 384  # rows and columns of a matrix: in a core's cache


def main() -> None:
    if "RANK" in os.environ:
        measure(int(os.environ["RANK"]), "env://", int(os.environ["WORLD_SIZE"]))
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    torch.multiprocessing.spawn(measure, (address, 2), nprocs=2)  # type: ignore[no-untyped-call]


def measure(rank: int, address: str, world_size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    found = measured_cluster(rank, world_size)
    if rank == 0:
        print(found, end="")
    dist.barrier()
    dist.destroy_process_group()


def measured_cluster(rank: int, world_size: int, num_bytes: int = LARGE) -> Cluster | None:
    """By messages of so many bytes over the default process group; None on ranks that only wait."""
    if rank >= 2:
        return None
    rounds = LARGE_ROUNDS if num_bytes >= LARGE else LARGE_ROUNDS // 3  # fewer on slow links
    small = usual_seconds(lambda: ping_pong(rank, SMALL), SMALL_ROUNDS) / 2
    sizes = num_bytes, 2 * num_bytes
    large, larger = (usual_seconds(partial(ping_pong, rank, size), rounds) / 2 for size in sizes)
    both, more = (usual_seconds(partial(exchange, rank, size), rounds) for size in sizes)
    alone, shared = num_bytes / (larger - large), num_bytes / (more - both)
    long = as_rank_zero(rank, max(num_bytes, round(BESIDE_SECONDS * shared)))
    work = products(rank, 4 * long / shared)
    beside, apart = (partial(exchange, rank, size, work) for size in (long, SMALL))
    taken = more_seconds(rank, beside, apart, LARGE_ROUNDS) * alone / (2 * long)
    each = products(rank, MANY_SECONDS / MANY)
    with_messages, products_alone = partial(exchange_many, rank, each), lambda: [each() for _ in range(MANY)].clear()
    overhead = more_seconds(rank, with_messages, products_alone, MANY_ROUNDS) / (2 * MANY)
    return cluster(small, alone, shared, taken, overhead, world_size)


def as_rank_zero(rank: int, count: int) -> int:
    told = torch.tensor([count])
    if rank == 0:
        dist.send(told, 1)
    else:
        dist.recv(told, 0)
    return int(told)


def ping_pong(rank: int, num_bytes: int) -> None:
    message = torch.zeros(num_bytes, dtype=torch.uint8)
    if rank == 0:
        dist.send(message, 1)
        dist.recv(message, 1)
    else:
        dist.recv(message, 0)
        dist.send(message, 0)


def products(rank: int, seconds: float) -> Callable[[], None]:
    """Work of about so many seconds, as much on both ranks."""
    matrix = torch.randn(PRODUCT, PRODUCT)
    count = as_rank_zero(rank, 1 + int(seconds / usual_seconds(lambda: torch.mm(matrix, matrix), LARGE_ROUNDS)))
    return lambda: [torch.mm(matrix, matrix) for _ in range(count)].clear()


def exchange(rank: int, num_bytes: int, work: Callable[[], None] = lambda: None) -> None:
    sent, received = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    # The receive first, as programs post it: its notice would wait behind what is sent on the same connection.
    requests = [dist.irecv(received, 1 - rank), dist.isend(sent, 1 - rank)]
    work()
    for request in requests:
        if request is not None:
            request.wait()


def exchange_many(rank: int, work: Callable[[], None]) -> None:
    """A message of each after every piece of work."""
    requests = []
    for tag in range(MANY):
        requests += [dist.irecv(torch.zeros(SMALL, dtype=torch.uint8), 1 - rank, tag=tag)]
        requests += [dist.isend(torch.zeros(SMALL, dtype=torch.uint8), 1 - rank, tag=tag)]
        work()
    for request in requests:
        if request is not None:
            request.wait()


def usual_seconds(run: Callable[[], object], rounds: int) -> float:
    """The time that a tenth of the rounds do not exceed."""
    for _ in range(rounds // 2):
        run()
    return statistics.quantiles([seconds(run) for _ in range(rounds)], n=10, method="inclusive")[0]


def as_one(rank: int, run: Callable[[], object]) -> None:
    """Both ranks begin it together, and end it together."""
    ping_pong(rank, SMALL)
    run()
    ping_pong(rank, SMALL)


def more_seconds(rank: int, run: Callable[[], object], other: Callable[[], object], rounds: int) -> float:
    """By what one usually takes longer than the other, until both ranks have done it: they take turns, as a machine's
    speed drifts."""
    run, other = partial(as_one, rank, run), partial(as_one, rank, other)
    for _ in range(rounds // 2):
        other()
        run()
    pairs = [(seconds(other), seconds(run)) for _ in range(rounds)]
    return statistics.median(longer - shorter for shorter, longer in pairs)


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def cluster(latency: float, alone: float, shared: float, taken: float, overhead: float, world_size: int) -> Cluster:
    """Bytes per second of a direction `alone` and of each of both at once, of which a message takes `taken`; it takes
    `overhead` seconds beside, whatever its bytes."""
    print(
        f"latency {latency * 1e6:.1f} us, bandwidth {alone / 1e9:.4f} GB/s, {shared / 1e9:.4f} each of both directions "
        f"at once; a message takes {taken:.2f} of its time, and {overhead * 1e6:.1f} us, from what its ends compute",
        file=sys.stderr,
    )
    duplex = alone < 1.5 * shared
    bandwidth = shared if duplex else alone
    one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) == world_size
    bus = one_machine and not duplex
    costs = round(max(taken, 0.0), 3), round(max(overhead, 0.0), 9)
    link = Link("measured", round(bandwidth), round(latency, 9), duplex, bus, *costs)
    return Cluster("CPU", (Level(world_size, link),))


if __name__ == "__main__":
    main()
