//! Quantisation recipes: the weight type of each tensor.
//!
//! Every recipe chooses as llama.cpp's quantiser, so that files and figures are comparable, except
//! `mxfp4`, which there is for experts only. `conformance/fixtures/recipe` holds its choices for
//! recipes of the K-quants and wider.

use contract::QuantType;

use crate::names::{CONFIDENCE, EMBEDDING, HEAD, ROUTER, block_of};

/// A recipe by its command-line name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(non_camel_case_types, reason = "these are the names of the formats")]
pub enum Recipe {
    /// 1.6 bits; needs an importance matrix.
    IQ1_S,
    /// 1.8 bits; needs an importance matrix.
    IQ1_M,
    /// Three levels, for models that were trained with them.
    TQ1_0,
    /// 2.1 bits; needs an importance matrix.
    IQ2_XXS,
    /// Three levels in two bits, for models that were trained with them.
    TQ2_0,
    /// 2.3 bits; needs an importance matrix.
    IQ2_XS,
    /// 2.3 bits, with 3 for sensitive tensors; needs an importance matrix.
    IQ2_S,
    /// 2.6 bits, with 3 for sensitive tensors; needs an importance matrix.
    IQ2_M,
    /// 3.1 bits; needs an importance matrix.
    IQ3_XXS,
    /// 3.4 bits.
    IQ3_S,
    /// 4-bit floats with a power of two for 32, the head and the embedding at 8 bits.
    MXFP4,
    /// 4-bit floats with an 8-bit float for 16, the head at 6 bits.
    NVFP4,
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
    pub const ALL: [Recipe; 20] = [
        Recipe::IQ1_S,
        Recipe::IQ1_M,
        Recipe::TQ1_0,
        Recipe::IQ2_XXS,
        Recipe::TQ2_0,
        Recipe::IQ2_XS,
        Recipe::IQ2_S,
        Recipe::IQ2_M,
        Recipe::IQ3_XXS,
        Recipe::IQ3_S,
        Recipe::MXFP4,
        Recipe::NVFP4,
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
            Recipe::IQ1_S => "iq1_s",
            Recipe::IQ1_M => "iq1_m",
            Recipe::TQ1_0 => "tq1_0",
            Recipe::IQ2_XXS => "iq2_xxs",
            Recipe::TQ2_0 => "tq2_0",
            Recipe::IQ2_XS => "iq2_xs",
            Recipe::IQ2_S => "iq2_s",
            Recipe::IQ2_M => "iq2_m",
            Recipe::IQ3_XXS => "iq3_xxs",
            Recipe::IQ3_S => "iq3_s",
            Recipe::MXFP4 => "mxfp4",
            Recipe::NVFP4 => "nvfp4",
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
            Recipe::IQ1_S => 24,
            Recipe::IQ1_M => 31,
            Recipe::TQ1_0 => 36,
            Recipe::IQ2_XXS => 19,
            Recipe::TQ2_0 => 37,
            Recipe::IQ2_XS => 20,
            Recipe::IQ2_S => 28,
            Recipe::IQ2_M => 29,
            Recipe::IQ3_XXS => 23,
            Recipe::IQ3_S => 26,
            Recipe::MXFP4 => 38,
            Recipe::NVFP4 => 39,
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
            Recipe::IQ1_S => QuantType::IQ1_S,
            Recipe::IQ1_M => QuantType::IQ1_M,
            Recipe::TQ1_0 => QuantType::TQ1_0,
            Recipe::IQ2_XXS => QuantType::IQ2_XXS,
            Recipe::TQ2_0 => QuantType::TQ2_0,
            Recipe::IQ2_XS => QuantType::IQ2_XS,
            Recipe::IQ2_S => QuantType::IQ2_XS,
            Recipe::IQ2_M => QuantType::IQ2_S,
            Recipe::IQ3_XXS => QuantType::IQ3_XXS,
            Recipe::IQ3_S => QuantType::IQ3_S,
            Recipe::MXFP4 => QuantType::MXFP4,
            Recipe::NVFP4 => QuantType::NVFP4,
        }
    }

    /// Whether tensors of the recipe cannot do without an importance matrix.
    pub fn needs_importance(self) -> bool {
        needs_importance("", self.usual())
    }

    /// Whether most matrices have fewer than 2.7 bits.
    fn is_tiny(self) -> bool {
        self.is_two_bit_mix()
            || matches!(
                self,
                Recipe::IQ1_S | Recipe::IQ1_M | Recipe::IQ2_XXS | Recipe::IQ2_XS
            )
    }

    /// Whether sensitive tensors have 3 bits and the others about 2.
    fn is_two_bit_mix(self) -> bool {
        matches!(self, Recipe::IQ2_S | Recipe::IQ2_M)
    }
}

