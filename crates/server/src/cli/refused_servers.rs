//! Flags of llama-server and vLLM that this server lacks. Each is refused with the flag to use, or
//! taken silently where it asks for what is always so.

use super::refusal::{ANY, OFF, Refused, one, switch};

/// Values of a switch that is on.
const ON: [&str; 7] = ["true", "1", "yes", "on", "auto", "enabled", "always"];

const ONE_DEVICE: &str =
    "one device holds the whole model; remove it, and choose the device with --device cuda:N";
const WHOLE_MODEL: &str =
    "the device holds the whole model; remove it, or use --device cpu to run without a GPU";
const NO_IMAGES: &str = "images are not supported; remove it";
const NO_ADAPTERS: &str = "adapters are not supported; remove it, and merge them into the file";
const NO_EXPERTS: &str = "it is for mixture-of-experts models; remove it";
const BY_FILE: &str = "the model file says this; remove it";
const BY_REQUEST: &str = "requests set it; remove it, and send it with each request";
const DRAFTING: &str =
    "the cost model decides; remove it, and limit the drafted tokens with --ddtree-budget";
const LOGGING: &str = "use --log debug, or --log error for less; logs go to standard error";
const NO_TLS: &str = "set up TLS in a proxy in front of the server, and remove it";
const MEMORY: &str = "set the GPU memory with --vram-limit 20G or --vram-headroom 2G";
const CHUNK: &str = "use --chunk for the tokens of a prefill chunk";
const LOADING: &str = "there is one way to load; remove it";
const NO_EMBEDDINGS: &str = "embeddings and rankings are not supported; remove it";
const PAGE: &str = "the page at / is always served; remove it";

