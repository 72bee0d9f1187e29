"""Load on a server of images, by locust: clients of several sizes, some of whom leave, or ask for too little time.

    pip install locust
    torchrun --nproc-per-node 2 examples/serve.py examples/text_to_image.py:served --port 8000
    locust -f benchmarks/serve_load.py --host http://127.0.0.1:8000 --headless --users 12 --spawn-rate 4 --run-time 70s

What a client asks for decides the answer that is right; every other one is a failure, so are a picture of another size
and a server that is not well in the end. A rank that is killed meanwhile must end the server: those who wait are told
so (503), and so is who asks afterwards, until nobody answers.
"""

import json
import random
import struct
from typing import Any

from locust import HttpUser, between, events, task  # type: ignore[import-not-found]

SIZES = [(64, 64), (64, 48), (48, 64), (96, 64), (32, 32)]
PROMPTS = ["a cat", "a boat", "two trees", "a red square"]


class Client(HttpUser):  # type: ignore[misc]
    wait_time = between(0.0, 0.5)

    @task(10)  # type: ignore[untyped-decorator]
    def image(self) -> None:
        """A picture of the size that was asked for."""
        height, width = random.choice(SIZES)
        with self.ask(f"{height}x{width}", height=height, width=width, steps=random.choice([4, 8])) as answer:
            if answer.status_code != 200:
                answer.failure(f"{answer.status_code}: {answer.text}")
            elif (found := struct.unpack(">II", answer.content[16:24])) != (width, height):
                answer.failure(f"{height}x{width} was asked for, the picture is {found[1]}x{found[0]}")

    @task(1)  # type: ignore[untyped-decorator]
    def leaves(self) -> None:
        """Whoever leaves hears nothing."""
        with self.ask("client leaves", patience=random.uniform(0.1, 1.0), steps=300) as answer:
            self.expect(answer, 0)

    @task(1)  # type: ignore[untyped-decorator]
    def is_late(self) -> None:
        """The server gives up when the time is over."""
        with self.ask("time is over", steps=500, timeout=random.uniform(0.2, 1.0)) as answer:
            self.expect(answer, 504)

    @task(1)  # type: ignore[untyped-decorator]
    def asks_wrongly(self) -> None:
        with self.ask("wrong request", **random.choice([{"height": 37}, {"steps": 0}, {"depth": 3}])) as answer:
            self.expect(answer, 422)

    def ask(self, name: str, patience: float = 120.0, **asked: Any) -> Any:
        given = {"prompt": random.choice(PROMPTS), "seed": random.randrange(100), **asked}
        return self.client.post("/images", json=given, name=name, timeout=patience, catch_response=True)

    def expect(self, answer: Any, status: int) -> None:
        if answer.status_code == status:
            answer.success()
        else:
            answer.failure(f"{answer.status_code} instead of {status}: {answer.text}")


@events.test_stop.add_listener  # type: ignore[untyped-decorator]
def tell(environment: Any, **given: Any) -> None:
    """What the server says of itself."""
    client = Client(environment).client
    for path in ("/health", "/stats"):
        print(path, json.dumps(client.get(path, timeout=10).json()))
