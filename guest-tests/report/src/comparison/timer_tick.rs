// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Phases shorter than a timer tick, whose ratios a single tick distorts. Means omit them.

use crate::{sample::Sample, stats::Spread};

/// Period of the timer tick in nanoseconds of the host's clock: `CONFIG_HZ=250`, the setting of the
/// lab's kernels.
pub const TICK_NS: f64 = 4_000_000.0;
/// Count of the timer ticks in a phase.
const TICK_COUNT: &str = "timer_ticks";

/// Reports whether a run counted timer ticks.
pub fn has_tick_counts(samples: &[Sample]) -> bool {
    samples.iter().any(|sample| sample.counters.contains_key(TICK_COUNT))
}

/// Reports whether a phase is shorter than a tick on a side, or has ticks in some of its runs only.
/// Each side contains the samples of the phase.
pub fn is_shorter_than_tick(sides: &[Vec<&Sample>; 2]) -> bool {
    let is_short = |samples: &Vec<&Sample>| {
        let times = Spread::new(samples.iter().map(|sample| sample.ns));
        times.is_some_and(|times| times.median < TICK_NS)
    };
    let runs = sides.iter().flatten();
    let mut has_ticks = runs.filter_map(|sample| Some(sample.count(TICK_COUNT)? > 0));
    let first = has_ticks.next();
    sides.iter().any(is_short) || has_ticks.any(|has_ticks| Some(has_ticks) != first)
}
