// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The clock of every time in a result: `CLOCK_MONOTONIC_RAW`, as in the kernel's test. It runs
//! evenly, whatever is done to the time of day. Under emulation it is virtual time.

use rustix::time::{ClockId, clock_gettime};

use granule_types::units::Nanoseconds;

/// The time now, from an arbitrary origin.
pub fn now() -> Nanoseconds {
    let time = clock_gettime(ClockId::MonotonicRaw);
    Nanoseconds(time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs())
}

/// The time from `start` until `end`.
pub const fn between(start: Nanoseconds, end: Nanoseconds) -> Nanoseconds {
    Nanoseconds(end.0.saturating_sub(start.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_passes() {
        let start = now();
        std::thread::sleep(std::time::Duration::from_millis(2));

        assert!(between(start, now()) >= Nanoseconds(1_000_000));
    }
}
