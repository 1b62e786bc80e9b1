//! The JSON of Ollama's protocol: `POST /api/chat` and `POST /api/generate`.

pub mod request;
pub mod response;
pub mod stream;

#[cfg(test)]
mod tests;
