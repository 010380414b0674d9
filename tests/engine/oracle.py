# SPDX-License-Identifier: Apache-2.0
"""What greedy speculation must accept, computed with transformers and without any KV cache.

For every round the whole sequence is recomputed: the target's greedy tokens, the draft's
candidates along every branch, the choice of the tree and the walk through it. No attention mask
of a tree, no slot and no commit occurs here, so the histograms of accepted drafts are an
independent truth for the draft side of an engine, as the tokens are for the verify side.

SGLang feeds a draft the sequence shifted by one: input i is token i + 1, at position i, together
with what the target (or, for drafted tokens, the draft) computed at i.
"""

from dataclasses import dataclass

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm


@dataclass
class Truth:
    """One request: generated tokens and, per number of accepted drafts, how many rounds."""

    tokens: list[int]
    histogram: list[int]


def _load_llama(folder):
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class _StandaloneDraft:
    """A language model of its own: no feature goes in or out."""

    def __init__(self, folder, target):
        self.model = _load_llama(folder)
        self.token_of = torch.arange(self.model.config.vocab_size)

    def target_features(self, hidden_states):
        return torch.zeros_like(hidden_states[-1])

    def __call__(self, tokens, features):
        return self.model(tokens).logits[:, -1], features[:, -1]


class _Identity(nn.Module):
    def forward(self, x):
        return x


class _EagleDraft:
    """fc joins embedding and feature; one layer without input norm; its output is the feature."""

    def __init__(self, folder, target):
        weights = load_file(folder / "model.safetensors")
        self.embed, self.lm_head = target.model.embed_tokens, target.lm_head
        self.fc = nn.Linear(*reversed(weights["fc.weight"].shape))
        self.fc.load_state_dict({"weight": weights["fc.weight"], "bias": weights["fc.bias"]})
        self.model = LlamaModel(LlamaConfig.from_pretrained(folder)).eval()
        layers = {name: tensor for name, tensor in weights.items() if name.startswith("layers.")}
        self.model.load_state_dict(layers, strict=False)
        self.model.layers[0].input_layernorm = self.model.norm = _Identity()
        self.token_of = torch.arange(self.lm_head.out_features)

    def target_features(self, hidden_states):
        return hidden_states[-1]

    def __call__(self, tokens, features):
        inputs = self.fc(torch.cat((self.embed(tokens), features), -1))
        last = self.model(inputs_embeds=inputs).last_hidden_state[:, -1]
        return self.lm_head(last), last


