# SPDX-License-Identifier: Apache-2.0
"""Are the tokens right? Every token that an engine emits is scored again by a plain one.

Two bf16 engines differ where two tokens are as good as equal, so tokens are not compared: the loss
of a token is the highest log-probability at its place, in a plain prefill of the same text, less
its own. Wrong attention, a wrong tree or a misplaced KV row emits tokens of large loss.
"""

import json
import math
from pathlib import Path

from bench.serve.probe import Step, switches
from bench.serve.setups import ANCHOR
from bench.serve.suite import Failed, Suite

LIMIT = 0.05  # a token may be that much less likely than the likeliest
PROMPT_BYTES = (33, 400)


def prompts(count: int) -> list[list[int]]:
    """Python sources, as the tiny pair has learnt them, cut at places of their own."""
    text = (Path(json.__file__).read_bytes() + Path(__file__).read_bytes()) * 4
    low, high = PROMPT_BYTES
    lengths = [low + (97 * i) % (high - low) for i in range(count)]
    return [list(text[311 * i : 311 * i + n]) for i, n in enumerate(lengths)]


def verdict(id_: str, name: str, accept_len: float, losses: list[list[float]]) -> dict:
    """One case: how many tokens, how many not the likeliest, the largest loss."""
    flat = [x for of_request in losses for x in of_request]
    return {
        "id": id_,
        "impl": name,
        "accept_len": round(accept_len, 3),
        "tokens": len(flat),
        "not_argmax": sum(x > 0 for x in flat),
        "beyond_limit": sum(not x <= LIMIT for x in flat),
        "largest_loss": round(max(flat), 5) if all(map(math.isfinite, flat)) else None,
    }


class Rescore(Suite):
    """Engines one group after the other, then the plain engine of stock SGLang as the judge."""

    probed = True

    def run(self) -> int:
        texts = prompts(self.args.requests or max(self.args.concurrency))
        answers: dict[str, dict] = {}
        names = [n for n in self.args.setups if n != ANCHOR]
        for i in range(0, len(names), self.args.parallel):
            for child in self.start(names[i : i + self.args.parallel]):
                try:
                    answer = child.ask(300, prompts=texts, n_out=self.args.tokens_out)
                    if child.setup.switches:
                        steps = child.ask(probe={})["steps"]
                        answer["switches"] = switches([Step(*step) for step in steps])
                    answers[child.setup.name] = answer
                except Failed as e:
                    self.problem(f"{child.setup.name}: {e}")
                child.close()
        judge = "sglang-plain-triton" if self.cuda else "sglang-plain-torch_native"
        if not names:
            self.problem(f"--setups must name an engine to judge beside {ANCHOR}")
        for child in self.start([judge] if answers else []):
            try:
                own = child.ask(300, prompts=texts, n_out=self.args.tokens_out)
                for name, answer in {judge: own, **answers}.items():
                    self.judge(child, name, texts, answer, own)
            except Failed as e:
                self.problem(f"{judge}: {e}")
            child.close()
        return self.end()

    def judge(self, child, name: str, texts, answer: dict, own: dict):
        losses = child.ask(300, prompts=texts, score=answer["tokens"])["losses"]
        case = verdict(self.args.id, name, answer["accept_len"], losses)
        case["equal_to_judge"] = sum(
            a == b for a, b in zip(answer["tokens"], own["tokens"], strict=True)
        )
        case["requests"] = len(texts)
        case["switches"] = answer.get("switches")
        self.cases.append(case)
        self.line(
            f"{name:32s} {case['tokens']} tokens, accept {case['accept_len']:.2f}, "
            f"{case['not_argmax']} not the likeliest, {case['beyond_limit']} beyond {LIMIT}, "
            f"largest loss {case['largest_loss']}, requests equal {case['equal_to_judge']}, "
            f"switches {case['switches']}"
        )
        if case["beyond_limit"]:
            self.problem(f"{name}: {case['beyond_limit']} tokens beyond {LIMIT}")
        self.write()
