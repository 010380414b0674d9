# SPDX-License-Identifier: Apache-2.0
"""Tiny Llama checkpoints: one target and a draft for each speculative algorithm.

Four layers of width 64 that only perturb what embedding and output matrix do together. So the
target's next token depends on the context, and yet a draft that misses a part of the layers often
guesses right: acceptance is neither nothing nor everything. Seeds are fixed.

    target       4 layers, 4 query heads on 2 KV heads of 16, vocabulary 512
    standalone   the target without its last layers
    eagle        a one-layer EAGLE head
    eagle3       a one-layer EAGLE3 head on three hidden states, which drafts 3 of 4 token ids
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, VOCAB = 64, 128, 512
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
LAYERS, STANDALONE_LAYERS = 4, 2
EAGLE3_HIDDEN_OF = [0, 1, 2]  # the layers whose output an EAGLE3 head reads
EOS = 2
GAIN = 0.05  # what a layer adds, against an embedding of size one


class _Maker:
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape, std):
        return std * torch.randn(*shape, generator=self.generator)

    def layer(self, prefix, inputs=HIDDEN, gain=GAIN):
        """Weights of one decoder layer; `inputs` is the width that attention reads."""
        std, q_width, kv_width = 0.2, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        weights = {
            "self_attn.q_proj": self.normal(q_width, inputs, std=std),
            "self_attn.k_proj": self.normal(kv_width, inputs, std=std),
            "self_attn.v_proj": self.normal(kv_width, inputs, std=std),
            "self_attn.o_proj": self.normal(HIDDEN, q_width, std=std * gain),
            "mlp.gate_proj": self.normal(INTERMEDIATE, HIDDEN, std=std),
            "mlp.up_proj": self.normal(INTERMEDIATE, HIDDEN, std=std),
            "mlp.down_proj": self.normal(HIDDEN, INTERMEDIATE, std=std * gain),
            "input_layernorm": torch.ones(HIDDEN),
            "post_attention_layernorm": torch.ones(HIDDEN),
        }
        return {f"{prefix}.{name}.weight": tensor for name, tensor in weights.items()}


def _config(architecture, layers, **extra):
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        **extra,
    }


def _save(folder, config, weights):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _target():
    make = _Maker(seed=11)
    weights = {
        "model.embed_tokens.weight": make.normal(VOCAB, HIDDEN, std=1.0),
        # Small logits: no draft probability rounds to one, which would make scores of nodes tie.
        "lm_head.weight": make.normal(VOCAB, HIDDEN, std=0.4),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    weights["lm_head.weight"][EOS] = 0  # never the largest: no request ends by itself
    for i in range(LAYERS):
        weights |= make.layer(f"model.layers.{i}")
    return weights


def _eagle():
    """Starts from the token's embedding and hardly looks at the hidden state."""
    make = _Maker(seed=12)
    fc = torch.cat((torch.eye(HIDDEN), make.normal(HIDDEN, HIDDEN, std=0.005)), 1)
    return {"fc.weight": fc, "fc.bias": torch.zeros(HIDDEN), **make.layer("layers.0")}


def _eagle3(lm_head):
    """Here the embedding reaches the output through attention only.

    Queries and keys are slices of the embedding, so a token attends to equal tokens, itself
    first; values and output carry half of the embedding on.
    """
    make = _Maker(seed=13)
    weights = make.layer("midlayer", inputs=2 * HIDDEN)
    query = torch.zeros(HEADS * HEAD_DIM, 2 * HIDDEN)
    key = torch.zeros(KV_HEADS * HEAD_DIM, 2 * HIDDEN)
    output = torch.zeros(HIDDEN, HEADS * HEAD_DIM)
    eye = torch.eye(HEAD_DIM)
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        columns = slice(kv_head * HEAD_DIM, (kv_head + 1) * HEAD_DIM)
        query[rows, columns] = 3 * eye
        key[columns, columns] = eye
        output[columns, rows] = eye
    for name, tensor in {"q": query, "k": key, "v": key, "o": output}.items():
        weights[f"midlayer.self_attn.{name}_proj.weight"] = tensor
    kept = torch.arange(VOCAB).view(-1, 4)[:, :3].flatten()
    return {
        **weights,
        "fc.weight": make.normal(HIDDEN, len(EAGLE3_HIDDEN_OF) * HIDDEN, std=0.005),
        "norm.weight": torch.ones(HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": lm_head[kept],
        "d2t": kept - torch.arange(kept.numel()),
    }


def make_checkpoints(folder: Path) -> Path:
    """Write all four checkpoints below `folder`."""
    target = _target()
    _save(folder / "target", _config("LlamaForCausalLM", LAYERS), target)
    dropped = tuple(f"model.layers.{i}." for i in range(STANDALONE_LAYERS, LAYERS))
    short = {name: tensor for name, tensor in target.items() if not name.startswith(dropped)}
    _save(folder / "standalone", _config("LlamaForCausalLM", STANDALONE_LAYERS), short)
    _save(folder / "eagle", _config("LlamaForCausalLMEagle", 1), _eagle())
    eagle3_config = _config(
        "LlamaForCausalLMEagle3",
        1,
        draft_vocab_size=VOCAB * 3 // 4,
        eagle_config={"eagle_aux_hidden_state_layer_ids": EAGLE3_HIDDEN_OF},
    )
    _save(folder / "eagle3", eagle3_config, _eagle3(target["lm_head.weight"]))
    return folder
