//! Llama-line architectures: llama, mistral, mixtral.
