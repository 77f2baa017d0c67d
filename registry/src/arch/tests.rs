//! Tests of the architecture index.
