"""examples/serve.py on two processes: sizes, a client that leaves, time that is over, a rank that is lost."""

import http.client
import io
import json
import os
import pickle
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fxpipe
from fxpipe.run.transport import distributed
from tests.distributed import start_processes
from tests.tiny_pipelines import tiny

pytest.importorskip("fastapi", reason="the server is an extra")

SIZES = [(40, 24), (32, 24), (24, 32)]
BAD: list[tuple[Any, str]] = [
    ({"prompt": "a", "height": 0}, "height=0: must be an integer from 1 to 4096"),
    ({"prompt": "a", "steps": 2.5}, "steps=2.5: must be an integer from 1 to 500"),
    ({"prompt": "a \ud800"}, r"prompt='a \ud800': half a surrogate pair is no character"),
    (b"[" * 100_000, "the body is no JSON"),
    ({"prompt": 3}, "a request is a JSON object with a text 'prompt'"),
    ({"prompt": "a", "size": 3}, "may have ['prompt', 'height'"),
    ({"prompt": "a", "height": 37}, "height=37, width=24: ValueError: `height` and `width` have to be divisible by 8"),
]
SLOW: dict[str, Any] = {"now": False, "phases": []}
"""While a prompt says so every phase of compiling takes long, and is noted."""


def embed(prompts: list[str]) -> dict[str, Any]:
    if prompts == ["die"] and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    SLOW["now"] = prompts == ["slow"]
    if "raise" in prompts:
        raise LookupError("no such words")
    return {"prompt": prompts, "negative_prompt": ["d"] * len(prompts)}


def rank(port: str, told: str) -> None:
    from examples import serve

    own: Any = distributed.DistributedTransport
    distributed.DistributedTransport = partial(own, heartbeat_seconds=0.1, lost_after_seconds=2.0)  # type: ignore[misc]
    pipe, call = tiny("sd/small")
    phases = serve.Phases()

    def slowly(name: str, artefact: Any) -> None:
        if SLOW["now"]:
            SLOW["phases"].append(name)
            time.sleep(0.4)
        phases(name, artefact)

    sampler = fxpipe.compile_sampler(pipe, 2, example=call, sizes="any", patches=2, observe=slowly)
    if os.environ["RANK"] == "0":
        client = threading.Thread(target=lambda: Path(told).write_bytes(pickle.dumps(clients(int(port)))))
        client.start()
    serve.serve(sampler, embed, "127.0.0.1", int(port), 2, phases)


def ask(port: int, path: str, data: Any = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
    body = data if data is None or isinstance(data, bytes) else json.dumps(data)
    connection.request("GET" if data is None else "POST", path, body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def leave(port: int) -> None:
    """Ask for many steps, and go when some are done."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
    connection.request("POST", "/images", json.dumps({"prompt": "e", "height": 40, "width": 24, "steps": 500}))
    time.sleep(1.5)
    connection.close()


def asked(size: tuple[int, int], seed: int = 1, steps: int = 4, prompt: str = "a b") -> dict[str, Any]:
    return {"prompt": prompt, "height": size[0], "width": size[1], "steps": steps, "seed": seed}


def clients(port: int) -> dict[str, Any]:
    """What the server says to concurrent clients, then to one, then when a rank is lost."""
    until(lambda: ask(port, "/health")[0] == 200)
    slow = {**asked(SIZES[0], steps=500), "timeout": 1.0}
    with ThreadPoolExecutor(16) as pool:
        left = pool.submit(leave, port)
        late = pool.submit(ask, port, "/images", slow)
        images = [pool.submit(ask, port, "/images", asked(size, seed)) for size in SIZES for seed in (1, 2)]
        bodies = [data if isinstance(data, bytes) else {"width": 24, **data} for data, _ in BAD]
        bad = [pool.submit(ask, port, "/images", body) for body in bodies]
        left.result()
        found: dict[str, Any] = {"images": [one.result() for one in images], "bad": [one.result() for one in bad]}
        found["late"] = late.result()
    found["slow"] = ask(port, "/images", {**asked((48, 24), prompt="slow"), "timeout": 0.5})
    found["compiled"] = ask(port, "/images", asked((48, 24)))
    found["phases"] = SLOW["phases"]
    with ThreadPoolExecutor(4) as pool:  # the first holds the ranks while the others join in one call
        prompts = "a b", "raise", "a b", "raise"
        asked_at_once = [pool.submit(ask, port, "/images", asked(SIZES[0], prompt=prompt)) for prompt in prompts]
        found["beside"] = [one.result() for one in asked_at_once]
    found["again"] = ask(port, "/images", asked(SIZES[0], 1))
    found["stats"] = json.loads(ask(port, "/stats")[1])
    found["lost"] = ask(port, "/images", asked(SIZES[0], prompt="die"))
    found["health"] = ask(port, "/health")
    return found


def until(holds: Any) -> None:
    for _ in range(1000):
        try:
            if holds():
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError("it never holds")


def pixels(answer: tuple[int, bytes]) -> Any:
    assert answer[0] == 200, answer
    return np.asarray(Image.open(io.BytesIO(answer[1]))).astype(int)


def test_clients_of_two_processes(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    zero, one = start_processes(2, rank, str(port), str(tmp_path / "told"), timeout_seconds=200)
    assert (tmp_path / "told").exists(), zero.output + one.output
    told = pickle.loads((tmp_path / "told").read_bytes())
    pipe, _ = tiny("sd/small")
    wanted = []
    for height, width in SIZES:
        for seed in (1, 2):
            call = {**embed_here("a b"), "height": height, "width": width, "num_inference_steps": 4}
            image = pipe(**call, guidance_scale=7.5, generator=torch.Generator().manual_seed(seed)).images[0]
            wanted.append(np.asarray(image).astype(int))
    for found, image in zip(told["images"], wanted, strict=True):
        assert np.abs(pixels(found) - image).max() <= 1  # what is rounded to a whole number may lie at a half
    for found in (told["again"], *told["beside"][::2]):
        assert np.abs(pixels(found) - wanted[0]).max() <= 1
    for (status, said), (_, rule) in zip(told["bad"], BAD, strict=True):
        assert status == 422
        assert rule in json.loads(said)["error"]
    for status, said in told["beside"][1::2]:
        assert (status, json.loads(said)["error"]) == (500, "height=40, width=24: LookupError: no such words")
    assert (told["slow"][0], told["compiled"][0]) == (504, 200)
    assert told["phases"][0] == "capture"
    assert "programs" not in told["phases"]  # nobody waited any more
    assert told["late"][0] == 504
    assert b"timeout=1 s are over" in told["late"][1]
    assert told["stats"]["requests"] == {"200": 10, "422": len(BAD), "499": 1, "500": 2, "504": 2}
    assert 0 < told["stats"]["seconds"]["p50"] <= told["stats"]["seconds"]["p99"]
    assert (told["lost"][0], told["health"][0]) == (503, 503)
    assert b"rank 1 was lost" in told["health"][1]
    assert (zero.returncode, one.returncode) == (1, -signal.SIGKILL)


def test_a_port_that_is_taken_ends_the_server() -> None:
    from examples import serve

    nobody: Any = None
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="ddress already in use"):
        serve.serve(nobody, embed, "127.0.0.1", taken.getsockname()[1], 2, serve.Phases())


def embed_here(prompt: str) -> dict[str, Any]:
    return {"prompt": [prompt], "negative_prompt": ["d"]}
