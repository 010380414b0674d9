# SPDX-License-Identifier: Apache-2.0
"""The tiny target and its two draft heads in plain PyTorch.

Parameter names are those of the checkpoints, so ``state_dict`` is what transformers and SGLang
load: ``LlamaForCausalLM``, ``LlamaForCausalLMEagle3`` and ``LlamaForCausalLMEagle``. Training and
evaluation share one attention: dense boolean masks and an explicit KV past, no cache object.

Shapes: B sequences, T rows, S keys, H query heads, G KV heads, D head_dim, E hidden.
"""

import json
import os
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

BOS, EOS, PAD, VOCAB = 256, 257, 258, 264  # ids 0-255 are the bytes themselves


@dataclass(frozen=True)
class Shape:
    """What the three models have in common; ``inter`` and ``layers`` differ for the heads."""

    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    inter: int = 480
    layers: int = 5
    vocab: int = VOCAB
    eps: float = 1e-5
    theta: float = 10000.0
    dropout: float = 0.05


TARGET = Shape()
HEAD = replace(TARGET, layers=1, dropout=0.0)
# Hidden states the EAGLE-3 head reads: the *outputs* of these layers. SGLang captures the input of
# layer id + 1, so the last layer's output can't be asked for: ids stay below layers - 1.
AUX_LAYERS = (0, 2, 3)


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        y = F.rms_norm(x.float(), x.shape[-1:], None, self.eps)
        return self.weight * y.to(x.dtype)


