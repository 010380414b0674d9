// SPDX-License-Identifier: Apache-2.0
// The draft tree: one 64-bit word per row, the links of a tree, and the greedy walk over them.
//
// Bit c of a row's word: the row may see window column c. Every node sees its ancestors and itself;
// the committed prefix is visible to every row and has no bits. A child's index is larger than its
// parent's, so one ascending pass builds all words.
//
// Lengths: num_correct_drafts excludes the bonus token (0 = nothing accepted);
// accept_lens = num_correct_drafts + 1 includes it and is the number of rows that stay.
#pragma once

#include "common.h"

namespace specfused {

using TreeWord = uint64_t;

SPECFUSED_HD TreeWord node_bit(int column) { return TreeWord{1} << column; }

// Row `column` of a chain sees columns 0..column.
SPECFUSED_HD TreeWord chain_word(int column) { return (TreeWord{2} << column) - 1; }

// A tree of one node, the non-spec step.
constexpr TreeWord kSingleNode = 1;

SPECFUSED_HD bool sees(TreeWord word, int column) { return (word >> column) & 1; }

// Depth of a node = how many ancestors it has (root 0). Portable popcount: host and device.
SPECFUSED_HD int node_depth(TreeWord word) {
  int count = 0;
  for (; word != 0; word &= word - 1) ++count;
  return count - 1;
}

// Words from first-child / next-sibling links (-1 = none) of one request. Nodes that no link
// reaches see only themselves, so no row is empty. Links that do not point forward are ignored.
SPECFUSED_HD void words_from_links(const int64_t* next_token, const int64_t* next_sibling,
                                   int width, TreeWord* words) {
  for (int c = 0; c < width; ++c) words[c] = node_bit(c);
  for (int node = 0; node < width; ++node) {
    const int64_t child = next_token[node];
    if (child > node && child < width) words[child] = words[node] | node_bit(int(child));
    const int64_t sibling = next_sibling[node];
    if (sibling > node && sibling < width) {
      words[sibling] = (words[node] & ~node_bit(node)) | node_bit(int(sibling));
    }
  }
}

// One row of a boolean mask; column c of the window is mask[c]. Columns from `width` on: unseen.
SPECFUSED_HD TreeWord word_from_mask(const uint8_t* mask, int width) {
  TreeWord word = 0;
  for (int c = 0; c < width; ++c) word |= mask[c] != 0 ? node_bit(c) : 0;
  return word;
}

// Flat offset of the first window cell of row `row` in a QLEN_ONLY mask: [bs, W, W].
SPECFUSED_HD int64_t qlen_only_offset(int64_t request, int64_t row, int64_t width) {
  return (request * width + row) * width;
}

// The same in a FULL_MASK: request r has W rows of C_r + W cells; committed_before = sum of C_j
// over the requests before it. 256 requests x 64 rows x 131072 cells exceed 32 bits.
SPECFUSED_HD int64_t full_mask_offset(int64_t committed_before, int64_t committed, int64_t request,
                                      int64_t row, int64_t width) {
  return width * (committed_before + width * request) + row * (committed + width) + committed;
}

// From the root, goes on to the first child that accept(node, child) takes, until none is. Writes
// the accepted nodes, root first, to path[0..max_path) and returns num_correct_drafts. Links that
// do not point forward end the walk, so it terminates on any input.
// next_token == nullptr: the tree is a chain.
template <class Accept>
SPECFUSED_HD int walk_tree(const int64_t* next_token, const int64_t* next_sibling, int width,
                           int max_path, int32_t* path, Accept&& accept) {
  int node = 0;
  int count = 0;
  path[0] = 0;
  while (count + 1 < max_path) {
    int64_t child = next_token == nullptr ? node + 1 : next_token[node];
    int64_t floor = node;
    while (child > floor && child < width && !accept(node, static_cast<int>(child))) {
      floor = child;
      child = next_token == nullptr ? -1 : next_sibling[child];
    }
    if (child <= floor || child >= width) break;
    node = static_cast<int>(child);
    path[++count] = node;
  }
  return count;
}

// Greedy acceptance (EAGLE, arXiv 2401.15077): the child whose token is the target's choice at the
// current node. Of equal siblings the first counts. target(node) is asked for visited nodes only.
template <class Target>
struct GreedyAccept {
  const int64_t* draft_tokens;
  Target target;

  SPECFUSED_HD bool operator()(int node, int child) const {
    return draft_tokens[child] == target(node);
  }
};

}  // namespace specfused
