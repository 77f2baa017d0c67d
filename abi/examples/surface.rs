//! Prints the ABI surface (`surface`) or the golden assertions (`surface --golden`).

#![allow(
    clippy::print_stdout,
    reason = "printing is what this generator is for"
)]

fn main() {
    if std::env::args().any(|arg| arg == "--golden") {
        print!("{}", mlxcel_abi::surface::golden_source());
    } else {
        print!("{}", mlxcel_abi::surface::dump());
    }
}
