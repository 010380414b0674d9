# SPDX-License-Identifier: Apache-2.0
"""What a serving run compares: engines, each with its own arguments and environment.

A name is library-mode[-detail][@backend]: `sglang-plain-triton`, `specfused-tree-auto`,
`specfused-tree-auto@triton` (our worker over a stock backend), `sglang-chain-adaptive`.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

ANCHOR = "sglang-plain-triton"  # calls are compared only where its figures agree

ADAPTIVE = "adaptive"  # SGLang's --speculative-adaptive: 0 to 7 steps, by batch size and acceptance

# mode -> (steps, topk, num_draft_tokens, accept length that the comparison is stated at)
SHAPES = {"chain": (3, 1, 4, 2.5), "tree": (3, 4, 16, 3.0)}

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
LLAMA_8B_EAGLE = {**LLAMA_8B, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}


@dataclass(frozen=True)
class Model:
    """Target and draft. `dummy`: shapes only, weights are made up and acceptance is simulated."""

    name: str
    target: str
    draft: str
    algorithm: str
    dummy: bool
    vocab: int
    context: int  # longest, prompt included
    engine: dict = field(default_factory=dict)  # arguments that every engine of it gets


def llama_8b(folder: Path) -> Model:
    """The 8B shape: configs are written to `folder`, load_format=dummy does the rest."""
    for name, config in (("target", LLAMA_8B), ("draft", LLAMA_8B_EAGLE)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    engine = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "mem_fraction_static": 0.85,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
    }
    target, draft = str(folder / "target"), str(folder / "draft")
    sizes = LLAMA_8B["vocab_size"], LLAMA_8B["max_position_embeddings"]
    return Model("llama8b", target, draft, "EAGLE", True, *sizes, engine)


def tiny(cuda: bool) -> Model:
    """The trained pair of the package: real acceptance."""
    from specfused import models

    engine = {"skip_tokenizer_init": True, "mem_fraction_static": 0.3}
    engine["dtype"] = "float16" if cuda else "float32"  # SGLang on CUDA has no float32
    target, draft = models.path("target"), models.path("eagle3")
    return Model("tiny", target, draft, "EAGLE3", False, 256, 2048, engine)


@dataclass(frozen=True)
class Setup:
    """One engine of the comparison."""

    name: str
    engine: dict
    env: dict
    accept: float | None  # of a step that drafts, where acceptance is simulated; 1 for plain

    @property
    def switches(self) -> bool:
        """Whether its worker is specfused's, which chooses step by step."""
        ours = self.env.get("SPECFUSED_MODE", "stock") != "stock"
        return ours and "speculative_algorithm" in self.engine

    def describe(self) -> str:
        return json.dumps({**self.engine, **self.env}, sort_keys=True)


def check(name: str) -> tuple[str, str, str, str]:
    """Library, mode, detail and backend of a name; what it leaves out is empty.

    Raises:
        ValueError: it names no setup.
    """
    words, at, backend = name.partition("@")
    library, _, rest = words.partition("-")
    mode, _, detail = rest.partition("-")
    valid = library in ("sglang", "specfused") and mode in ("plain", *SHAPES)
    if not valid or at and not backend:
        raise ValueError(
            f"setup must be (sglang|specfused)-(plain|{'|'.join(SHAPES)})[-detail][@backend], "
            f"got {name!r}"
        )
    if library == "sglang" and detail == ADAPTIVE and mode != "chain":
        raise ValueError(f"setup: {ADAPTIVE} must go with a chain (topk 1), got {name!r}")
    takes_backend = detail == ADAPTIVE if library == "sglang" else detail and detail != "stock"
    if backend and (mode == "plain" or not takes_backend):
        raise ValueError(
            "setup: @backend must go with a mode of our worker or with sglang-chain-adaptive "
            f"(else it is sglang-{mode}-{backend}), got {name!r}"
        )
    return library, mode, detail, backend


def setup(name: str, model: Model, cuda: bool, acceptance: str = "simulated") -> Setup:
    """The engine behind a name.

    Args:
        name: library-mode[-detail][@backend]. sglang: detail is the attention backend, default
            triton (on the CPU torch_native), or `adaptive`, SGLang's adaptive number of draft
            steps. specfused: detail is the mode of its worker, on, off, auto or anything that
            SPECFUSED_MODE takes; without it SGLang's own worker runs. @backend is a stock
            attention backend under a worker that detail names.
        acceptance: of a dummy model. real: what made-up weights accept, next to nothing, decided
            by the code that decides for a trained model.

    Raises:
        ValueError: there is no such setup.
    """
    library, mode, detail, backend = check(name)
    adaptive = library == "sglang" and detail == ADAPTIVE
    engine, env, accept = {"model_path": model.target, **model.engine}, {}, 1.0
    if library == "specfused":
        engine["attention_backend"] = backend or "specfused"
        env = {"SPECFUSED_MODE": detail or "stock"}
        if cuda and not backend:
            env["SPECFUSED_PREFILL_BACKEND"] = "triton"
    else:
        named = backend if adaptive else detail
        engine["attention_backend"] = named or ("triton" if cuda else "torch_native")
    if mode != "plain":
        steps, topk, width, accept = SHAPES[mode]
        engine |= {
            "speculative_algorithm": model.algorithm,
            "speculative_draft_model_path": model.draft,
            "speculative_num_steps": steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": width,
        }
        if adaptive:
            engine["speculative_adaptive"] = True
        simulated = model.dummy and acceptance == "simulated"
        if simulated:
            env["SGLANG_SIMULATE_ACC_LEN"] = str(accept)
        if adaptive or not simulated:
            accept = None  # what it realises is the point
    return Setup(name, engine, env, accept)
