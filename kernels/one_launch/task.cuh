// Tasks of the one launch: what a block does, in order. The host writes them (crates/cuda/src/launch).
//
// A task begins with what any of its inputs needs (norms, states, committed keys), then waits for its inputs. In a step
// of one row, rows that one task writes and another reads are exchanged in band (ABSENT): they show by themselves that
// they are there. Keys, values, queries and partial results of attention, and all inputs in a step of several rows, are
// waited for by counters instead: a task waits until counter
// `wait` is at least `wait_value`, and adds 1 to counter `raise` when its results are stored. Counters are 0 before a
// launch and after it.
#pragma once
#include "common/prelude.cuh"

#define TASK_END 0
#define TASK_GEMV 1       // tiles of packed matrices, or of gate and up
#define TASK_GEMV_F32 2   // `count` rows of an f32 matrix from row `first` on, at most 8
#define TASK_DELTA 3      // value head `first` of the gated delta rule; several rows: block `first` of the tree's
#define TASK_APPEND 4     // heads 4 `first` .. + 12: norm, RoPE, append to the KV cache
#define TASK_ATTENTION 5  // the block's share of decode attention; `first` is the block
#define TASK_COMBINE 6    // values 256 `first` .. + 256 of the combined KV splits
// Of several rows only; `count` is the row here and in TASK_APPEND and TASK_COMBINE.
#define TASK_GATED_NORM 7  // values 1024 `first` .. + 256 for each consumer warp

#define FLAG_NORM 1         // the input is an f32 row to be normed
#define FLAG_SWIGLU 2       // two matrices, gate and up
#define FLAG_KEEP_INPUT 4   // the input of the block's task before
#define FLAG_LOGITS_ROWS 8  // the input is made of the rows whose logits are asked for
#define FLAG_F32_INPUT 16   // the input is normed in f32 too

#define MAX_CONSUMER_WARPS 16
#define COUNTER_STRIDE 32  // words between counters

// A word of an exchanged row that is not there yet: a NaN that no operation gives, as one f32 or two f16.
#define ABSENT 0xffffffffu

struct Task {
    int kind, first, count;
    int wait, wait_value, raise;  // counters, -1 for none
    u32 flags;      // from bit 8 on warps in whose rings it works, from bit 16 on the number of the launch
    u32 exchanged;  // bit i: words[i] is an offset in the exchanged rows of this launch
    // TASK_GEMV and TASK_GEMV_F32: GemvOperands, F32Operands; else the arguments of the separate kernel, 8 bytes each
    u64 words[28];
};
static_assert(sizeof(Task) == 256, "one_launch::Task has this size");

// A part of a tile of 16 rows: a range of K, which one warp sums. As its ring needs it.
#define LOAD_END 0
#define LOAD_UNITS 1
#define LOAD_WORKSPACE 2  // a task works in the ring: nothing is loaded until it is done
struct LoadPart {
    const u8* weights;  // its first unit
    u32 unit_stride, second_slice;
    u16 units, first_bytes, second_bytes, what;
    u64 _pad;
};
// As the products need it.
struct SumPart {
    u16 units, first_unit;
    u16 sum;  // which of the task's sums
    u16 kind;
};
// A tile of a task, or of gate and up: the sums of its parts and its rows. A residual is an address of the plan, or
// with RESIDUAL_EXCHANGED an offset in the exchanged rows. Of several rows: `copy` is where its first row goes, `out`
// the values from a row of the output to the next, and a residual says that it is added to what is there.
#define RESIDUAL_EXCHANGED (1ull << 63)
struct TaskTile {
    const float* factors[2];  // of its rows, of each matrix
    u64 residual;             // 0 for none
    u8* copy;                 // its first row again for later launches, or null; SWIGLU: a16_layout.cuh
    u32 out;                  // offset of its first row in the exchanged rows: f32, SWIGLU: f16
    u16 first_sum;
    u8 n_first, n_sums;  // sums of the first matrix, and of both
    u32 rows;            // 16 at most
    u32 _pad;
};
static_assert(sizeof(LoadPart) == 32 && sizeof(SumPart) == 8 && sizeof(TaskTile) == 48,
              "one_launch::task has these sizes");

// Lists of a block: its tasks and the parts of its warps, as indices of the first.
struct BlockLists {
    u32 tasks;
    u32 loads[MAX_CONSUMER_WARPS], sums[MAX_CONSUMER_WARPS];
    u32 _pad[64 - 1 - 2 * MAX_CONSUMER_WARPS];
};
