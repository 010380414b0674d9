# SPDX-License-Identifier: Apache-2.0
"""The demo: one real SGLang engine after the other, plain and speculative, same prompts.

Prints the texts, the accept length (tokens per step, bonus token included) and checks that every
speculative run emits the tokens of the plain one. On the CPU everything is float32, where that must
hold. SGLang on CUDA has no float32: there it is float16, and a text may leave the plain one where
the plain engine itself gives two tokens the same log-probability up to TIE.
"""

import argparse
import sys
import time

PROMPTS = (
    "def read_header(self, name, default=None):\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    "import os\nimport sys\n\ndef main():\n",
)

# label -> (steps, topk, num_draft_tokens) and SPECFUSED_MODE; None: no speculation
RUNS = {
    "plain": (None, "stock"),
    "chain 3-1-4": ((3, 1, 4), "on"),
    "tree 3-4-16": ((3, 4, 16), "on"),
    "tree 3-4-16, every other step plain": ((3, 4, 16), "schedule:10"),
}


TIE = 0.05  # float16 logits of the tiny pair have steps of 0.016


def positive(text: str) -> int:
    """A number of tokens that every run can emit: at least 8, as the warm-up does."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 8:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 8, got {text!r}")
    return number


def add_arguments(parser) -> None:
    """Arguments of `python -m specfused demo`."""
    parser.add_argument("--model", help="target checkpoint (default: the tiny model shipped here)")
    parser.add_argument("--draft", help="EAGLE-3 head for it")
    parser.add_argument("--tokens", type=positive, default=96, help="new tokens per prompt")
    parser.add_argument("--prompt", action="append", help="instead of the built-in prompts")


def engine_arguments(options, setting) -> dict:
    """What the demo gives to sglang.Engine."""
    import torch

    cuda = torch.cuda.is_available()
    arguments = {
        "model_path": options.model,
        "attention_backend": "specfused",
        "dtype": "float16" if cuda else "float32",
        "mem_fraction_static": 0.3,
        "max_running_requests": 8,
        "max_total_tokens": 8192,
        "context_length": 1024,
        "random_seed": 0,
        "log_level": "error",
        "skip_server_warmup": True,
    }
    if not cuda:
        arguments |= {"device": "cpu", "disable_cuda_graph": True}
    if setting is not None:
        steps, topk, width = setting
        arguments |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": options.draft,
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": width,
        }
    return arguments


def generate(options, setting, prompts) -> tuple[list[dict], float]:
    """Answers of one engine and the seconds it took to generate them."""
    import sglang

    engine = sglang.Engine(**engine_arguments(options, setting))
    try:
        sampling = {"temperature": 0, "max_new_tokens": options.tokens, "ignore_eos": True}
        engine.generate(list(prompts), {**sampling, "max_new_tokens": 8})  # warm
        begin = time.perf_counter()
        answers = engine.generate(list(prompts), sampling)
        seconds = time.perf_counter() - begin
        if setting is None:  # what the judge of ties needs, outside of the time
            scored = engine.generate(
                list(prompts), sampling, return_logprob=True, top_logprobs_num=2
            )
            for answer, with_scores in zip(answers, scored, strict=True):
                answer["ranks"] = with_scores["meta_info"]["output_top_logprobs"]
        return answers, seconds
    finally:
        engine.shutdown()


def same_but_for_ties(plain: dict, answer: dict) -> bool:
    """Whether the answer is the plain one, up to its first token that is as likely as plain's.

    Args:
        plain: answer of the plain engine; "ranks" has (log-probability, token, ...) of the two
            likeliest tokens of every place.
        answer: the answer to judge; behind a tie it is a text of its own and is not judged.
    """
    for ours, theirs, ranks in zip(
        answer["output_ids"], plain["output_ids"], plain["ranks"], strict=True
    ):
        if ours != theirs:
            near = [token for score, token, *_ in ranks if ranks[0][0] - score <= TIE]
            return ours in near
    return True


def bold(text: str) -> str:
    """Generated text, set apart from its prompt where the output is a terminal."""
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text


def run(options) -> int:
    """Runs the demo; 0 if all tokens are equal."""
    import importlib.metadata
    import os

    import torch

    import specfused
    from specfused import models

    try:
        sglang = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        print(
            "specfused: the demo needs SGLang: pip install sglang==0.5.17, "
            "or run make demo in the source tree",
            file=sys.stderr,
        )
        return 2
    options.model = options.model or models.path("target")
    options.draft = options.draft or models.path("eagle3")
    cuda = torch.cuda.is_available()
    if cuda:
        os.environ.setdefault("SPECFUSED_PREFILL_BACKEND", "triton")  # nothing to compile
    prompts = options.prompt or PROMPTS
    device = torch.cuda.get_device_name() if cuda else "the CPU"
    print(
        f"specfused {specfused.__version__} in SGLang {sglang} on {device}\n",
        flush=True,
    )
    plain, equal, exact = None, True, True
    for label, (setting, mode) in RUNS.items():
        os.environ["SPECFUSED_MODE"] = mode
        print(f"{label}: starting the engine ...", flush=True)
        answers, seconds = generate(options, setting, prompts)
        tokens = [answer["output_ids"] for answer in answers]
        if plain is None:
            plain = answers
            for prompt, answer in zip(prompts, answers, strict=True):
                print(f"\n{prompt}{bold(answer['text'])}\n{'-' * 72}")
        line = f"{label}: {sum(map(len, tokens))} tokens in {seconds:.2f} s"
        if setting is not None:
            steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
            same = tokens == [answer["output_ids"] for answer in plain]
            tied = all(map(same_but_for_ties, plain, answers))
            exact, equal = exact and same, equal and (same or tied and cuda)
            line += f", accept length {sum(map(len, tokens)) / steps:.2f}, tokens "
            line += "equal plain" if same else "equal plain up to a tie" if tied else "DIFFER"
        print(line, flush=True)
    ties = "" if exact else f", but for tokens within {TIE} of each other's log-probability"
    print(f"\nAll speculative tokens equal the plain ones{ties}." if equal else "\nTokens differ.")
    return 0 if equal else 1
