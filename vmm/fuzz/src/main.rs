// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Program linked with libFuzzer, which interprets the arguments. `GRANULE_FUZZ_TARGET` names the
//! target. `scripts/fuzz` builds and runs it.

#![no_main]

use std::{process::exit, sync::OnceLock};

use granule_fuzz::{FuzzTarget, TARGETS};

static TARGET: OnceLock<FuzzTarget> = OnceLock::new();

fn target() -> FuzzTarget {
    let name = std::env::var("GRANULE_FUZZ_TARGET").unwrap_or_default();
    TARGETS.iter().copied().find(|target| target.name == name).unwrap_or_else(|| {
        let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
        eprintln!("granule-fuzz: unknown GRANULE_FUZZ_TARGET '{name}'; expected one of {names:?}");
        exit(2)
    })
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    (TARGET.get_or_init(target).run)(data);
});
