//! The JSON of llama-server's own completions, `POST /completion` and `POST /infill`.

pub mod infill;
pub mod request;
pub mod response;

#[cfg(test)]
mod tests;
