//! Flags of llama-server and vLLM that this server lacks. Each is refused with the flag to use, or
//! taken silently where it asks for what is always so.

use super::refusal::{ANY, OFF, Refused, one, switch};

/// Values of a switch that is on.
const ON: [&str; 7] = ["true", "1", "yes", "on", "auto", "enabled", "always"];

const BY_LAYERS: &str = "remove it and name the GPUs that share a model with --target-devices cuda:0,cuda:1; with --split-mode tensor each has half of every layer";
const ONE_COPY: &str = "a server has one copy of a model; remove it, and start one server for each GPU with --device cuda:N";
const ALL_LAYERS: &str =
    "all layers run on the GPU; remove it, or use --device cpu to run without a GPU";
const SAMPLER: &str = "there is no such sampler; remove it, and use --top-p, --top-k or --min-p";
const NO_IMAGES: &str = "images are not supported; remove it";
const NO_ADAPTERS: &str = "adapters are not supported; remove it, and merge them into the file";
const EXPERTS: &str = "experts that do not fit the GPU stay in host memory by themselves; remove it, and set the limit with \
     --vram-limit";
const BY_FILE: &str = "the model file says this; remove it";
const BY_REQUEST: &str = "requests set it; remove it, and send it with each request";
const DRAFTING: &str =
    "the cost model decides; remove it, and limit the drafted tokens with --ddtree-budget";
const LOGGING: &str = "use --log debug, or --log error for less; logs go to standard error";
const NO_TLS: &str = "set up TLS in a proxy in front of the server, and remove it";
const MEMORY: &str = "set the GPU memory with --vram-limit 20G or --vram-headroom 2G";
const CHUNK: &str = "use --chunk for the tokens of a prefill chunk";
const PREFIX: &str = "set the path in a proxy in front of the server, and remove it";
const LOADING: &str = "there is one way to load; remove it";
const NO_EMBEDDINGS: &str = "embeddings and rankings are not supported; remove it";
const TEMPLATE_VALUES: &str = "send chat_template_kwargs with each request, and use --thinking-default on or off for thinking";
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
        ALL_LAYERS,
    ),
    one(
        "n-gpu-layers",
        &["auto", "all", "-1", "99", "100", "999", "9999"],
        ALL_LAYERS,
    ),
    one(
        "gpu-layers-draft",
        &["auto", "all", "-1", "99", "100", "999"],
        ALL_LAYERS,
    ),
    switch(
        "flash-attn",
        &ON,
        "attention is always computed that way; remove it",
    ),
    one(
        "tensor-split",
        &[],
        "use --target-layer-split, with --target-devices cuda:0,cuda:1",
    ),
    one("main-gpu", &["0"], "use --device cuda:N"),
    switch("list-devices", &OFF, "use `hearth doctor`"),
    one("override-tensor", &[], EXPERTS),
    switch("kv-offload", &ON, ALL_LAYERS),
    switch("no-kv-offload", &OFF, ALL_LAYERS),
    switch("cpu-moe", &OFF, EXPERTS),
    one("n-cpu-moe", &["0"], EXPERTS),
    one(
        "fit",
        &ON,
        "the longest context that fits is chosen; use --max-ctx for another",
    ),
    one("fit-target", &[], "use --vram-headroom, such as 1G"),
    one("fit-ctx", &[], "use --max-ctx"),
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
    switch("direct-io", &ON, LOADING),
    switch("no-repack", &ON, LOADING),
    switch(
        "check-tensors",
        &OFF,
        "files are checked when they are opened; remove it",
    ),
    one("defrag-thold", &ANY, LOADING),
    one("prio", &["0"], "use nice(1), and remove it"),
    one("poll", &ANY, LOADING),
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
    one("device-draft", &[], "use --draft-device"),
    one(
        "ctx-size-draft",
        &["0"],
        "a draft has the model's context; remove it",
    ),
    one("spec-type", &[], "use --draft-sources"),
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
        "slot-prompt-similarity",
        &[],
        "the longest common prefix is always reused; remove it",
    ),
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
    one("logit-bias", &[], BY_REQUEST),
    one("dry-multiplier", &["0", "0.0"], SAMPLER),
    one("mirostat", &["0"], SAMPLER),
    one("xtc-probability", &["0", "0.0"], SAMPLER),
    one("typical", &["1", "1.0"], SAMPLER),
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
    one("chat-template-kwargs", &[], TEMPLATE_VALUES),
    one("default-chat-template-kwargs", &[], TEMPLATE_VALUES),
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
    one("api-prefix", &[], PREFIX),
    one("webui-config", &[], PAGE),
    one("tools", &[], "clients run tools; remove it"),
    one("media-path", &[], NO_IMAGES),
    switch("models-autoload", &ON, LOADING),
    switch(
        "no-models-autoload",
        &OFF,
        "models are loaded when requests name them; remove it",
    ),
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
    one("pooling", &["none"], NO_EMBEDDINGS),
    switch("spm-infill", &OFF, BY_FILE),
    switch("no-perf", &ON, LOADING),
    one("log-colors", &["auto"], "use --no-color, or remove it"),
    switch("log-prefix", &ON, LOGGING),
    switch("log-timestamps", &ON, LOGGING),
    switch("verbose", &OFF, LOGGING),
    one("log-verbosity", &[], LOGGING),
    one("log-file", &[], LOGGING),
    switch("log-disable", &OFF, LOGGING),
    // vLLM.
    one("gpu-memory-utilization", &[], MEMORY),
    one("kv-cache-memory-bytes", &[], "use --kv-pool, in tokens"),
    one("num-gpu-blocks-override", &[], "use --kv-pool, in tokens"),
    one("tensor-parallel-size", &["1"], BY_LAYERS),
    one("pipeline-parallel-size", &["1"], BY_LAYERS),
    one("data-parallel-size", &["1"], ONE_COPY),
    one("load-format", &["auto", "gguf"], BY_FILE),
    one("hf-overrides", &[], BY_FILE),
    one("limit-mm-per-prompt", &ANY, NO_IMAGES),
    switch("language-model-only", &ON, NO_IMAGES),
    switch("async-scheduling", &ON, LOADING),
    one(
        "compilation-config",
        &[],
        "kernels are compiled for the GPU by themselves; remove it",
    ),
    one(
        "generation-config",
        &["auto"],
        "use --model-cards-dir, or flags such as --temp",
    ),
    one(
        "override-generation-config",
        &[],
        "use flags such as --temp and --top-p",
    ),
    one("max-logprobs", &[], "the most is fixed; remove it"),
    one("response-role", &["assistant"], "remove it"),
    one("root-path", &["", "/"], PREFIX),
    one("ssl-keyfile", &[], NO_TLS),
    one("ssl-certfile", &[], NO_TLS),
    one("uvicorn-log-level", &[], LOGGING),
    switch("enable-log-requests", &ON, LOGGING),
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
    one("cpu-offload-gb", &["0"], EXPERTS),
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
