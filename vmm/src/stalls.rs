// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Histograms of durations, each of one cause: `mmio` is the time that vCPUs are not in the guest
//! because the program emulates a device for them, and those of stage-2 faults (`vm::fault_stalls`) are
//! by type and level, and again by the size of what is mapped. `userfaultfd` is the time to answer a
//! fault of a VM that is restored on demand, without the wait behind other faults. Those of the dirty
//! log are durations of operations on it, during which faults of the guest may wait for KVM's locks.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use granule_types::record::EventCounts;

/// Upper bounds of the buckets in nanoseconds, each four times the one before; the last bucket has
/// none.
const BOUNDS: [u64; 10] = [
    1_000,
    4_000,
    16_000,
    64_000,
    256_000,
    1_024_000,
    4_096_000,
    16_384_000,
    65_536_000,
    262_144_000,
];

/// Name of the number of samples of faults that the kernel dropped.
pub const LOST: &str = "lost";

/// Name of the number of samples of mapped sizes that it dropped.
pub const LOST_SIZES: &str = "lost-sizes";

/// Start of the names of stalls by the size that the kernel mapped.
pub const MAPPED: &str = "mapped-";

/// Histogram of durations, which many threads update.
#[derive(Debug, Default)]
pub struct StallHistogram {
    buckets: [AtomicU64; BOUNDS.len() + 1],
    nanoseconds: AtomicU64,
}

/// Start of the name of a bucket in the counts, before its bound.
const BUCKET_PREFIX: &str = "le-";

impl StallHistogram {
    /// Adds a stall.
    pub fn record(&self, stall: Duration) {
        let nanoseconds = u64::try_from(stall.as_nanos()).unwrap_or(u64::MAX);
        let bucket = BOUNDS.partition_point(|bound| *bound < nanoseconds);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// Adds the histogram to `counts`: as `CAUSE.le-NANOSECONDS` the stalls up to each bound, as
    /// `CAUSE.count` all of them, and as `CAUSE.ns` their sum.
    pub fn add_to(&self, counts: &mut EventCounts, cause: &str) {
        let mut stalls = 0;
        let buckets = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed));
        let names = BOUNDS.iter().map(|bound| format!("{BUCKET_PREFIX}{bound}"));
        for (name, count) in names.chain(["count".to_owned()]).zip(buckets) {
            stalls += count;
            counts.insert(format!("{cause}.{name}"), stalls);
        }
        counts.insert(format!("{cause}.ns"), self.nanoseconds.load(Ordering::Relaxed));
    }
}

/// Returns the causes of the histograms in `counts`.
pub fn causes(counts: &EventCounts) -> impl Iterator<Item = &str> {
    counts.keys().filter_map(|name| name.strip_suffix(".count"))
}

/// Returns the buckets of a histogram in `counts`, each with its bound in nanoseconds and the number
/// of stalls up to it, smallest bound first.
#[must_use]
pub fn buckets(counts: &EventCounts, cause: &str) -> Vec<(u64, u64)> {
    let bound = |name: &str| {
        let bucket = name.strip_prefix(cause)?.strip_prefix('.')?;
        bucket.strip_prefix(BUCKET_PREFIX)?.parse().ok()
    };
    let mut buckets: Vec<_> =
        counts.iter().filter_map(|(name, count)| Some((bound(name)?, *count))).collect();
    buckets.sort_unstable();
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_counts_in_each_bucket_whose_bound_it_does_not_exceed() {
        let histogram = StallHistogram::default();
        for nanoseconds in [0, 1_000, 1_001, 300_000, 10_000_000_000] {
            histogram.record(Duration::from_nanos(nanoseconds));
        }
        let mut counts = EventCounts::new();

        histogram.add_to(&mut counts, "mmio");

        for (name, count) in [
            ("mmio.le-1000", 2),
            ("mmio.le-4000", 3),
            ("mmio.le-256000", 3),
            ("mmio.le-1024000", 4),
            ("mmio.le-262144000", 4),
            ("mmio.count", 5),
            ("mmio.ns", 10_000_302_001),
        ] {
            assert_eq!(counts[name], count, "{name}");
        }
        assert_eq!(counts.len(), BOUNDS.len() + 2);
        let read = buckets(&counts, "mmio");
        assert_eq!(read[..2], [(1_000, 2), (4_000, 3)]);
        assert_eq!(read.iter().map(|(bound, _)| *bound).collect::<Vec<_>>(), BOUNDS);
    }
}
