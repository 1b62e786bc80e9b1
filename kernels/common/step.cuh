// Data that varies from step to step. Everything else a kernel needs is a define or a constant launch argument, so one
// captured graph serves every step of its bucket.
//
// The host writes one `Step`, `PrefillChunk` or `Commit` into device memory before the launches that read it.
// crates/cuda/src/step.rs mirrors these layouts and tests their sizes.
#pragma once

// Maximum rows and trees of a step.
#define STEP_ROWS 64
#define STEP_TREES 8

// One tree: the sequence in `slot` has `committed` tokens, and its nodes are rows `first .. first + nodes`. Keys and
// values of node i are written at cache position `committed + i`; its rotary position is `committed + depth`, as in
// `position`.
struct Tree {
    int slot;
    int committed;
    int first;
    int nodes;
};

// A decode step: the nodes of 1 to STEP_TREES trees, padded to the bucket of the plan.
struct Step {
    int rows;  // true rows; rows .. bucket are padding: nothing may be written for them
    int trees;
    int n_logits_rows;  // entries of logits_row
    int candidates;     // of blocks of a draft whose candidates depend on the token before: how many of a list
    Tree tree[STEP_TREES];
    int token[STEP_ROWS];
    int position[STEP_ROWS];                  // committed + depth
    int tree_of[STEP_ROWS];                   // index into tree; -1 for padding
    int parent[STEP_ROWS];                    // row index; -1 for a root and for padding
    int depth[STEP_ROWS];                     // 0 for a root
    unsigned long long ancestors[STEP_ROWS];  // bit j: row tree.first + j is an ancestor or the row itself
    int logits_row[STEP_ROWS];                // rows whose logits are computed, in order
    // Attention windows, if they differ between trees.
    int window[STEP_TREES];       // query q sees committed key k if q - k < window; 2^30 for no window
    int sinks[STEP_TREES];        // committed keys before this position are seen whatever the window
    int feature_row[STEP_TREES];  // where the captured hidden states of a tree's root go; its other nodes follow
    // For gated_delta/decode_recurrent and, conv_sources, decode_wy_tree_sm90. Node numbers are relative to their tree,
    // whose part begins at the entry of its first row.
    // a byte per convolution tap, oldest first: a node, or < 0 a row of the conv window, -1 the newest
    unsigned int conv_sources[STEP_ROWS];
    unsigned int dfs_schedule[STEP_ROWS];  // in visiting order
};

// Rows of the multi-token-prediction head: rows that it drafts, each tree those of one sequence; or the rows of
// committed paths, each tree a path.
struct MtpStep {
    Step step;
    // Rows that each tree's sequence drafted before. They come before its nodes in the cache and in `ancestors`, whose
    // bit j is the sequence's drafted row j.
    int earlier[STEP_TREES];
    // Committed paths: the node of the verified tree that each path ends with.
    int last[STEP_TREES];
    // Row of the pool (mtp/hidden_rows.cuh) with the hidden row before each row.
    int before[STEP_ROWS];
};

// A visit of the DFS schedule: the node, the next node, and where states are spilled and reloaded (slot + 1, 0 for
// none). Spill: the state after this node, which the visit updates. Reload: the state that the next visit starts from,
// for a node that updates nothing, such as the last.
#define DFS_NODE_MASK 63
#define DFS_NEXT_SHIFT 6
#define DFS_UPDATES_STATE 0x2000u  // updates the state with this node
#define DFS_IS_LAST 0x4000u
#define DFS_SPILL_SHIFT 16
#define DFS_RELOAD_SHIFT 20
#define DFS_SPILL_OR_RELOAD 0xff0000u
#define DFS_ZERO_SHIFT 24  // bits from here on are zero

// A chunk of a prompt: `rows` consecutive positions of one sequence, the first at `committed`. The chunk commits its
// keys, values, states and conv window itself.
struct PrefillChunk {
    int rows;
    int slot;
    int committed;
    int n_logits_rows;          // entries of logits_row
    int logits_row[STEP_ROWS];  // rows whose logits are computed, in order; more need further LM head passes
    int token[1];               // [rows]
};

// An accepted path of the tree last verified in `slot`: entry i is a node index of that tree, node[0] = 0. Keys and
// values move from `committed + node[i]` to `committed + i`; states are updated with the nodes in order.
struct Path {
    int slot;
    int committed;
    int length;
    int _pad;
    int node[STEP_ROWS];
};

// Accepted paths. For the draft's context: paths of rows of the slot's pending features, the first of which belongs to
// position `committed`.
struct Commit {
    int paths;
    int _pad[3];
    Path path[STEP_TREES];
};