def rotate(x, pos, theta):
    """Rotary embedding, halves layout. x [B, heads, T, D], pos [T] or [B, T]."""
    half = x.shape[-1] // 2
    freq = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = pos.float().unsqueeze(-1) * freq
    angle = angle.unsqueeze(-3)  # over heads
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    """Grouped-query attention over ``past`` and the rows' own keys."""

    def __init__(self, s, size_in):
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(size_in, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(size_in, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(size_in, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)

    def forward(self, x, pos, mask=None, past=None):
        """mask: bool [B, 1, T, S], true = attend; None = causal. Returns (y, (k, v))."""
        s = self.s

        def split(y, heads):
            return y.unflatten(-1, (heads, s.head_dim)).transpose(1, 2)

        q = rotate(split(self.q_proj(x), s.heads), pos, s.theta)
        k = rotate(split(self.k_proj(x), s.kv_heads), pos, s.theta)
        v = split(self.v_proj(x), s.kv_heads)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        group = s.heads // s.kv_heads
        y = F.scaled_dot_product_attention(
            q,
            k.repeat_interleave(group, 1),
            v.repeat_interleave(group, 1),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return self.o_proj(y.transpose(1, 2).flatten(2)), (k, v)


class MLP(nn.Module):
    """SiLU-gated feed-forward."""

    def __init__(self, s):
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.inter, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.inter, bias=False)
        self.down_proj = nn.Linear(s.inter, s.hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A Llama decoder layer; ``norm_in=False`` is EAGLE's first layer, which has no input norm."""

    def __init__(self, s, norm_in=True):
        super().__init__()
        self.self_attn = Attention(s, s.hidden)
        self.mlp = MLP(s)
        self.input_layernorm = RMSNorm(s.hidden, s.eps) if norm_in else nn.Identity()
        self.post_attention_layernorm = RMSNorm(s.hidden, s.eps)
        self.drop = nn.Dropout(s.dropout)

    def forward(self, x, pos, mask=None, past=None):
        a, kv = self.self_attn(self.input_layernorm(x), pos, mask, past)
        x = x + self.drop(a)
        return x + self.drop(self.mlp(self.post_attention_layernorm(x))), kv


class Target(nn.Module):
    """The Llama-style target."""

    def __init__(self, s=TARGET, aux_layers=AUX_LAYERS):
        super().__init__()
        self.s, self.aux_layers = s, aux_layers
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.model.layers = nn.ModuleList([Layer(s) for _ in range(s.layers)])
        self.model.norm = RMSNorm(s.hidden, s.eps)
        self.lm_head = nn.Linear(s.hidden, s.vocab, bias=False)
        self.drop = nn.Dropout(s.dropout)
        init(self, s.layers)

    def embed(self, ids):
        return self.model.embed_tokens(ids)

    def forward(self, ids, pos=None, mask=None):
        """Returns logits [B, T, V], aux states [B, T, 3E] and normed last states [B, T, E]."""
        if pos is None:
            pos = torch.arange(ids.shape[1], device=ids.device)
        x, aux = self.drop(self.embed(ids)), []
        for i, layer in enumerate(self.model.layers):
            x, _ = layer(x, pos, mask)
            if i in self.aux_layers:
                aux.append(x)
        x = self.model.norm(x)
        return self.lm_head(x), torch.cat(aux, -1), x


class Eagle3Layer(nn.Module):
    """The EAGLE-3 layer: attention reads [embedding, hidden], the residual is the hidden state."""

    def __init__(self, s):
        super().__init__()
        self.self_attn = Attention(s, 2 * s.hidden)
        self.mlp = MLP(s)
        self.hidden_norm = RMSNorm(s.hidden, s.eps)
        self.input_layernorm = RMSNorm(s.hidden, s.eps)
        self.post_attention_layernorm = RMSNorm(s.hidden, s.eps)

    def forward(self, hidden, embeds, pos, mask=None, past=None):
        x = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), -1)
        a, kv = self.self_attn(x, pos, mask, past)
        x = hidden + a
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class Eagle3(nn.Module):
    """EAGLE-3 head. Row p: target states of p, token p + 1, position p; predicts token p + 2."""

    def __init__(self, s=HEAD):
        super().__init__()
        self.s = s
        self.fc = nn.Linear(len(AUX_LAYERS) * s.hidden, s.hidden, bias=False)
        self.midlayer = Eagle3Layer(s)
        self.norm = RMSNorm(s.hidden, s.eps)
        self.lm_head = nn.Linear(s.hidden, s.vocab, bias=False)
        init(self, 1)

    def start(self, aux, last):
        """Hidden states of the rows that have target states."""
        return self.fc(aux).float()  # the residual stays float32 under autocast

    def forward(self, target, hidden, ids, pos, mask=None, past=None):
        """Returns logits, the hidden states for the next draft step (before the norm), (k, v)."""
        x, kv = self.midlayer(hidden, target.embed(ids), pos, mask, past)
        return self.lm_head(self.norm(x)), x, kv


class Eagle(nn.Module):
    """EAGLE(-1/2) head: the target's normed last states, the target's embedding and lm_head."""

    def __init__(self, s=HEAD):
        super().__init__()
        self.s = s
        self.fc = nn.Linear(2 * s.hidden, s.hidden)
        self.layers = nn.ModuleList([Layer(s, norm_in=False)])
        init(self, 1)

    def start(self, aux, last):
        return last

    def forward(self, target, hidden, ids, pos, mask=None, past=None):
        x = self.fc(torch.cat((target.embed(ids), hidden), -1)).float()
        x, kv = self.layers[0](x, pos, mask, past)
        return target.lm_head(x), x, kv


def init(module, layers):
    """Normal 0.02; what is added to the residual is scaled down by depth."""
    for name, p in module.named_parameters():
        if p.dim() == 2:
            down = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(p, std=0.02 / ((2 * layers) ** 0.5 if down else 1))
        elif name.endswith("bias"):
            nn.init.zeros_(p)


KINDS = {"target": Target, "eagle3": Eagle3, "eagle": Eagle}
ARCHITECTURE = {
    "target": "LlamaForCausalLM",
    "eagle3": "LlamaForCausalLMEagle3",
    "eagle": "LlamaForCausalLMEagle",
}


def config(kind, s):
    """The config.json of one model."""
    c = {
        "architectures": [ARCHITECTURE[kind]],
        "model_type": "llama",
        "hidden_size": s.hidden,
        "intermediate_size": s.inter,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "vocab_size": s.vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": s.eps,
        "rope_theta": s.theta,
        "rope_parameters": {"rope_theta": s.theta, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "dtype": "bfloat16",
    }
    if kind == "eagle3":
        c["draft_vocab_size"] = s.vocab
        c["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS)}
    return c


def save(module, folder, dtype=torch.bfloat16):
    """Writes config.json and model.safetensors."""
    kind = next(k for k, c in KINDS.items() if isinstance(module, c))
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config(kind, module.s), f, indent=1)
        f.write("\n")
    weights = {n: p.detach().to("cpu", dtype).contiguous() for n, p in module.state_dict().items()}
    file = os.path.join(folder, "model.safetensors")
    save_file(weights, file, metadata={"format": "pt"})
    os.chmod(file, 0o644)


def load(folder, device="cpu"):
    """Reads a folder that ``save`` wrote; float32, evaluation mode."""
    with open(os.path.join(folder, "config.json")) as f:
        c = json.load(f)
    kind = next(k for k, a in ARCHITECTURE.items() if a == c["architectures"][0])
    base = TARGET if kind == "target" else HEAD
    s = replace(base, inter=c["intermediate_size"], layers=c["num_hidden_layers"])
    module = KINDS[kind](s)
    weights = load_file(os.path.join(folder, "model.safetensors"))
    module.load_state_dict({n: w.float() for n, w in weights.items()})
    return module.to(device).eval().requires_grad_(False)