/// File properties that a recipe depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileShape {
    /// Blocks of the file, including prediction blocks.
    pub block_count: usize,
    /// Whether the head is the embedding and there is no `output.weight`.
    pub tied: bool,
    /// Whether at least four query heads share the keys and values of one.
    pub is_grouped: bool,
    /// Whether there are at least four experts.
    pub has_experts: bool,
    /// Whether there is an importance matrix.
    pub has_importance: bool,
}

/// Whether `tensor` becomes garbage as `ty` without an importance matrix.
pub fn needs_importance(tensor: &str, ty: QuantType) -> bool {
    let is_low = matches!(
        ty,
        QuantType::IQ1_S
            | QuantType::IQ1_M
            | QuantType::IQ2_XXS
            | QuantType::IQ2_XS
            | QuantType::IQ2_S
            | QuantType::IQ3_XXS
    );
    is_low && tensor != HEAD && tensor != EMBEDDING
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
    let cols = dims.first().copied().unwrap_or(0);
    fall_back(wanted(recipe, file, name, cols), cols)
}

/// Vectors, norms, convolution taps, routers, the row of a draft's confidence head and tensors not
/// named `weight` stay f32.
fn is_quantised(name: &str, dims: &[u64]) -> bool {
    dims.len() >= 2
        && name.ends_with("weight")
        && !name.contains("_norm.weight")
        && !name.contains("ssm_conv1d")
        && !name.ends_with(ROUTER)
        && name != CONFIDENCE
}

fn wanted(recipe: Recipe, file: FileShape, name: &str, cols: u64) -> QuantType {
    let usual = recipe.usual();
    let is = |part: &str| name.ends_with(&format!(".{part}.weight"));
    match recipe {
        Recipe::F32 | Recipe::F16 | Recipe::BF16 | Recipe::Q8_0 | Recipe::Q6_K => usual,
        _ if name == HEAD || (file.tied && name == EMBEDDING) => head(recipe, cols),
        _ if name == EMBEDDING => embedding(recipe),
        Recipe::MXFP4 if file.has_experts && !name.ends_with("_exps.weight") => QuantType::Q8_0,
        Recipe::Q4_0 | Recipe::TQ1_0 | Recipe::TQ2_0 | Recipe::MXFP4 | Recipe::NVFP4 => usual,
        Recipe::Q4_K_M | Recipe::Q5_K_M => {
            let gets_more = SENSITIVE.iter().any(|part| is(part))
                && block_of(name).is_some_and(|(block, _)| more_bits(block, file.block_count));
            if gets_more { QuantType::Q6_K } else { usual }
        }
        _ if is_value(name) && (file.is_grouped || (recipe.is_tiny() && file.has_experts)) => {
            QuantType::Q4_K
        }
        _ if recipe.is_tiny() => tiny(recipe, file, name, is),
        Recipe::IQ3_XXS => three_bits(file, name, is),
        _ => usual,
    }
}

/// The type of the head, which the embedding may be as well.
fn head(recipe: Recipe, cols: u64) -> QuantType {
    let is_divisible = cols.is_multiple_of(recipe.usual().block_values() as u64);
    if recipe == Recipe::MXFP4 || !is_divisible {
        QuantType::Q8_0
    } else if recipe.is_tiny() || recipe == Recipe::IQ3_XXS {
        QuantType::Q5_K
    } else {
        QuantType::Q6_K
    }
}

