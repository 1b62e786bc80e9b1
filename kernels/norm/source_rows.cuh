// The rows a kernel works on; SOURCE selects the header type and the rows.
//
//   0  Step          all rows
//   1  PrefillChunk  all rows
//   2  Step          rows with logits requests: row i is made from row logits_row[i]
//   3  PrefillChunk  likewise
#pragma once
#include "common/prelude.cuh"
#include "common/step.cuh"

#if SOURCE == 0 || SOURCE == 2
typedef Step Header;
#else
typedef PrefillChunk Header;
#endif

__device__ __forceinline__ int n_source_rows(const Header* header) {
    return SOURCE < 2 ? header->rows : header->n_logits_rows;
}

// The input row of result row `i`.
__device__ __forceinline__ int source_row(const Header* header, int i) {
    return SOURCE < 2 ? i : header->logits_row[i];
}
