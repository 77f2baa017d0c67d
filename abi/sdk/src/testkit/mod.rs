//! Test kit: reference backend, conformance suite, family checks.
