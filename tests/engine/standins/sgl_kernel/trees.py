# SPDX-License-Identifier: Apache-2.0
"""Draft trees: links and masks from the drafted candidates, and the greedy walk."""

import torch

FULL_MASK, QLEN_ONLY = 0, 1


def _parents(selected, parent_list, topk):
    """Parent node of every node; -1 for the root and for a node whose parent was not selected.

    A node is a selected candidate id. Candidates come in groups of topk siblings; group 0 hangs
    off the root, parent_list[g] is the candidate id that group g was expanded from.
    """
    node_of = {candidate: node for node, candidate in enumerate(selected, start=1)}
    parents = [-1]
    for candidate in selected:
        group = candidate // topk
        parents.append(0 if group == 0 else node_of.get(parent_list[group], -1))
    return parents


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
):
    """Fill mask, positions and links (pre-set to -1) of one tree per request.

    Node 0 is the last committed token, node i candidate selected_index[:, i - 1]. The first child
    is the lowest one, siblings rise. The mask is flat: QLEN_ONLY [bs, q, q]; FULL_MASK per
    request [q, len + q], whose prefix columns the caller has set.
    """
    mode, q = int(tree_mask_mode), draft_token_num
    if mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError("build_tree_kernel_efficient_cpu: bit-packed masks")
    bs = verified_seq_len.numel()
    retrive_index.copy_(torch.arange(bs * q).view(bs, q))
    positions = positions.view(bs, q)
    at = 0
    for b, length in enumerate(verified_seq_len.tolist()):
        parents = _parents(selected_index[b].tolist(), parent_list[b].tolist(), topk)
        sees = torch.eye(q, dtype=tree_mask.dtype)
        sees[:, 0] = 1
        last_child = {}
        for node in range(1, q):
            parent = parents[node]
            if parent < 0:
                continue
            sees[node] |= sees[parent]
            if parent in last_child:
                retrive_next_sibling[b, last_child[parent]] = node
            else:
                retrive_next_token[b, parent] = node
            last_child[parent] = node
        positions[b] = length + sees.sum(1) - 1
        prefix = length if mode == FULL_MASK else 0
        size = q * (prefix + q)
        tree_mask[at : at + size].view(q, prefix + q)[:, prefix:] = sees
        at += size


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Follow the child that holds the target's token until there is none.

    accept_index [bs, steps + 1] (pre-set to -1) gets the path, predicts the target's token at
    each node of it, accept_token_num the number of drafts on it (the root is none).
    """
    wanted = target_predict.reshape(-1).tolist()
    tokens, ids = candidates.tolist(), retrive_index.tolist()
    child_of, sibling_of = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for b in range(len(ids)):
        node, path = 0, [ids[b][0]]
        while len(path) < accept_index.shape[1]:
            child = child_of[b][node]
            while child != -1 and tokens[b][child] != wanted[path[-1]]:
                child = sibling_of[b][child]
            if child == -1:
                break
            node = child
            path.append(ids[b][node])
        for i, flat in enumerate(path):
            accept_index[b, i] = flat
            predicts[flat] = wanted[flat]
        accept_token_num[b] = len(path) - 1
