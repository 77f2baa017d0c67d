//! The `mlxcel` command.
fn main() {}
