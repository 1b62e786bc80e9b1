//! A text with a gap that a completion fills (fill in the middle).

use contract::TokenId;

use crate::error::ChatError;
use crate::tokenizer::{EncodeLimit, SpecialTokens, Tokenizer};

/// Names that llama.cpp gives a repository and a file that have none.
const REPOSITORY_NAME: &str = "myproject\n";
const FILE_NAME: &str = "filename\n";

/// What surrounds the gap, besides the prompt in front of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GapContext {
    /// Text behind the gap.
    pub suffix: String,
    /// Other files, for context.
    pub files: Vec<ContextFile>,
    /// The request field that asks for a gap, for errors.
    pub field: &'static str,
}

/// A file that gives context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextFile {
    /// Its name.
    pub name: String,
    /// Its text, or a part of it.
    pub text: String,
}

impl GapContext {
    /// A gap before `suffix`, asked for in `field`.
    pub(crate) fn of_suffix(suffix: &str, field: &'static str) -> GapContext {
        GapContext {
            suffix: suffix.to_owned(),
            files: Vec::new(),
            field,
        }
    }

    /// The tokens of the text with its gap; `prefix` gives those in front of it.
    pub(super) fn token_ids(
        &self,
        tokenizer: &Tokenizer,
        limit: EncodeLimit<'_>,
        prefix: impl FnOnce(SpecialTokens) -> Result<Vec<TokenId>, ChatError>,
    ) -> Result<Vec<TokenId>, ChatError> {
        let Some(fim) = tokenizer.fim() else {
            let message = "the model has no tokens that mark a gap in a text \
                           (fill in the middle); serve one that has, or leave it out";
            return Err(ChatError::field(self.field, message));
        };
        let encode = |text: &str| tokenizer.encode_up_to(text, SpecialTokens::AsText, limit);
        let mut ids = Vec::new();
        if !self.files.is_empty()
            && let Some(repository) = fim.repository
        {
            ids.push(repository);
            ids.extend(encode(REPOSITORY_NAME)?);
        }
        for file in &self.files {
            match fim.file {
                Some(mark) => {
                    ids.push(mark);
                    ids.extend(encode(&format!("{}\n{}", file.name, file.text))?);
                }
                None => ids.extend(encode(&format!(
                    "\n\n--- {} ---\n\n{}",
                    file.name, file.text
                ))?),
            }
            if ids.len() > limit.tokens {
                return Ok(ids);
            }
        }
        if !self.files.is_empty()
            && let Some(mark) = fim.file
        {
            ids.push(mark);
            ids.extend(encode(FILE_NAME)?);
        }
        ids.push(fim.prefix);
        ids.extend(prefix(SpecialTokens::AsText)?);
        ids.push(fim.suffix);
        ids.extend(encode(&self.suffix)?);
        ids.push(fim.middle);
        Ok(tokenizer.with_prefix(ids))
    }
}
