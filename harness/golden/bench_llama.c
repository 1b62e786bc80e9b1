// Speed of the llama.cpp runtime on one GGUF, calling only llama_decode.
//
//   bench_llama MODEL.gguf THREADS FLASH(0|1) REPETITIONS [PROMPT GENERATE]
//
// One warm-up of each kind comes first. Each repetition then runs a prompt of PROMPT tokens (512) in a single
// call, and GENERATE single-token calls (128) from an empty cache. Prints one JSON line of tokens per second.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "llama.h"

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

static void quiet(enum ggml_log_level level, const char * text, void * user) {
    (void) user;
    if (level >= GGML_LOG_LEVEL_ERROR && level != GGML_LOG_LEVEL_CONT) {
        fputs(text, stderr);
    }
}

static void decode(struct llama_context * ctx, llama_token * tokens, int n) {
    if (llama_decode(ctx, llama_batch_get_one(tokens, n)) != 0) {
        fprintf(stderr, "llama_decode refused %d tokens\n", n);
        exit(1);
    }
    llama_synchronize(ctx);
}

static void clear_cache(struct llama_context * ctx) {
    llama_memory_clear(llama_get_memory(ctx), true);
}

// Tokens per second of one prompt given in a single call.
static double prompt(struct llama_context * ctx, llama_token * tokens, int n) {
    clear_cache(ctx);
    double start = seconds();
    decode(ctx, tokens, n);
    return n / (seconds() - start);
}

// Tokens per second of n single-token calls.
static double generate(struct llama_context * ctx, llama_token * tokens, int n) {
    clear_cache(ctx);
    double start = seconds();
    for (int i = 0; i < n; i++) {
        decode(ctx, tokens + i, 1);
    }
    return n / (seconds() - start);
}

static int ascending(const void * a, const void * b) {
    double x = *(const double *) a, y = *(const double *) b;
    return (x > y) - (x < y);
}

static void report(const char * name, double * rate, int n) {
    printf(", \"%s\": [", name);
    for (int i = 0; i < n; i++) {
        printf("%s%.3f", i ? ", " : "", rate[i]);
    }
    qsort(rate, (size_t) n, sizeof *rate, ascending);
    double median = n % 2 ? rate[n / 2] : 0.5 * (rate[n / 2 - 1] + rate[n / 2]);
    printf("], \"%s_median\": %.3f", name, median);
}

int main(int argc, char ** argv) {
    if (argc != 5 && argc != 7) {
        fprintf(stderr, "usage: bench_llama MODEL.gguf THREADS FLASH(0|1) REPETITIONS [PROMPT GENERATE]\n");
        return 2;
    }
    int threads = atoi(argv[2]), flash = atoi(argv[3]), reps = atoi(argv[4]);
    int n_prompt = argc == 7 ? atoi(argv[5]) : 512, n_generate = argc == 7 ? atoi(argv[6]) : 128;
    if (threads < 1 || reps < 1 || n_prompt < 1 || n_generate < 1) {
        fprintf(stderr, "counts must be positive\n");
        return 2;
    }
    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model_params mp = llama_model_default_params();
    mp.n_gpu_layers = 0;
    struct llama_model * model = llama_model_load_from_file(argv[1], mp);
    if (!model) {
        fprintf(stderr, "cannot load %s\n", argv[1]);
        return 1;
    }
    struct llama_context_params cp = llama_context_default_params();
    cp.n_ctx = (uint32_t) (n_prompt > n_generate ? n_prompt : n_generate);
    cp.n_batch = cp.n_ctx;
    // n_ubatch keeps its default of 512: one graph for the standard prompt.
    cp.n_threads = cp.n_threads_batch = threads;
    cp.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    cp.no_perf = true;
    struct llama_context * ctx = llama_init_from_model(model, cp);
    if (!ctx) {
        fprintf(stderr, "cannot make a context\n");
        return 1;
    }
    int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_token * tokens = malloc(sizeof *tokens * cp.n_ctx);
    double * pp = malloc(sizeof *pp * (size_t) reps), * tg = malloc(sizeof *tg * (size_t) reps);
    srand(7);
    for (uint32_t i = 0; i < cp.n_ctx; i++) {
        tokens[i] = rand() % n_vocab;
    }
    prompt(ctx, tokens, n_prompt);
    generate(ctx, tokens, n_generate < 8 ? n_generate : 8);
    for (int i = 0; i < reps; i++) {
        pp[i] = prompt(ctx, tokens, n_prompt);
        tg[i] = generate(ctx, tokens, n_generate);
    }
    const char * slash = strrchr(argv[1], '/');
    printf("{\"engine\": \"llama.cpp\", \"model\": \"%s\", \"threads\": %d, \"flash_attention\": %s, "
           "\"prompt\": %d, \"generate\": %d",
           slash ? slash + 1 : argv[1], threads, flash ? "true" : "false", n_prompt, n_generate);
    report("pp", pp, reps);
    report("tg", tg, reps);
    printf("}\n");
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
