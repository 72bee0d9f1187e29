"""A server of images: requests of any size come over HTTP to rank 0, and all ranks sample each of them together.

    pip install fxpipe[serve,diffusers]
    torchrun --nproc-per-node 2 examples/serve.py examples/text_to_image.py:served --port 8000
    curl localhost:8000/images -d '{"prompt": "a cat", "height": 64, "width": 48, "steps": 10}' -o cat.png
    curl localhost:8000/health localhost:8000/stats

    HTTP threads          queue of jobs -> rank 0's loop                 other ranks' loops
    POST /images     ->   jobs that are alike     -> broadcast ->        the same jobs
                          a step, "go on?"        -> broadcast ->        a step
    answer           <-   images

MODEL returns a pipeline whose call takes `prompt`, or (pipeline, function of prompts that returns its text arguments).
Requests that are alike but for prompt and seed are one call. One whose client has left, or whose time is over, ends
between two steps, or two phases of compiling a new size, on all ranks, where no other is in its call. What all ranks
raise is its answer: 422 for a request that cannot be, 500 with the reason for all else. A rank that is lost, or fails
alone, ends the server: /health says so first.
"""

import argparse
import asyncio
import io
import logging
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

import fxpipe
from fxpipe.cli.user_model import served_pipeline
from fxpipe.errors import CaptureError, CompileError, RunError

Embed = Callable[[list[str]], dict[str, Any]]
LONGEST, MOST_STEPS, MOST_PIXELS = 300.0, 500, 4096
REFUSALS = (ValueError, CompileError, CaptureError)  # the pipeline's, and fxpipe's, which say what to change
POLL_SECONDS, LAST_WORDS_SECONDS = 0.05, 3.0


class Refused(ValueError):
    """A request that cannot be served: the value, the rule, what to ask for."""


@dataclass(frozen=True)
class Failed:
    """Why there is no image, and the status that says so."""

    status: int
    why: str


