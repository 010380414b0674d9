# SPDX-License-Identifier: Apache-2.0
"""Drafting and verification as SGLang's EAGLE worker does them, without SGLang.

One round, for a sequence of n tokens whose last one (the bonus token) the target has not read yet:
the head reads rows 0 .. n-2 (row p: target states of p, token p + 1, position p); its last row
proposes the first tokens. Then ``steps - 1`` times ``topk`` branches are forwarded at position
n - 1 + i with the head's own hidden states. A branch attends to its own *slot* of earlier steps, as
in SGLang, even when the beam that now sits there came from another slot. The best
``draft_tokens - 1`` candidates by product of probabilities and the bonus token form the tree; the
target reads it in one pass under the tree mask, and the longest path that agrees with the target's
own choices is accepted, plus one more token.

Everything is recomputed from the tokens each round: no cache, so nothing can be stale.
"""

import torch


def pad(seqs, device):
    """Right-padded ids [B, L] and lengths [B]."""
    lens = torch.tensor([len(s) for s in seqs], device=device)
    ids = torch.zeros(len(seqs), int(lens.max()), dtype=torch.long)
    for i, s in enumerate(seqs):
        ids[i, : len(s)] = torch.as_tensor(s)
    return ids.to(device), lens


@torch.no_grad()
def draft(target, head, ids, lens, steps, topk, draft_tokens):
    """Returns tokens [B, N-1], parent node [B, N-1] (0 = the bonus token) and depth [B, N-1]."""
    size, device, k = ids.shape[0], ids.device, topk
    _, aux, last = target(ids)
    rows = torch.arange(size, device=device)
    hidden = head.start(aux, last)[:, :-1]
    pos = torch.arange(ids.shape[1] - 1, device=device)
    logits, out, past = head(target, hidden, ids[:, 1:], pos)
    p, tokens = logits[rows, lens - 2].softmax(-1).topk(k)  # [B, k]
    hidden = out[rows, lens - 2].unsqueeze(1).expand(-1, k, -1)
    prefix = (pos < (lens - 1).unsqueeze(1)).view(size, 1, 1, -1).expand(-1, 1, k, -1)
    own = torch.eye(k, dtype=torch.bool, device=device).expand(size, 1, k, k)
    # Candidates so far: score, token, parent candidate (-1: the bonus token), depth.
    scores, names, depths = [p], [tokens], [torch.ones_like(tokens)]
    parents, beam = [torch.full_like(tokens, -1)], torch.arange(k, device=device).expand(size, k)
    cumulative, inputs = p, tokens
    for i in range(steps - 1):
        mask = torch.cat((prefix, own.repeat(1, 1, 1, i + 1)), -1)
        at = (lens - 1 + i).unsqueeze(1).expand(-1, k)
        logits, out, past = head(target, hidden, inputs, at, mask, past)
        p, tokens = logits.softmax(-1).topk(k)  # [B, k, k]
        expand = (cumulative.unsqueeze(2) * p).flatten(1)
        scores.append(expand)
        names.append(tokens.flatten(1))
        parents.append(beam.repeat_interleave(k, 1))
        depths.append(torch.full_like(names[-1], i + 2))
        cumulative, best = expand.topk(k)
        inputs = names[-1].gather(1, best)
        hidden = out.gather(1, (best // k).unsqueeze(-1).expand(-1, -1, out.shape[-1]))
        beam = best + k + k * k * i
    scores, names, parents, depths = (torch.cat(x, 1) for x in (scores, names, parents, depths))
    chosen = scores.topk(draft_tokens - 1).indices.sort().values
    parent = parents.gather(1, chosen)
    match = parent.unsqueeze(2) == chosen.unsqueeze(1)  # [B, node, its parent]
    node = match.long().argmax(2) + 1
    node = torch.where(match.any(2), node, torch.zeros_like(node))
    return names.gather(1, chosen), node, depths.gather(1, chosen)


@torch.no_grad()
def verify(target, ids, lens, tokens, parent, depth):
    """The target's logits at the bonus token and at every node: [B, N, V]."""
    size, length, device, n = *ids.shape, ids.device, tokens.shape[1]
    at = torch.arange(length, device=device)
    pos = torch.cat((at.expand(size, -1), (lens - 1).unsqueeze(1) + depth), 1)
    node = torch.zeros(size, n, n, dtype=torch.bool, device=device)
    up = torch.arange(1, n + 1, device=device).expand(size, n)
    for _ in range(int(depth.max())):  # mark the node itself, then its ancestors
        node |= (up.unsqueeze(2) - 1) == torch.arange(n, device=device)
        above = parent.gather(1, (up - 1).clamp(min=0))
        up = torch.where(up > 0, above, up)
    mask = torch.zeros(size, 1, length + n, length + n, dtype=torch.bool, device=device)
    mask[:, 0, :length, :length] = at.unsqueeze(1) >= at
    mask[:, 0, length:, :length] = (at < lens.unsqueeze(1)).unsqueeze(1)
    mask[:, 0, length:, length:] = node
    logits, _, _ = target(torch.cat((ids, tokens), 1), pos, mask)
    rows = torch.arange(size, device=device)
    return torch.cat((logits[rows, lens - 1].unsqueeze(1), logits[:, length:]), 1)


def pick(logits, temperature, generator):
    """The target's choice at every node, argmax or a sample; the child it names is accepted."""
    if temperature == 0:
        return logits.argmax(-1)
    p = (logits.float() / temperature).softmax(-1)
    return torch.multinomial(p.flatten(0, 1), 1, generator=generator).view(p.shape[:2])


def walk(choice, tokens, parent):
    """Accepted tokens of each sequence, the target's own last one included: list of lists."""
    out = []
    rows = zip(choice.tolist(), tokens.tolist(), parent.tolist(), strict=True)
    for want, token, up in rows:
        node, path = 0, []
        while True:
            path.append(want[node])
            here = [j + 1 for j, u in enumerate(up) if u == node and token[j] == want[node]]
            if not here:
                break
            node = here[0]
        out.append(path)
    return out


def one_round(target, head, seqs, shape, temperature=0, generator=None):
    """One round of ``shape`` = (steps, topk, draft_tokens) for every sequence."""
    ids, lens = pad(seqs, next(target.parameters()).device)
    tokens, parent, depth = draft(target, head, ids, lens, *shape)
    logits = verify(target, ids, lens, tokens, parent, depth)
    return walk(pick(logits, temperature, generator), tokens, parent)


def generate(target, head, prompts, shape, count, temperature=0, seed=0):
    """Returns the ``count`` new tokens of each prompt and its histogram of accepted drafts.

    The first token comes from the target alone, as from SGLang's prefill. The histogram counts the
    drafts of whole rounds, without the bonus token.
    """
    device = next(target.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    ids, lens = pad(prompts, device)
    with torch.no_grad():
        logits = target(ids)[0][torch.arange(len(prompts), device=device), lens - 1]
    first = pick(logits.unsqueeze(1), temperature, generator)
    seqs = [list(p) + f for p, f in zip(prompts, first.tolist(), strict=True)]
    histogram = [[0] * (shape[0] + 1) for _ in prompts]
    while True:
        open_ = [i for i, s in enumerate(seqs) if len(s) - len(prompts[i]) < count]
        if not open_:
            break
        paths = one_round(target, head, [seqs[i] for i in open_], shape, temperature, generator)
        for i, path in zip(open_, paths, strict=True):
            histogram[i][len(path) - 1] += 1
            seqs[i] += path
    return [s[len(p) :][:count] for s, p in zip(seqs, prompts, strict=True)], histogram


def accept_length(histogram):
    """Mean tokens a round, the bonus token included, over one or several histograms."""
    rounds = sum(sum(h) for h in histogram)
    return sum((i + 1) * c for h in histogram for i, c in enumerate(h)) / rounds


def distinct(seqs, n=4):
    """Share of distinct n-grams within a sequence, averaged over sequences."""
    grams = [[tuple(s[i : i + n]) for i in range(len(s) - n + 1)] for s in seqs]
    return sum(len(set(g)) / len(g) for g in grams) / len(grams)
