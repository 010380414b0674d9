# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own: a JSON request a line on stdin, a JSON answer a line.

Answers start with MARK, everything else on stdout is the engine's log.
"""

import json
import sys
import time

MARK = "@@"


def answer(**what):
    print(MARK + json.dumps(what), flush=True)


class Point:
    """Generations of one batch size. Prompts are the same in every engine and stay in its prefix
    cache after the first time, so that later generations decode only."""

    def __init__(self, engine, bs: int, n_in: int, vocab: int):
        import random

        source = random.Random(bs)
        low, high = (10, 4000) if vocab > 4000 else (32, 127)
        self.engine = engine
        self.prompts = [[source.randrange(low, high) for _ in range(n_in)] for _ in range(bs)]

    def generate(self, n_out: int) -> tuple[float, list[dict]]:
        sampling = {"temperature": 0, "max_new_tokens": n_out, "ignore_eos": True}
        begin = time.perf_counter()
        outputs = self.engine.generate(input_ids=self.prompts, sampling_params=sampling)
        return time.perf_counter() - begin, [o["meta_info"] for o in outputs]

    def measure(self, n_out: int) -> dict:
        """Seconds of `n_out` tokens a request less those of one token, and what they held."""
        first, _ = self.generate(1)
        seconds, infos = self.generate(n_out)
        tokens = sum(i["completion_tokens"] - 1 for i in infos)
        steps = [i.get("spec_verify_ct") or i["completion_tokens"] - 1 for i in infos]
        return {"seconds": seconds - first, "tokens": tokens, "steps": sum(steps) / len(steps)}


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
            bs = request["bs"]
            if bs not in points:
                points[bs] = Point(engine, bs, request["n_in"], arguments["vocab"])
                points[bs].generate(8)
            answer(**points[bs].measure(request["n_out"]))
        except Exception as e:
            answer(error=f"{type(e).__name__}: {e}")
    engine.shutdown()


if __name__ == "__main__":
    main()
