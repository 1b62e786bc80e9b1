// Quantises a GGUF with llama.cpp's own recipe.
//
//   llama_quantize IN.gguf OUT.gguf FTYPE [NAME_PATTERN=TYPE_ID ...]
//
// FTYPE is a llama_ftype number (7 is Q8_0, 15 is Q4_K_M). Each override sets the ggml type of every
// tensor whose name matches the pattern.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llama.h"

int main(int argc, char ** argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: llama_quantize IN.gguf OUT.gguf FTYPE [NAME_PATTERN=TYPE_ID ...]\n");
        return 2;
    }
    llama_backend_init();
    struct llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype = (enum llama_ftype) atoi(argv[3]);
    params.nthread = 2;
    int n = argc - 4;
    struct llama_model_tensor_override * overrides = calloc((size_t) n + 1, sizeof *overrides);
    for (int i = 0; i < n; i++) {
        char * equals = strrchr(argv[4 + i], '=');
        if (!equals) {
            fprintf(stderr, "%s is not NAME_PATTERN=TYPE_ID\n", argv[4 + i]);
            return 2;
        }
        *equals = 0;
        overrides[i].pattern = argv[4 + i];
        overrides[i].type = (enum ggml_type) atoi(equals + 1);
    }
    if (n > 0) {
        params.tt_overrides = overrides;
    }
    uint32_t failed = llama_model_quantize(argv[1], argv[2], &params);
    free(overrides);
    return failed != 0;
}