/// The flags.
pub(super) const OF_OTHER_SERVERS: &[Refused] = &[
    // llama-server: model.
    one(
        "model-url",
        &[],
        "use the address as the model, as in --model https://HOST/MODEL.gguf",
    ),
    one(
        "hf-token",
        &[],
        "set the variable HF_TOKEN, which other users of the machine cannot read",
    ),
    one("mmproj", &[], NO_IMAGES),
    one("mmproj-url", &[], NO_IMAGES),
    switch("no-mmproj", &ON, NO_IMAGES),
    switch(
        "jinja",
        &ON,
        "the model's template is always used; remove it",
    ),
    switch(
        "no-jinja",
        &OFF,
        "the model's template is always used; remove it",
    ),
    one(
        "chat-template",
        &[],
        "use --chat-template-file, which takes a file",
    ),
    one("lora", &[], NO_ADAPTERS),
    one("lora-scaled", &[], NO_ADAPTERS),
    one("control-vector", &[], NO_ADAPTERS),
    one("rope-scaling", &[], BY_FILE),
    one("rope-scale", &[], BY_FILE),
    one("rope-freq-base", &[], BY_FILE),
    one("rope-freq-scale", &[], BY_FILE),
    one("override-kv", &[], BY_FILE),
    // llama-server: device and memory.
    one(
        "gpu-layers",
        &["auto", "all", "-1", "99", "100", "999", "9999"],
        WHOLE_MODEL,
    ),
    one(
        "n-gpu-layers",
        &["auto", "all", "-1", "99", "100", "999", "9999"],
        WHOLE_MODEL,
    ),
    one(
        "gpu-layers-draft",
        &["auto", "all", "-1", "99", "100", "999"],
        WHOLE_MODEL,
    ),
    switch(
        "flash-attn",
        &ON,
        "attention is always computed that way; remove it",
    ),
    one("split-mode", &["none"], ONE_DEVICE),
    one("tensor-split", &[], ONE_DEVICE),
    one("main-gpu", &["0"], ONE_DEVICE),
    one("override-tensor", &[], WHOLE_MODEL),
    switch("kv-offload", &ON, WHOLE_MODEL),
    switch("no-kv-offload", &OFF, WHOLE_MODEL),
    switch("cpu-moe", &OFF, NO_EXPERTS),
    one("n-cpu-moe", &["0"], NO_EXPERTS),
    one(
        "threads-batch",
        &[],
        "use --threads, which holds for prompts too",
    ),
    one(
        "threads-http",
        &[],
        "HTTP work takes few threads; remove it",
    ),
    one("batch-size", &[], CHUNK),
    switch("mlock", &OFF, "weights stay in memory; remove it"),
    switch("mmap", &ON, LOADING),
    switch("no-mmap", &ON, LOADING),
    one(
        "numa",
        &[],
        "threads are not bound to nodes; remove it, and use numactl",
    ),
    switch("kv-unified", &ON, "all sequences share one pool; remove it"),
    switch("swa-full", &OFF, "windows keep what they need; remove it"),
    switch("warmup", &ON, LOADING),
    switch("no-warmup", &ON, LOADING),
    switch(
        "cont-batching",
        &ON,
        "batches are always continuous; remove it",
    ),
    switch(
        "no-cont-batching",
        &OFF,
        "batches are always continuous; use --max-sequences 1",
    ),
    // llama-server: drafts and caches.
    one("draft-max", &[], DRAFTING),
    one("draft-n", &[], DRAFTING),
    one("draft-min", &[], DRAFTING),
    one("draft-p-min", &[], DRAFTING),
    one("spec-draft-n-max", &[], DRAFTING),
    one("spec-draft-n-min", &[], DRAFTING),
    one("cache-ram", &[], "use --prefix-cache-bytes, such as 8G"),
    one("cache-reuse", &["0"], "only prefixes are reused; remove it"),
    one("ctx-checkpoints", &[], "use --prefix-cache-entries"),
    switch("cache-prompt", &ON, "prefixes are always cached; remove it"),
    switch("no-cache-prompt", &OFF, "use --prefix-cache-entries 0"),
    one(
        "slot-save-path",
        &[],
        "use --kv-cache-dir, which keeps prompt states by itself",
    ),
    switch(
        "context-shift",
        &OFF,
        "replies end where the context ends; use --max-ctx for more",
    ),
    switch("no-context-shift", &ON, LOADING),
    one(
        "keep",
        &["0"],
        "replies end where the context ends; use --max-ctx for more",
    ),
    // llama-server: sampling and reasoning.
    one("seed", &["-1"], BY_REQUEST),
    one("repeat-penalty", &["1", "1.0"], BY_REQUEST),
    one("repeat-last-n", &[], BY_REQUEST),
    one("presence-penalty", &["0", "0.0"], BY_REQUEST),
    one("frequency-penalty", &["0", "0.0"], BY_REQUEST),
    one("samplers", &[], BY_REQUEST),
    one("grammar", &[], BY_REQUEST),
    one("grammar-file", &[], BY_REQUEST),
    one("json-schema", &[], BY_REQUEST),
    switch("ignore-eos", &OFF, BY_REQUEST),
    one(
        "reasoning-format",
        &["auto", "deepseek"],
        "use --reasoning-field, or send reasoning_format",
    ),
    one("reasoning", &["auto"], "use --thinking-default on or off"),
    one(
        "reasoning-budget",
        &[],
        "use --think-max-tokens, or --thinking-default off",
    ),
    // llama-server: HTTP and logs.
    one("timeout", &[], "use --read-timeout and --write-timeout"),
    one("ssl-key-file", &[], NO_TLS),
    one("ssl-cert-file", &[], NO_TLS),
    one("path", &[], PAGE),
    switch("webui", &ON, PAGE),
    switch("no-webui", &OFF, PAGE),
    switch("slots", &ON, "slots are always shown; remove it"),
    switch(
        "no-slots",
        &OFF,
        "slots show no prompts; remove it, and use --api-key",
    ),
    switch(
        "props",
        &OFF,
        "settings do not change while the server runs; remove it",
    ),
    switch("embedding", &OFF, NO_EMBEDDINGS),
    switch("embeddings", &OFF, NO_EMBEDDINGS),
    switch("reranking", &OFF, NO_EMBEDDINGS),
    switch("verbose", &OFF, LOGGING),
    one("log-verbosity", &[], LOGGING),
    one("log-file", &[], LOGGING),
    switch("log-disable", &OFF, LOGGING),
    // vLLM.
    one("gpu-memory-utilization", &[], MEMORY),
    one("tensor-parallel-size", &["1"], ONE_DEVICE),
    one("pipeline-parallel-size", &["1"], ONE_DEVICE),
    one("data-parallel-size", &["1"], ONE_DEVICE),
    one("dtype", &["auto"], BY_FILE),
    one("quantization", &["gguf"], BY_FILE),
    one("kv-cache-dtype", &["auto"], "use --kv-type, such as q8_0"),
    one("max-num-batched-tokens", &[], CHUNK),
    one("tokenizer", &[], BY_FILE),
    one("tool-call-parser", &ANY, BY_FILE),
    one("reasoning-parser", &ANY, BY_FILE),
    switch("enable-auto-tool-choice", &ON, LOADING),
    switch("trust-remote-code", &ON, LOADING),
    one(
        "speculative-config",
        &[],
        "name the draft model with --draft; remove it",
    ),
    switch(
        "enable-prefix-caching",
        &ON,
        "prefixes are always cached; remove it",
    ),
    switch(
        "no-enable-prefix-caching",
        &OFF,
        "use --prefix-cache-entries 0",
    ),
    switch("enable-chunked-prefill", &ON, LOADING),
    switch("disable-log-requests", &ON, LOADING),
    switch("disable-log-stats", &ON, LOADING),
    one(
        "swap-space",
        &[],
        "preempted sequences move to host memory by themselves; remove it",
    ),
    one("cpu-offload-gb", &["0"], WHOLE_MODEL),
    one("block-size", &[], "pages have one size; remove it"),
    one("allowed-origins", &[], "use --cors-origin"),
    one("download-dir", &[], "set the variable HF_HUB_CACHE"),
    one(
        "revision",
        &["main"],
        "models are pulled at their latest revision; remove it",
    ),
    // ollama.
    one(
        "keepalive",
        &[],
        "a run ends with its conversation; use `hearth serve` for a server",
    ),
    one("think", &[], "use `hearth run --thinking on`"),
];
