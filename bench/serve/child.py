# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own: a JSON request a line on stdin, a JSON answer a line.

Answers start with MARK, everything else on stdout is the engine's log.
"""

import json
import math
import random
import sys
import time
from pathlib import Path

from bench.serve import clients, probe

MARK = "@@"
PROFILE = ("profile", "steps", "activities")  # of a request for a trace: its folder and arguments
SCORED_AT_ONCE = 8  # texts of one call, few enough for a prefill in one piece


def answer(**what):
    print(MARK + json.dumps(what), flush=True)


def prompt(number: int, n_in: int, vocab: int) -> list[int]:
    """The same in every engine and at every batch size; a shorter one is the start of a longer."""
    source = random.Random(number)
    low, high = (10, 4000) if vocab > 4000 else (32, 127)
    return [source.randrange(low, high) for _ in range(n_in)]


class Point:
    """Generations of one batch size. Prompts stay in the engine's prefix cache after the first
    time, so that later generations decode only."""

    latest = None  # the point measured last

    def __init__(self, engine, bs: int, n_in: int, vocab: int):
        self.engine = engine
        self.prompts = [prompt(i, n_in, vocab) for i in range(bs)]

    def generate(self, n_out: int) -> tuple[float, list[dict]]:
        sampling = {"temperature": 0, "max_new_tokens": n_out, "ignore_eos": True}
        begin = time.perf_counter()
        outputs = self.engine.generate(input_ids=self.prompts, sampling_params=sampling)
        return time.perf_counter() - begin, [o["meta_info"] for o in outputs]

    def measure(self, n_out: int) -> dict:
        """Seconds of `n_out` tokens a request less those of one token, and what they held."""
        if Point.latest is not self:  # others may have driven its prompts out of the prefix cache
            Point.latest = self
            self.generate(1)
        first, _ = self.generate(1)
        seconds, infos = self.generate(n_out)
        tokens = sum(i["completion_tokens"] - 1 for i in infos)
        steps = [verified(i) for i in infos]
        histograms = [i.get("spec_correct_drafts_histogram") for i in infos]
        alone = [h[0] if h else n for h, n in zip(histograms, steps, strict=True)]
        return {
            "seconds": seconds - first,
            "tokens": tokens,
            "steps": sum(steps) / len(steps),
            "longest": max(steps),  # of the request with most, so all that the seconds hold
            "alone": sum(alone) / sum(steps),  # share of steps that emitted one token
        }

    def profile(self, folder: str, steps: int, activities: list[str]) -> dict:
        """A trace of at least `steps` decode steps of all requests, made in `folder`."""
        self.generate(1)
        _, infos = self.generate(16)
        per_step = [(i["completion_tokens"] - 1) / verified(i) for i in infos]
        self.engine.start_profile(
            output_dir=folder, activities=activities, with_stack=False, record_shapes=False
        )
        try:
            self.generate(1 + math.ceil(1.2 * max(per_step) * steps))
        finally:
            self.engine.stop_profile()
        # Each rank writes one, named TIME-TP-RANK: the newest of rank 0.
        return {"trace": str(max(Path(folder).glob("*-TP-0*.trace.json.gz")))}


def verified(info: dict) -> int:
    """Decode steps of a request."""
    return info.get("spec_verify_ct") or info["completion_tokens"] - 1


def tokens(engine, prompts: list[list[int]], n_out: int) -> dict:
    """Greedy tokens, and the accept length of the whole run."""
    sampling = {"temperature": 0, "max_new_tokens": n_out, "ignore_eos": True}
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
    ids = [o["output_ids"] for o in outputs]
    steps = sum(o["meta_info"].get("spec_verify_ct") or 0 for o in outputs)
    accept = sum(len(i) - 1 for i in ids) / steps if steps else 1.0
    return {"tokens": ids, "accept_len": accept}


def losses(engine, prompts: list[list[int]], answers: list[list[int]]) -> dict:
    """Per emitted token: the highest log-probability at its place less its own."""
    found, pairs = [], list(zip(prompts, answers, strict=True))
    for i in range(0, len(pairs), SCORED_AT_ONCE):
        some = pairs[i : i + SCORED_AT_ONCE]
        outputs = engine.generate(
            input_ids=[prompt + answer for prompt, answer in some],
            sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=[len(prompt) - 1 for prompt, _ in some],
            top_logprobs_num=1,
        )
        for (_, answer), output in zip(some, outputs, strict=True):
            info = output["meta_info"]
            own = [x[0] for x in info["input_token_logprobs"]][-len(answer) :]
            best = [x[0][0] for x in info["input_top_logprobs"][-len(answer) :]]
            found.append([b - o for b, o in zip(best, own, strict=True)])
    return {"losses": found}


def probed(engine, point: Point | None, request: dict) -> dict:
    """What the probe saw since the last call, or of one generation under a schedule of its own."""
    if point is not None:
        probe.call(engine, **request["probe"])
        point.generate(request["n_out"])
    return probe.call(engine)


def main():
    arguments = json.loads(sys.argv[1])
    import sglang

    begin = time.perf_counter()
    engine = sglang.Engine(**arguments["engine"])
    answer(ready=time.perf_counter() - begin)
    points: dict[int, Point] = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "score" in request:
                answer(**losses(engine, request["prompts"], request["score"]))
                continue
            if "prompts" in request:
                answer(**tokens(engine, request["prompts"], request["n_out"]))
                continue
            if "phases" in request:
                count, n_in = request.pop("num_prompts"), request.pop("n_in")
                texts = [prompt(i, n_in, arguments["vocab"]) for i in range(count)]
                answer(**clients.measure(engine, texts, **request))
                continue
            bs = request.get("bs")
            if bs is not None and bs not in points:
                points[bs] = Point(engine, bs, request["n_in"], arguments["vocab"])
                points[bs].generate(8)  # the first steps of a shape may be slower
            if "probe" in request:
                answer(**probed(engine, points.get(bs), request))
                continue
            if "profile" in request:
                answer(**points[bs].profile(*(request[k] for k in PROFILE)))
                continue
            answer(**points[bs].measure(request["n_out"]))
        except Exception as e:
            answer(error=f"{type(e).__name__}: {e}")
    engine.shutdown()


if __name__ == "__main__":
    main()