@dataclass(frozen=True)
class Asked:
    """What a client asks for; `guidance` is the pipeline's `guidance_scale`."""

    prompt: str
    height: int = 64
    width: int = 64
    steps: int = 20
    seed: int = 0
    guidance: float = 7.5
    timeout: float = 60.0

    @staticmethod
    def of(data: Any) -> "Asked":
        """The request with this JSON; Refused where it breaks a rule."""
        known = {f.name: f.type for f in fields(Asked)}
        if not isinstance(data, Mapping) or set(data) - set(known) or not isinstance(data.get("prompt"), str):
            raise Refused(f"{str(data)[:80]}: a request is a JSON object with a text 'prompt'; may have {[*known]}")
        if any("\ud800" <= character <= "\udfff" for character in data["prompt"]):
            raise Refused(f"prompt={data['prompt'][:80]!a}: half a surrogate pair is no character; send both or none")
        for name, low, high in (
            ("height", 1, MOST_PIXELS), ("width", 1, MOST_PIXELS), ("steps", 1, MOST_STEPS), ("seed", 0, 2**63 - 1),
            ("guidance", 0.0, 100.0), ("timeout", 0.1, LONGEST),
        ):  # fmt: skip
            value, whole = data.get(name, low), isinstance(low, int)
            kind = int if whole else int | float
            if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
                raise Refused(f"{name}={value!r}: must be {'an integer' if whole else 'a number'} from {low} to {high}")
        return Asked(**data)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What requests of one call have alike."""
        return self.height, self.width, self.steps, self.guidance


@dataclass(eq=False)
class Job:
    """A request under way; `answer` may be called from any thread, the first one counts."""

    asked: Asked
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Any]"
    started: float = field(default_factory=time.monotonic)
    gone: threading.Event = field(default_factory=threading.Event)

    @property
    def over(self) -> bool:
        """Whether nobody waits for it."""
        return self.gone.is_set() or time.monotonic() > self.started + self.asked.timeout

    def answer(self, found: Any) -> None:
        def tell() -> None:
            if not self.future.done():
                self.future.set_result(found)

        self.loop.call_soon_threadsafe(tell)


class Desk:
    """Rank 0's queue between HTTP and the loop, and what it has seen."""

    def __init__(self, most_in_a_call: int) -> None:
        self.most, self.failure = most_in_a_call, ""
        self.waiting, self.under_way = deque[Job](), list[Job]()
        self.changed = threading.Condition()
        self.seconds, self.counts = deque[float](maxlen=10_000), Counter[str]()

    def add(self, job: Job) -> None:
        with self.changed:
            self.waiting.append(job)
            self.changed.notify()

    def take(self, wait_seconds: float) -> list[Job]:
        """The first job that somebody waits for, with others like it; none after so many seconds."""
        with self.changed:
            if not self.waiting:
                self.changed.wait(wait_seconds)
            there = [job for job in self.waiting if not job.over]
            alike = [job for job in there if job.asked.kind == there[0].asked.kind][: self.most]
            self.waiting = deque(job for job in there if job not in alike)
            self.under_way = alike
            return alike

    def fail(self, failure: str) -> None:
        self.failure = failure
        for job in [*self.waiting, *self.under_way]:
            job.answer(Failed(503, failure))

    def stats(self) -> dict[str, Any]:
        """Requests by how they ended, and percentiles of the seconds of those that were answered."""
        ordered = sorted(self.seconds)
        shares = {f"p{p}": round(ordered[min(len(ordered) * p // 100, len(ordered) - 1)], 4) for p in (50, 90, 99)
                  if ordered}  # fmt: skip
        return {"requests": dict(self.counts), "waiting": len(self.waiting), "seconds": shares}


def app_of(desk: Desk) -> FastAPI:
    """POST /images, GET /health, GET /stats."""

    async def images(request: Request) -> Response:
        try:
            asked = Asked.of(await request.json())
        except (ValueError, RecursionError) as error:  # of brackets in brackets
            return said(422, str(error) if isinstance(error, Refused) else "the body is no JSON")
        if desk.failure:
            return said(503, desk.failure)
        loop = asyncio.get_running_loop()
        job = Job(asked, loop, loop.create_future())
        desk.add(job)
        while not job.future.done() and not job.over:
            await asyncio.wait([job.future], timeout=POLL_SECONDS)
            if await request.is_disconnected():
                job.gone.set()
                return said(499, "the client has left")
        if not job.future.done():
            return said(504, f"timeout={asked.timeout:g} s are over; ask for fewer steps, a smaller image or more time")
        found = job.future.result()
        if isinstance(found, Failed):
            return said(found.status, found.why)
        desk.seconds.append(time.monotonic() - job.started)
        desk.counts["200"] += 1
        return Response(found, media_type="image/png")

    def said(status: int, what: str) -> Response:
        desk.counts[str(status)] += 1
        return JSONResponse({"error": what}, status)

    async def health() -> Response:
        return JSONResponse({"ok": not desk.failure, "error": desk.failure}, 503 if desk.failure else 200)

    async def stats() -> Response:
        return JSONResponse(desk.stats())

    app = FastAPI(title="fxpipe")
    app.add_api_route("/images", images, methods=["POST"])
    app.add_api_route("/health", health)
    app.add_api_route("/stats", stats)
    return app


class Phases:
    """An `observe` of the compiler: between its phases, whether to go on is asked as the server has set."""

    def __init__(self) -> None:
        self.go_on: Callable[[], None] = lambda: None

    def __call__(self, name: str, artefact: Any) -> None:
        self.go_on()


class Rank:
    """The loop that all ranks run, rank 0 with a desk: what it decides, all hear."""

    def __init__(self, sampler: fxpipe.Sampler, embed: Embed, desk: Desk | None) -> None:
        self.sampler, self.embed, self.desk, self.pipe = sampler, embed, desk, sampler.pipeline()

    def run(self) -> None:
        """For ever; all ranks hear from rank 0 at least every second."""
        while True:
            jobs = self.desk.take(1.0) if self.desk else []
            if asked := self.heard("requests", [job.asked for job in jobs]):
                for job, found in zip(jobs, self.made(asked), strict=False):
                    if found is not None:
                        job.answer(found)

    def made(self, asked: Sequence[Asked]) -> list[Any]:
        """An image for each, or why there is none; nothing, or None, where nobody waits any more."""
        try:
            with self.sampler.call():  # what all ranks raise inside ends it alone
                found = self.pipe(**self.call(asked)).images
            return [png(image) for image in found] if self.desk else []
        except fxpipe.Stopped:
            return []
        except RunError:
            raise
        except Exception as error:  # of one rank alone it has ended the others, and this one hears of it next
            if len(asked) > 1:  # the fault of one is not the others'
                return [found for one in asked for found in self.made([one]) or [None]]
            logging.exception("a call failed")
            size, status = f"height={asked[0].height}, width={asked[0].width}", 422 if type(error) in REFUSALS else 500
            return [Failed(status, f"{size}: {type(error).__name__}: {error}")]

    def call(self, asked: Sequence[Asked]) -> dict[str, Any]:
        one = asked[0]
        draws = [torch.Generator().manual_seed(each.seed) for each in asked]
        size = {"height": one.height, "width": one.width}
        how = {"num_inference_steps": one.steps, "guidance_scale": one.guidance, "callback_on_step_end": self.between}
        return {**self.embed([each.prompt for each in asked]), **size, **how, "generator": draws}

    def between(self, pipe: Any, step: int, at: Any, given: dict[str, Any]) -> dict[str, Any]:
        self.go_on()
        return given

    def go_on(self) -> None:
        """On all ranks: end the call where nobody waits for it."""
        if self.heard("over", self.desk is not None and all(job.over for job in self.desk.under_way)):
            raise fxpipe.Stopped

    def heard(self, what: str, value: Any) -> Any:
        """Rank 0's value, of what every rank asks for."""
        told, found = self.sampler.broadcast((what, value))
        if told != what:
            raise RunError(f"this rank asks for {what!r}, rank 0 for {told!r}")
        return found


def png(image: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="file.py:factory or module:factory of a pipeline")
    parser.add_argument("--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", "1")))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--most", type=int, default=4, help="requests in one call")
    parser.add_argument("--cluster", help="devices and links to plan for")
    options = parser.parse_args()
    made, embed = served_pipeline(options.model)
    first = Asked("", steps=4)
    example = {**embed([first.prompt]), "height": first.height, "width": first.width, "num_inference_steps": 20}
    sampler = fxpipe.compile_sampler(
        made, options.world_size, example=example, sizes="any", cluster=options.cluster, observe=(phases := Phases())
    )
    sampler.broadcast(None)  # all ranks are there
    serve(sampler, embed, options.host, options.port, options.most, phases)


def serve(
    sampler: fxpipe.Sampler, embed: Embed, host: str, port: int, most_in_a_call: int, phases: Phases
) -> None:  # fmt: skip
    """On every rank: answer requests until this process is interrupted, or a rank is lost. `phases` observes the
    sampler's compiler.

    Raises:
        OSError: another process listens there; of the thread that answers alone it would leave the ranks waiting.
    """
    desk = Desk(most_in_a_call) if int(os.environ.get("RANK", "0")) == 0 else None
    if desk is not None:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        server = uvicorn.Server(uvicorn.Config(app_of(desk), log_level="warning"))
        threading.Thread(target=server.run, args=([listening],), daemon=True).start()
    rank = Rank(sampler, embed, desk)
    phases.go_on = rank.go_on
    try:
        rank.run()
    except BaseException as error:
        if desk is not None:
            desk.fail(f"the server ends: {error}")
            time.sleep(LAST_WORDS_SECONDS)  # for answers, and whoever looks at /health
        raise


if __name__ == "__main__":
    main()
