//! The operation table over MLX, shared by every backend plugin.
