// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The page-table test: guest programs, phases, and the machines that run them.
//!
//! The [`harness`] takes a [`config`] and a [`machine::Machine`] and drives the `guest` program
//! through the phases of [`granule_types::phase`], with one thread for each vCPU
//! ([`vcpu_threads`]). It checks dirty bitmap and contents, and passes a
//! [`granule_types::record::Record`] of each phase to its caller. Two modules implement machines:
//! [`pgtable_vm`] on KVM, and [`software_machine`] on the stage-2 engine.

pub mod config;
#[cfg(test)]
mod fake_machine;
mod guest;
pub mod harness;
pub mod log_lines;
pub mod machine;
pub mod pgtable_vm;
pub mod software_machine;
pub mod task;
pub mod vcpu_threads;

mod clock {
    //! Clock of all times in a result: `CLOCK_MONOTONIC_RAW`, as in the kernel's test.
    //!
    //! Time adjustments do not change its rate. Under emulation it reads virtual time.

    use rustix::time::{ClockId, clock_gettime};

    use granule_types::units::Nanoseconds;

    /// Returns the current time since an arbitrary origin.
    pub fn now() -> Nanoseconds {
        let time = clock_gettime(ClockId::MonotonicRaw);
        Nanoseconds(time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs())
    }

    /// Returns the time from `start` to `end`.
    pub const fn elapsed(start: Nanoseconds, end: Nanoseconds) -> Nanoseconds {
        Nanoseconds(end.0.saturating_sub(start.0))
    }

    /// Returns the duration of a fallible call.
    pub fn time_call<E>(call: impl FnOnce() -> Result<(), E>) -> Result<Nanoseconds, E> {
        let start = now();
        call()?;
        Ok(elapsed(start, now()))
    }
}