class _Eagle3Layer(nn.Module):
    """Attention reads embedding and feature side by side; the residual is the feature."""

    def __init__(self, config):
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, width, bias=False))
        self.mlp = LlamaMLP(config)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(self, inputs, **kwargs):
        embedding, feature = inputs.chunk(2, -1)
        joined = torch.cat((self.input_layernorm(embedding), self.hidden_norm(feature)), -1)
        hidden = feature + self.self_attn(hidden_states=joined, **kwargs)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Eagle3Draft:
    """fc joins several of the target's hidden states; own output matrix over fewer tokens."""

    def __init__(self, folder, target):
        weights = load_file(folder / "model.safetensors")
        config = LlamaConfig.from_pretrained(folder)
        self.layer_ids = config.eagle_config["eagle_aux_hidden_state_layer_ids"]
        self.embed, self.fc = target.model.embed_tokens, weights["fc.weight"]
        self.lm_head = weights["lm_head.weight"]
        self.token_of = torch.arange(self.lm_head.shape[0]) + weights["d2t"]
        layer = _Eagle3Layer(config)
        layer.load_state_dict(
            {
                name.removeprefix("midlayer."): tensor
                for name, tensor in weights.items()
                if name.startswith("midlayer.")
            }
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm.load_state_dict({"weight": weights["norm.weight"]})
        self.model = LlamaModel(config).eval()
        self.model.layers[0], self.model.norm = layer, _Identity()

    def target_features(self, hidden_states):
        joined = torch.cat([hidden_states[i + 1] for i in self.layer_ids], -1)
        return joined @ self.fc.T

    def __call__(self, tokens, features):
        inputs = torch.cat((self.embed(tokens), features), -1)
        last = self.model(inputs_embeds=inputs).last_hidden_state[:, -1]
        return self.norm(last) @ self.lm_head.T, last


DRAFTS = {"STANDALONE": _StandaloneDraft, "EAGLE": _EagleDraft, "EAGLE3": _Eagle3Draft}


def _grow(draft, tokens, features, steps, topk):
    """All candidates as (score, path of tokens).

    Branch t of a step is the t-th best candidate of the one before. SGLang gives branch t the KV
    slots of branch t, whatever candidate it descends from, so what a draft reads before its own
    token is the history of its branch and not its path. Only the feature comes from the parent.
    """
    logits, feature = draft(tokens[None], features[None])
    frontier = [(1.0, [])]
    seen, carried = tokens.expand(topk, -1), features.expand(topk, -1, -1)
    candidates = []
    for step in range(steps):
        probs, ids = logits.softmax(-1).topk(topk)
        fresh = [
            (score * float(p), [*path, int(token)], row)
            for row, (score, path) in enumerate(frontier)
            for p, token in zip(probs[row], draft.token_of[ids[row]], strict=True)
        ]
        candidates += [(score, path) for score, path, _ in fresh]
        if step + 1 == steps:
            break
        best = sorted(fresh, key=lambda entry: -entry[0])[:topk]
        frontier = [(score, path) for score, path, _ in best]
        seen = torch.cat((seen, torch.tensor([path[-1:] for _, path in frontier])), 1)
        parents = feature[[row for _, _, row in best]]
        carried = torch.cat((carried, parents[:, None]), 1)
        logits, feature = draft(seen, carried)
    return candidates


@torch.no_grad()
def speculate(models, algorithm, steps, topk, num_draft_tokens, prompts, max_new_tokens):
    """Return one Truth per prompt for this algorithm and tree."""
    target = _load_llama(models / "target")
    draft = DRAFTS[algorithm](models / algorithm.lower(), target)
    return [
        _speculate_one(target, draft, steps, topk, num_draft_tokens, prompt, max_new_tokens)
        for prompt in prompts
    ]


def greedy(model, tokens, count):
    """`count` greedy tokens after `tokens`, each from a full forward pass."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


class _Text:
    """A prompt with the target's greedy continuation, and what the draft makes of its prefixes.

    The target's choice at every position does not depend on how it is reached.
    """

    def __init__(self, target, draft, prompt, count):
        self.draft, self.prompt = draft, prompt
        self.tokens = greedy(target, prompt, count)
        hidden = target(torch.tensor([self.tokens]), output_hidden_states=True).hidden_states
        self.features = draft.target_features(hidden)[0]

    def accepted(self, length, steps, topk, num_draft_tokens):
        """Drafts accepted in a round whose root is token `length - 1`."""
        seen = torch.tensor(self.tokens[1:length])
        candidates = _grow(self.draft, seen, self.features[: length - 1], steps, topk)
        candidates.sort(key=lambda entry: -entry[0])
        paths = {tuple(path) for _, path in candidates[: num_draft_tokens - 1]}
        accepted = 0
        while tuple(self.tokens[length : length + accepted + 1]) in paths:
            accepted += 1
        return accepted


def _speculate_one(target, draft, steps, topk, num_draft_tokens, prompt, max_new_tokens):
    text = _Text(target, draft, prompt, max_new_tokens + steps + 1)
    length, histogram = len(prompt) + 1, [0] * (steps + 1)
    while length - len(prompt) < max_new_tokens:
        accepted = text.accepted(length, steps, topk, num_draft_tokens)
        histogram[accepted] += 1
        length += accepted + 1
    return Truth(text.tokens[len(prompt) : len(prompt) + max_new_tokens], histogram)


@torch.no_grad()
def accept_everywhere(models, algorithm, steps, topk, num_draft_tokens, prompts, counts):
    """Per prompt: all tokens, and the drafts accepted by a round from each of `count` lengths.

    Entry i of the second list is for a root at position len(prompt) + i. It holds for whatever came
    before the round, drafted or not.
    """
    target = _load_llama(models / "target")
    draft = DRAFTS[algorithm](models / algorithm.lower(), target)
    answers = []
    for prompt, count in zip(prompts, counts, strict=True):
        text = _Text(target, draft, prompt, count + steps + 1)
        lengths = range(len(prompt) + 1, len(prompt) + count + 1)
        accepted = [text.accepted(n, steps, topk, num_draft_tokens) for n in lengths]
        answers.append((text.tokens, accepted))
    return answers
