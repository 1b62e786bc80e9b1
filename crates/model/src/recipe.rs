//! Quantisation recipes: the weight type of each tensor.
//!
//! Every recipe chooses as llama.cpp's quantiser without an importance matrix, so that files and
//! figures are comparable. `conformance/fixtures/recipe` holds its choices.

use contract::QuantType;

use crate::names::{ROUTER, block_of};

/// A recipe by its command-line name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(non_camel_case_types, reason = "these are the names of the formats")]
pub enum Recipe {
    /// Matrices as 32-bit floats.
    F32,
    /// Matrices as halves.
    F16,
    /// Matrices as bfloat16.
    BF16,
    /// Matrices at 8 bits.
    Q8_0,
    /// Matrices at 4 bits, the head at 6.
    Q4_0,
    /// 4 bits, with 6 for sensitive tensors.
    Q4_K_M,
    /// 5 bits, with 6 for sensitive tensors.
    Q5_K_M,
    /// 6 bits.
    Q6_K,
}

impl Recipe {
    /// All recipes, smallest files first.
    pub const ALL: [Recipe; 8] = [
        Recipe::Q4_0,
        Recipe::Q4_K_M,
        Recipe::Q5_K_M,
        Recipe::Q6_K,
        Recipe::Q8_0,
        Recipe::BF16,
        Recipe::F16,
        Recipe::F32,
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Recipe::F32 => "f32",
            Recipe::F16 => "f16",
            Recipe::BF16 => "bf16",
            Recipe::Q8_0 => "q8_0",
            Recipe::Q4_0 => "q4_0",
            Recipe::Q4_K_M => "q4_k_m",
            Recipe::Q5_K_M => "q5_k_m",
            Recipe::Q6_K => "q6_k",
        }
    }

    /// The recipe with this name, in any case.
    pub fn parse(name: &str) -> Option<Recipe> {
        Recipe::ALL
            .into_iter()
            .find(|recipe| recipe.name().eq_ignore_ascii_case(name))
    }

    /// The value of `general.file_type` that names this recipe.
    pub fn file_type(self) -> u32 {
        match self {
            Recipe::F32 => 0,
            Recipe::F16 => 1,
            Recipe::Q4_0 => 2,
            Recipe::Q8_0 => 7,
            Recipe::Q4_K_M => 15,
            Recipe::Q5_K_M => 17,
            Recipe::Q6_K => 18,
            Recipe::BF16 => 32,
        }
    }

    /// The type of a matrix without special treatment.
    fn usual(self) -> QuantType {
        match self {
            Recipe::F32 => QuantType::F32,
            Recipe::F16 => QuantType::F16,
            Recipe::BF16 => QuantType::BF16,
            Recipe::Q8_0 => QuantType::Q8_0,
            Recipe::Q4_0 => QuantType::Q4_0,
            Recipe::Q4_K_M => QuantType::Q4_K,
            Recipe::Q5_K_M => QuantType::Q5_K,
            Recipe::Q6_K => QuantType::Q6_K,
        }
    }
}

/// File properties that a recipe depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileShape {
    /// Blocks of the file, including prediction blocks.
    pub block_count: usize,
    /// Whether the head is the embedding and there is no `output.weight`.
    pub tied: bool,
}

/// The matrices that have more bits in some blocks of a mix.
const SENSITIVE: [&str; 5] = [
    "ffn_down",
    "ffn_down_exps",
    "ffn_down_shexp",
    "attn_v",
    "attn_qkv",
];

/// The type of tensor `name` with dimensions `dims` (fastest first).
pub fn choose(recipe: Recipe, file: FileShape, name: &str, dims: &[u64]) -> QuantType {
    if !is_quantised(name, dims) {
        return QuantType::F32;
    }
    let wanted = wanted(recipe, file, name);
    fall_back(wanted, dims.first().copied().unwrap_or(0))
}

/// Vectors, norms, convolution taps, routers and tensors not named `weight` stay f32.
fn is_quantised(name: &str, dims: &[u64]) -> bool {
    dims.len() >= 2
        && name.ends_with("weight")
        && !name.contains("_norm.weight")
        && !name.contains("ssm_conv1d")
        && !name.ends_with(ROUTER)
}