/// The type of an embedding that is not the head.
fn embedding(recipe: Recipe) -> QuantType {
    match recipe {
        Recipe::IQ2_S | Recipe::IQ2_M | Recipe::IQ3_XXS => QuantType::IQ3_S,
        _ if recipe.is_tiny() => QuantType::Q2_K,
        Recipe::TQ1_0 | Recipe::TQ2_0 => QuantType::Q4_K,
        Recipe::MXFP4 => QuantType::Q8_0,
        _ => recipe.usual(),
    }
}

/// Whether the tensor makes the values of attention.
fn is_value(name: &str) -> bool {
    name.ends_with(".attn_v.weight") || name.ends_with(".attn_qkv.weight")
}

/// Whether the tensor ends a feed-forward.
fn is_down(name: &str) -> bool {
    block_of(name).is_some_and(|(_, part)| part.starts_with("ffn_down"))
}

/// Whether the tensor is in the first eighth of the blocks.
fn is_early(file: FileShape, name: &str) -> bool {
    block_of(name).is_some_and(|(block, _)| block < file.block_count / 8)
}

/// A matrix of a recipe of one or two bits.
fn tiny(recipe: Recipe, file: FileShape, name: &str, is: impl Fn(&str) -> bool) -> QuantType {
    let more = if recipe.is_two_bit_mix() {
        QuantType::IQ3_S
    } else {
        QuantType::Q2_K
    };
    match recipe {
        _ if is_value(name) => more,
        _ if is_down(name) && is_early(file, name) => more,
        Recipe::IQ1_S | Recipe::IQ1_M if is("attn_output") => QuantType::IQ2_XXS,
        _ if is("attn_output") && recipe.is_two_bit_mix() => more,
        _ => recipe.usual(),
    }
}

/// A matrix of IQ3_XXS.
fn three_bits(file: FileShape, name: &str, is: impl Fn(&str) -> bool) -> QuantType {
    if is("attn_q") || is("attn_k") {
        QuantType::IQ2_S
    } else if is("attn_output") {
        QuantType::IQ3_S
    } else if file.has_importance {
        QuantType::IQ3_XXS
    } else if is_value(name) {
        QuantType::IQ3_S
    } else if is_down(name) {
        if is_early(file, name) {
            QuantType::Q4_K
        } else {
            QuantType::Q3_K
        }
    } else {
        QuantType::IQ3_XXS
    }
}

/// The blocks at both ends, and every third in between.
fn more_bits(block: usize, blocks: usize) -> bool {
    let eighth = blocks / 8;
    block < eighth
        || block >= 7 * blocks / 8
        || block.checked_sub(eighth).is_some_and(|past| past % 3 == 2)
}

