// Writes the llama.cpp runtime's logits of a token sequence from one decode call.
//
//   llama_logits MODEL.gguf IDS.i32 OUT.f32
//
// IDS is raw little-endian i32; OUT becomes raw f32 [n, vocab]. Flash attention off.
#include <stdio.h>
#include <stdlib.h>

#include "llama.h"

static void quiet(enum ggml_log_level level, const char * text, void * user) {
    (void) user;
    if (level >= GGML_LOG_LEVEL_ERROR && level != GGML_LOG_LEVEL_CONT) {
        fputs(text, stderr);
    }
}

int main(int argc, char ** argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: llama_logits MODEL.gguf IDS.i32 OUT.f32\n");
        return 2;
    }
    llama_log_set(quiet, NULL);
    llama_backend_init();
    FILE * in = fopen(argv[2], "rb");
    static llama_token ids[8192];
    int n = in ? (int) fread(ids, sizeof *ids, 8192, in) : 0;
    if (n == 0) {
        fprintf(stderr, "no tokens in %s\n", argv[2]);
        return 1;
    }
    fclose(in);
    struct llama_model_params mp = llama_model_default_params();
    mp.n_gpu_layers = 0;
    struct llama_model * model = llama_model_load_from_file(argv[1], mp);
    if (!model) {
        fprintf(stderr, "cannot load %s\n", argv[1]);
        return 1;
    }
    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = cp.n_batch = cp.n_ubatch = (uint32_t) n;
    cp.n_threads = cp.n_threads_batch = 2;
    cp.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    cp.type_k = cp.type_v = GGML_TYPE_F32;
    struct llama_context * ctx = llama_init_from_model(model, cp);
    if (!ctx) {
        fprintf(stderr, "cannot make a context\n");
        return 1;
    }
    struct llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens = n;
    for (int i = 0; i < n; i++) {
        batch.token[i] = ids[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    if (llama_decode(ctx, batch) != 0) {
        fprintf(stderr, "llama_decode refused the batch\n");
        return 1;
    }
    size_t n_vocab = (size_t) llama_vocab_n_tokens(llama_model_get_vocab(model));
    FILE * out = fopen(argv[3], "wb");
    for (int i = 0; out && i < n; i++) {
        if (fwrite(llama_get_logits_ith(ctx, i), sizeof(float), n_vocab, out) != n_vocab) {
            return 1;
        }
    }
    int closed = out ? fclose(out) : 1;
    llama_batch_free(batch);
    llama_free(ctx);
    llama_model_free(model);
    return closed != 0;
}
