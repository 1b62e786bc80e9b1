// What varies from step to step. Everything else a kernel needs is a define or a launch argument that never
// changes, so one captured graph serves every step of its bucket.
//
// The host writes one `Step`, `Chunk` or `Commit` into device memory before the launches that read it.
// crates/cuda/src/step.rs mirrors these layouts and tests their sizes.
#pragma once

// Rows of one step, and trees among them.
#define STEP_ROWS 64
#define STEP_TREES 4

// One tree: the sequence in `slot` has `committed` tokens, and its nodes are rows `first .. first + nodes`.
// Keys and values of node i are written at cache position `committed + i`; its rotary position is
// `committed + depth`, already computed in `position`.
struct Tree {
    int slot;
    int committed;
    int first;
    int nodes;
};

// A step of the small path: the nodes of 1 to 4 trees, padded to the bucket of the plan.
struct Step {
    int rows;    // true rows; rows .. bucket are padding: nothing may be written for them
    int trees;
    int n_logits_rows;   // entries of logits_row
    int _pad;
    Tree tree[STEP_TREES];
    int token[STEP_ROWS];
    int position[STEP_ROWS];   // committed + depth
    int tree_of[STEP_ROWS];    // index into tree; -1 for padding
    int parent[STEP_ROWS];     // row index; -1 for a root and for padding
    int depth[STEP_ROWS];      // 0 for a root
    unsigned long long ancestors[STEP_ROWS];  // bit j: row tree.first + j is an ancestor or the row itself
    int logits_row[STEP_ROWS];  // rows the head computes, in order
    // Read only by kernels for windows that differ from tree to tree.
    int window[STEP_TREES];    // committed keys at k are seen from q while q - k < window; 2^30 for all
    int sinks[STEP_TREES];     // committed keys before this position are seen whatever the window
    int feature_row[STEP_TREES];  // where taps leave the row of a tree's root for a draft; its other nodes follow
    // Read only by delta/walk and, taps, delta/tree_sm90; numbers of nodes are those of their tree, whose part begins at the entry
    // of its first row.
    unsigned int conv_sources[STEP_ROWS];    // a byte each, oldest first: a node, or below 0 a row of the window, -1 the newest
    unsigned int dfs_schedule[STEP_ROWS];  // in their order
};

// A visit of a node: what is done there, the node that is visited next, and where states wait, one more than their place, 0
// for nowhere: the state behind this node, which it brings past itself then, and the one that the next visit goes on from,
// which a node has that folds nothing, as the last one does.
#define DFS_NODE_MASK 63
#define DFS_NEXT_SHIFT 6
#define DFS_UPDATES_STATE 0x2000u  // brings the state past it
#define DFS_IS_LAST 0x4000u
#define DFS_SPILL_SHIFT 16
#define DFS_RELOAD_SHIFT 20
#define DFS_SPILL_OR_RELOAD 0xff0000u
#define DFS_ZERO_SHIFT 24  // zeros

// A chunk of a prompt: `rows` consecutive positions of one sequence, the first at `committed`.
// Its keys, values, states and window are committed by the chunk itself.
struct Chunk {
    int rows;
    int slot;
    int committed;
    int n_logits_rows;                 // entries of logits_row
    int logits_row[STEP_ROWS];  // rows the head computes, in order; more are asked in further head passes
    int token[1];              // [rows]
};

// A path of the tree last verified in `slot`: entry i is a node index of that tree, node[0] = 0.
// Keys and values move from `committed + node[i]` to `committed + i`; states go past the nodes in order.
struct Path {
    int slot;
    int committed;
    int length;
    int _pad;
    int node[STEP_ROWS];
};

// What is kept; or, read by what makes a draft's context, the features that wait for it: a path is then of rows of the
// slot's features, of which the first belongs to position `committed`.
struct Commit {
    int paths;
    int _pad[3];
    Path path[STEP_TREES];
};