/// Row lengths that are not multiples of the block get a type with blocks of 32; others that are
/// not multiples of 32 get f16.
fn fall_back(wanted: QuantType, cols: u64) -> QuantType {
    if cols.is_multiple_of(wanted.block_values() as u64) {
        return wanted;
    }
    let small = match wanted {
        QuantType::Q2_K | QuantType::Q3_K | QuantType::TQ1_0 | QuantType::TQ2_0 => QuantType::Q4_0,
        QuantType::Q4_K => QuantType::Q5_0,
        QuantType::Q5_K => QuantType::Q5_1,
        QuantType::Q6_K => QuantType::Q8_0,
        QuantType::NVFP4 => QuantType::MXFP4,
        QuantType::IQ4_XS => QuantType::IQ4_NL,
        _ if wanted.takes_importance() => QuantType::IQ4_NL,
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
                is_grouped: true,
                has_experts: false,
                has_importance: false,
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
            is_grouped: true,
            has_experts: false,
            has_importance: false,
        };
        let ty = |cols| choose(Recipe::Q4_K_M, file, "blk.1.attn_q.weight", &[cols, 7]);
        assert_eq!(ty(512), QuantType::Q4_K);
        assert_eq!(ty(96), QuantType::Q5_0);
        assert_eq!(ty(33), QuantType::F16);
    }

    #[test]
    fn confidence_head_of_a_draft_stays_f32() {
        let file = FileShape {
            block_count: 2,
            tied: true,
            is_grouped: true,
            has_experts: false,
            has_importance: false,
        };
        for recipe in Recipe::ALL {
            let ty = |name, dims: &[u64]| choose(recipe, file, name, dims);
            assert_eq!(ty("conf_proj.weight", &[288, 1]), QuantType::F32);
            let bias = ty("markov_w2.weight", &[256, 8192]);
            assert_eq!(bias == QuantType::F32, recipe == Recipe::F32);
        }
    }

    #[test]
    fn experts_are_quantised_as_dense_matrices_and_routers_stay_f32() {
        let file = FileShape {
            block_count: 40,
            tied: false,
            is_grouped: true,
            has_experts: true,
            has_importance: false,
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
    fn low_bit_recipes_give_sensitive_tensors_more() {
        let file = FileShape {
            block_count: 16,
            tied: false,
            is_grouped: false,
            has_experts: false,
            has_importance: true,
        };
        let types = |recipe, file| {
            let tensors = [
                "token_embd",
                "output",
                "blk.0.ffn_down",
                "blk.2.ffn_down",
                "blk.3.attn_v",
                "blk.3.attn_q",
                "blk.3.attn_output",
                "blk.3.ffn_up",
            ];
            let choose = |name: &str| choose(recipe, file, &format!("{name}.weight"), &[512, 9]);
            tensors.map(|name| choose(name).name()).join(" ")
        };
        for (recipe, expected) in [
            (
                Recipe::IQ1_S,
                "Q2_K Q5_K Q2_K IQ1_S Q2_K IQ1_S IQ2_XXS IQ1_S",
            ),
            (
                Recipe::IQ2_XXS,
                "Q2_K Q5_K Q2_K IQ2_XXS Q2_K IQ2_XXS IQ2_XXS IQ2_XXS",
            ),
            (
                Recipe::IQ2_S,
                "IQ3_S Q5_K IQ3_S IQ2_XS IQ3_S IQ2_XS IQ3_S IQ2_XS",
            ),
            (
                Recipe::IQ2_M,
                "IQ3_S Q5_K IQ3_S IQ2_S IQ3_S IQ2_S IQ3_S IQ2_S",
            ),
            (
                Recipe::IQ3_XXS,
                "IQ3_S Q5_K IQ3_XXS IQ3_XXS IQ3_XXS IQ2_S IQ3_S IQ3_XXS",
            ),
            (
                Recipe::IQ3_S,
                "IQ3_S Q6_K IQ3_S IQ3_S IQ3_S IQ3_S IQ3_S IQ3_S",
            ),
            (
                Recipe::TQ1_0,
                "Q4_K Q6_K TQ1_0 TQ1_0 TQ1_0 TQ1_0 TQ1_0 TQ1_0",
            ),
            (
                Recipe::MXFP4,
                "Q8_0 Q8_0 MXFP4 MXFP4 MXFP4 MXFP4 MXFP4 MXFP4",
            ),
            (
                Recipe::NVFP4,
                "NVFP4 Q6_K NVFP4 NVFP4 NVFP4 NVFP4 NVFP4 NVFP4",
            ),
        ] {
            assert_eq!(types(recipe, file), expected, "{}", recipe.name());
        }
        let grouped = FileShape {
            is_grouped: true,
            has_importance: false,
            ..file
        };
        assert_eq!(
            types(Recipe::IQ3_XXS, grouped),
            "IQ3_S Q5_K Q4_K Q3_K Q4_K IQ2_S IQ3_S IQ3_XXS"
        );
        assert!(types(Recipe::IQ3_S, grouped).contains("IQ3_S Q4_K IQ3_S"));
        let experts = FileShape {
            has_experts: true,
            ..file
        };
        let of = |name| choose(Recipe::MXFP4, experts, name, &[512, 9, 4]).name();
        assert_eq!(of("blk.1.ffn_up_exps.weight"), "MXFP4");
        assert_eq!(of("blk.1.ffn_up_shexp.weight"), "Q8_0");
        assert!(types(Recipe::IQ2_XXS, experts).contains("IQ2_XXS Q4_K IQ2_XXS"));
    }

    #[test]
    fn names_are_case_insensitive() {
        assert_eq!(Recipe::parse("Q4_K_M"), Some(Recipe::Q4_K_M));
        assert_eq!(Recipe::parse("q9_k"), None);
    }
}
