# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own: a JSON request a line on stdin, a JSON answer a line.

Answers start with MARK, everything else on stdout is the engine's log.
"""

import json
import random
import sys
import time

from bench.serve import clients

MARK = "@@"


def answer(**what):
    print(MARK + json.dumps(what), flush=True)


def random_prompts(seed: int, count: int, n_in: int, vocab: int) -> list[list[int]]:
    """The same in every engine."""
    source = random.Random(seed)
    low, high = (10, 4000) if vocab > 4000 else (32, 127)
    return [[source.randrange(low, high) for _ in range(n_in)] for _ in range(count)]


class Point:
    """Generations of one batch size. Prompts are the same in every engine and stay in its prefix
    cache after the first time, so that later generations decode only."""

    def __init__(self, engine, bs: int, n_in: int, vocab: int):
        self.engine = engine
        self.prompts = random_prompts(bs, bs, n_in, vocab)

    def generate(self, n_out: int) -> tuple[float, list[dict]]:
        sampling = {"temperature": 0, "max_new_tokens": n_out, "ignore_eos": True}
        begin = time.perf_counter()
        outputs = self.engine.generate(input_ids=self.prompts, sampling_params=sampling)
        return time.perf_counter() - begin, [o["meta_info"] for o in outputs]

    def measure(self, n_out: int) -> dict:
        """Seconds of `n_out` tokens a request less those of one token, and what they held."""
        self.generate(1)  # other batch sizes may have driven the prompts out of the prefix cache
        first, _ = self.generate(1)
        seconds, infos = self.generate(n_out)
        tokens = sum(i["completion_tokens"] - 1 for i in infos)
        steps = [i.get("spec_verify_ct") or i["completion_tokens"] - 1 for i in infos]
        return {"seconds": seconds - first, "tokens": tokens, "steps": sum(steps) / len(steps)}


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
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        (output,) = engine.generate(
            input_ids=[prompt + answer],
            sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=len(prompt) - 1,
            top_logprobs_num=1,
        )
        info = output["meta_info"]
        own = [x[0] for x in info["input_token_logprobs"]][-len(answer) :]
        best = [x[0][0] for x in info["input_top_logprobs"][-len(answer) :]]
        found.append([b - o for b, o in zip(best, own, strict=True)])
    return {"losses": found}


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
                prompts = random_prompts(count, count, n_in, arguments["vocab"])
                answer(**clients.measure(engine, prompts, **request))
                continue
            bs = request["bs"]
            if bs not in points:
                points[bs] = Point(engine, bs, request["n_in"], arguments["vocab"])
                points[bs].generate(8)  # the first steps of a shape may be slower
            answer(**points[bs].measure(request["n_out"]))
        except Exception as e:
            answer(error=f"{type(e).__name__}: {e}")
    engine.shutdown()


if __name__ == "__main__":
    main()
