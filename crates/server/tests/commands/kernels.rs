//! Tests of `hearth kernels explain`.

use crate::process::{good, hearth};

#[test]
fn explain_names_kernel_and_reason_of_every_operation_without_a_gpu() {
    let words = "kernels explain qwen3.5-27b:q4_k_m --arch sm_86";
    let out = good(words, &[]).out;
    assert!(
        out.starts_with("qwen3.5-27b:q4_k_m on sm_86, KV f16"),
        "{out}"
    );
    for (operation, file) in [
        ("attention", "attention/decode_tree.cu"),
        ("gated_delta", "gated_delta/decode_recurrent.cu"),
        ("gemm", "gemm/decode_gemm_small_batch.cu"),
        ("norm", "norm/rms_norm.cu"),
    ] {
        let mut lines = out.lines();
        let line = lines.find(|line| line.contains(file)).expect(file);
        assert!(line.contains(operation), "{line}");
        assert!(line.split(file).nth(1).unwrap().len() > 8, "{line}");
    }
    assert!(!out.contains("sm90.cu"), "{out}");
}

#[test]
fn explain_covers_all_architectures_unless_one_is_named() {
    let out = good("kernels explain qwen3.5-27b:q4_k_m --json", &[]).out;
    for arch in ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120a"] {
        assert!(out.contains(&format!("\"arch\":\"{arch}\"")), "{arch}");
    }
    assert!(out.contains("gemm/fused_layer_sm90.cu"));
}

#[test]
fn explain_refuses_unknown_models_and_architectures() {
    let unknown = hearth(&["kernels", "explain", "no-such-model"]);
    assert_ne!(unknown.code, Some(0));
    let elsewhere = hearth(&["kernels", "explain", "no-one/Qwen3.5-9B-GGUF"]);
    assert!(elsewhere.err.contains("hearth pull"), "{}", elsewhere.err);
    let arch = hearth(&["kernels", "explain", "qwen3.5-27b", "--arch", "ampere"]);
    assert!(arch.err.contains("ampere"), "{}", arch.err);
}