fn wanted(recipe: Recipe, file: FileShape, name: &str) -> QuantType {
    let usual = recipe.usual();
    let is_head = name == "output.weight" || (file.tied && name == "token_embd.weight");
    match recipe {
        Recipe::F32 | Recipe::F16 | Recipe::BF16 | Recipe::Q8_0 | Recipe::Q6_K => usual,
        _ if is_head => QuantType::Q6_K,
        Recipe::Q4_0 => usual,
        Recipe::Q4_K_M | Recipe::Q5_K_M => {
            let gets_more = SENSITIVE
                .iter()
                .any(|part| name.ends_with(&format!(".{part}.weight")))
                && block_of(name).is_some_and(|(block, _)| more_bits(block, file.block_count));
            if gets_more { QuantType::Q6_K } else { usual }
        }
    }
}

/// The blocks at both ends, and every third in between.
fn more_bits(block: usize, blocks: usize) -> bool {
    let eighth = blocks / 8;
    block < eighth
        || block >= 7 * blocks / 8
        || block.checked_sub(eighth).is_some_and(|past| past % 3 == 2)
}

/// Row lengths that are not multiples of 256 get a type with blocks of 32; others that are not
/// multiples of 32 get f16.
fn fall_back(wanted: QuantType, cols: u64) -> QuantType {
    if cols.is_multiple_of(wanted.block_values() as u64) {
        return wanted;
    }
    let small = match wanted {
        QuantType::Q4_K => QuantType::Q5_0,
        QuantType::Q5_K => QuantType::Q5_1,
        QuantType::Q6_K => QuantType::Q8_0,
        QuantType::IQ4_XS => QuantType::IQ4_NL,
        _ => QuantType::F16,
    };
    if cols.is_multiple_of(small.block_values() as u64) {
        small
    } else {
        QuantType::F16
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Deserialize)]
    struct Fixture {
        block_count: usize,
        tied: bool,
        recipe: String,
        tensors: Vec<TypeChoice>,
    }

    #[derive(Deserialize)]
    struct TypeChoice {
        name: String,
        dims: Vec<u64>,
        #[serde(rename = "type")]
        ty: String,
    }

    #[test]
    fn recipes_choose_the_types_of_llama_cpp() {
        let dir = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../conformance/fixtures/recipe"
        );
        let mut tensors = 0;
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let fixture: Fixture = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            let recipe = Recipe::parse(&fixture.recipe).unwrap();
            let file = FileShape {
                block_count: fixture.block_count,
                tied: fixture.tied,
            };
            for tensor in &fixture.tensors {
                let ours = choose(recipe, file, &tensor.name, &tensor.dims);
                assert_eq!(
                    ours.name(),
                    tensor.ty,
                    "{} in {}",
                    tensor.name,
                    path.display()
                );
                tensors += 1;
            }
        }
        assert!(tensors > 500, "only {tensors} tensors were compared");
    }

    #[test]
    fn odd_rows_fall_back_to_smaller_blocks() {
        let file = FileShape {
            block_count: 8,
            tied: true,
        };
        let ty = |cols| choose(Recipe::Q4_K_M, file, "blk.1.attn_q.weight", &[cols, 7]);
        assert_eq!(ty(512), QuantType::Q4_K);
        assert_eq!(ty(96), QuantType::Q5_0);
        assert_eq!(ty(33), QuantType::F16);
    }

    #[test]
    fn experts_are_quantised_as_dense_matrices_and_routers_stay_f32() {
        let file = FileShape {
            block_count: 40,
            tied: false,
        };
        let ty = |name: &str, dims: &[u64]| choose(Recipe::Q4_K_M, file, name, dims);
        let experts = [512, 2048, 256];
        for (block, expected) in [(0, QuantType::Q6_K), (5, QuantType::Q4_K)] {
            for part in ["ffn_down_exps", "ffn_down_shexp"] {
                let name = format!("blk.{block}.{part}.weight");
                assert_eq!(ty(&name, &experts), expected, "{name}");
            }
        }
        for part in [
            "ffn_gate_exps",
            "ffn_up_exps",
            "ffn_gate_up_exps",
            "ffn_up_shexp",
        ] {
            let name = format!("blk.0.{part}.weight");
            assert_eq!(ty(&name, &[2048, 512, 256]), QuantType::Q4_K, "{name}");
        }
        let router = "blk.0.ffn_gate_inp.weight";
        assert_eq!(ty(router, &[2048, 256]), QuantType::F32);
        assert_eq!(
            ty("blk.0.ffn_gate_inp_shexp.weight", &[2048]),
            QuantType::F32
        );
    }

    #[test]
    fn names_are_case_insensitive() {
        assert_eq!(Recipe::parse("Q4_K_M"), Some(Recipe::Q4_K_M));
        assert_eq!(Recipe::parse("q9_k"), None);
    }
}
