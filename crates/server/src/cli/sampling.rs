//! Flags about how tokens are drawn.

use clap::Args;
use model::CardSampling;

/// How tokens are drawn where requests do not say.
#[derive(Debug, Clone, Args)]
pub struct SamplingArgs {
    /// Sampling temperature; 0 takes the likeliest token [default: the model card's].
    #[arg(long = "temp", visible_alias = "temperature", env = "HEARTH_TEMP", value_name = "NUMBER",
        value_parser = not_negative)]
    pub temp: Option<f32>,
    /// Probability mass of the tokens to draw from; 1 is all [default: the model card's].
    #[arg(long, env = "HEARTH_TOP_P", value_name = "NUMBER", value_parser = probability)]
    pub top_p: Option<f32>,
    /// Number of tokens to draw from; 0 is all [default: the model card's].
    #[arg(long, env = "HEARTH_TOP_K", value_name = "N")]
    pub top_k: Option<usize>,
    /// Least probability of a token relative to the likeliest [default: the model card's].
    #[arg(long, env = "HEARTH_MIN_P", value_name = "NUMBER", value_parser = probability)]
    pub min_p: Option<f32>,
}

impl SamplingArgs {
    /// What the flags say.
    pub fn flags(&self) -> CardSampling {
        CardSampling {
            temperature: self.temp,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            ..CardSampling::default()
        }
    }
}

fn not_negative(text: &str) -> Result<f32, String> {
    number(text, f32::MAX, "a number of 0 or more")
}

pub(super) fn probability(text: &str) -> Result<f32, String> {
    number(text, 1.0, "a number from 0 to 1")
}

fn number(text: &str, most: f32, wanted: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(number) if (0.0..=most).contains(&number) => Ok(number),
        _ => Err(format!("must be {wanted}")),
    }
}
