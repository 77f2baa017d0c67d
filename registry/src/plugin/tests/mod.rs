//! Tests of the plugin catalogue.
