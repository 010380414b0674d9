# SPDX-License-Identifier: Apache-2.0
"""Clients in closed loops against one engine: each sends a request when its last one has ended."""

import asyncio
import random
import time

SPREAD = 0.3  # of the answers' lengths, so that requests do not end together
WARM_TOKENS = 32


def lengths(seed: int, n_out: int):
    """Endless lengths around `n_out`, the same for a client of every engine."""
    source = random.Random(seed)
    while True:
        yield max(1, round(n_out * source.uniform(1 - SPREAD, 1 + SPREAD)))


class Clients:
    """Args:
    prompts: client i sends the one at i modulo their number, again and again.
    n_out: tokens of an answer, give or take SPREAD.
    stream_interval: tokens from one chunk of a stream to the next.
    """

    def __init__(self, engine, prompts: list[list[int]], n_out: int, stream_interval: int):
        self.engine, self.prompts, self.n_out = engine, prompts, n_out
        self.stream_interval = stream_interval
        self.wanted = 0  # clients with a lower number go on
        self.requests: list[dict] = []
        self.begin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.begin

    async def request(self, number: int, n_out: int):
        sampling = {
            "temperature": 0,
            "max_new_tokens": n_out,
            "ignore_eos": True,
            "stream_interval": self.stream_interval,
        }
        begin, chunks = self.now(), []
        stream = await self.engine.async_generate(
            input_ids=self.prompts[number % len(self.prompts)],
            sampling_params=sampling,
            stream=True,
        )
        async for output in stream:
            info = output["meta_info"]
            chunks.append([round(self.now(), 5), info["completion_tokens"]])
        if info["completion_tokens"] != n_out:
            raise RuntimeError(
                f"a request must emit {n_out} tokens, got {info['completion_tokens']} "
                f"({info['finish_reason']})"
            )
        self.requests.append({"client": number, "begin": round(begin, 5), "chunks": chunks})

    async def client(self, number: int, tokens):
        while number < self.wanted:
            await self.request(number, next(tokens))

    async def run(self, phases: list[int], seconds: float) -> dict:
        """Runs so many clients for `seconds` each. Those too many finish what they have begun.

        Returns:
            epoch, the time of day at second 0; bounds, the begins of the phases and the end of the
            last one in seconds; busy, the share of a core that clients and SGLang's front end
            took; requests with the second of their begin and, for each chunk, the second of its
            arrival and the tokens so far.
        """
        tokens = [lengths(i, self.n_out) for i in range(max(phases))]
        tasks: dict[int, asyncio.Task] = {}
        self.begin, epoch, bounds = time.perf_counter(), time.time(), []
        busy = time.process_time()
        for self.wanted in phases:
            bounds.append(self.now())
            for i in range(self.wanted):
                if i not in tasks or tasks[i].done():
                    tasks[i] = asyncio.create_task(self.client(i, tokens[i]))
            await self._watch(tasks, bounds[-1] + seconds)
        bounds.append(self.now())
        busy = (time.process_time() - busy) / self.now()
        self.wanted = 0
        await asyncio.gather(*tasks.values())
        return {"epoch": epoch, "bounds": bounds, "busy": busy, "requests": self.requests}

    async def _watch(self, tasks: dict, until: float):
        """Sleeps; a request that fails ends the run at once."""
        done, _ = await asyncio.wait(
            tasks.values(), timeout=until - self.now(), return_when=asyncio.FIRST_EXCEPTION
        )
        for task in done:
            task.result()


def measure(engine, prompts: list[list[int]], phases: list[int], phase_seconds: float,
            n_out: int, stream_interval: int) -> dict:  # fmt: skip
    """See Clients.run. Before it, the engine gets all prompts, and batches of the phases' sizes."""
    warm = {"temperature": 0, "ignore_eos": True}
    engine.generate(input_ids=prompts, sampling_params={**warm, "max_new_tokens": 1})
    for size in sorted(set(phases)):
        some = [prompts[i % len(prompts)] for i in range(size)]
        engine.generate(input_ids=some, sampling_params={**warm, "max_new_tokens": WARM_TOKENS})
    clients = Clients(engine, prompts, n_out, stream_interval)
    return engine.loop.run_until_complete(clients.run(phases, phase_seconds))
