//! The CPU backend plugin.
