//! The JSON of llama-server's own completions, `POST /completion`.

pub mod request;
pub mod response;

#[cfg(test)]
mod tests;
