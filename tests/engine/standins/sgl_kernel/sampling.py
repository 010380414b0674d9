# SPDX-License-Identifier: Apache-2.0
"""The sampled walk through a draft tree and the two probability filters before it."""

import torch


def _renormalized(probs, keep):
    probs = torch.where(keep, probs, torch.zeros_like(probs))
    return probs / probs.sum(-1, keepdim=True)


def top_k_renorm_prob(probs, top_k):
    """Keep each row's top_k largest probabilities; returns new rows that sum to one."""
    ranked = probs.sort(-1, descending=True).values
    index = (top_k.long().clamp(1, probs.shape[-1]) - 1).view(-1, 1)
    return _renormalized(probs, probs >= ranked.gather(-1, index))


def top_p_renorm_prob(probs, top_p):
    """Keep each row's smallest set of largest probabilities that reaches top_p."""
    ranked, order = probs.sort(-1, descending=True)
    before = ranked.cumsum(-1) - ranked
    keep = torch.zeros_like(probs, dtype=torch.bool)
    keep.scatter_(-1, order, before < top_p.view(-1, 1))
    return _renormalized(probs, keep)


def _draw(weights, coin):
    """Index of the cumulative weight that passes coin times the total."""
    edges = weights.cumsum(-1)
    index = torch.searchsorted(edges, (coin * edges[-1]).reshape(1), right=True)
    return min(int(index), int(weights.nonzero()[-1]))


def tree_speculative_sampling_target_only(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    uniform_samples,
    uniform_samples_for_final_sampling,
    target_probs,
    draft_probs,
    threshold_single=1.0,
    threshold_acc=1.0,
    deterministic=True,
):
    """Walk down while a coin falls into the target's mass of the siblings tried so far.

    The token after the path is drawn from the target's distribution at the last node, without
    the siblings that were refused there.
    """
    for b in range(candidates.shape[0]):
        node, path = 0, [int(retrive_index[b, 0])]
        left = target_probs[b, 0].clone()
        while len(path) < accept_index.shape[1]:
            coin, tried = float(uniform_samples[b, node]), 0.0
            child = int(retrive_next_token[b, node])
            while child != -1:
                token = int(candidates[b, child])
                mass = float(target_probs[b, node, token])
                tried += mass
                if coin <= tried / threshold_acc or mass >= threshold_single:
                    break
                left[token] = 0
                child = int(retrive_next_sibling[b, child])
            if child == -1:
                break
            predicts[path[-1]] = candidates[b, child].to(predicts.dtype)
            node = child
            path.append(int(retrive_index[b, node]))
            left = target_probs[b, node].clone()
        predicts[path[-1]] = _draw(left, uniform_samples_for_final_sampling[b])
        accept_index[b, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[b] = len(path) - 1
