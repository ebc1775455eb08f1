// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The program that libFuzzer's engine is linked with: its arguments are the engine's, the target
//! is named by `GRANULE_FUZZ_TARGET`. `scripts/fuzz` builds and starts it.

#![no_main]

use std::{process::exit, sync::OnceLock};

use granule_fuzz::Target;

static TARGET: OnceLock<Target> = OnceLock::new();

fn target() -> Target {
    let name = std::env::var("GRANULE_FUZZ_TARGET").unwrap_or_default();
    granule_fuzz::by_name(&name).unwrap_or_else(|| {
        let names: Vec<_> = granule_fuzz::TARGETS.iter().map(|t| t.name).collect();
        eprintln!("granule-fuzz: GRANULE_FUZZ_TARGET='{name}' is none of {names:?}");
        exit(2)
    })
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    (TARGET.get_or_init(target).run)(data);
});
