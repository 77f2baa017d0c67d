//! llama-server's own dialect.

pub mod completion;
mod completion_stream;
pub mod props;
mod settings;
pub mod tokenize;
