//! Test kit: a reference backend, a conformance suite for backends, checks for families.
//!
//! Behind the cargo feature `testkit`, for tests only. It may index and assert its own invariants;
//! what it hands to a backend or a family is still checked by them.

pub mod conformance;
pub mod family;
pub mod reference;

pub use family::{Caches, FamilyUnderTest, Golden, LoadedModel, MapWeights, Part, StepOptions};
pub use reference::{
    Fault, FaultKind, ReferenceBackend, ReferenceOptions, Statistics, reference_backend,
    reference_backend_table,
};
