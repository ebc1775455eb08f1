// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Passes the linker script to the linker. On a machine with an operating system the programs are empty.

fn main() {
    println!("cargo::rerun-if-changed=link.ld");
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    if variable("CARGO_CFG_TARGET_OS") == "none" {
        println!("cargo::rustc-link-arg-bins=-T{}/link.ld", variable("CARGO_MANIFEST_DIR"));
    }
}
