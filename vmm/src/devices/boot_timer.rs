// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Boot timer: a register through which a guest reports its boot progress.
//!
//! The register is one byte, write-only. The init of the guest writes a number, and the device
//! reports that number with the time since the VM was started. The guest image defines the numbers;
//! the init of `scripts/guest` writes [`BootTimer::INIT`] first.

use std::{
    fmt,
    time::{Duration, Instant},
};

use granule_types::units::GuestAddress;

use super::{MmioDevice, MmioDeviceInfo};

/// Called with each number that the guest writes and the time since the start.
pub type BootMarkHandler = Box<dyn FnMut(u8, Duration) + Send>;

/// Boot timer device.
pub struct BootTimer {
    started: Instant,
    on_mark: BootMarkHandler,
}

impl fmt::Debug for BootTimer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BootTimer").finish_non_exhaustive()
    }
}

impl BootTimer {
    /// Number that the guest writes when its init starts.
    pub const INIT: u8 = 1;

    /// Number that the guest writes when its services are started and it is ready for a login.
    pub const READY: u8 = 2;

    /// Creates a timer that counts from `started` and calls `on_mark` for each number.
    #[must_use]
    pub fn new(started: Instant, on_mark: BootMarkHandler) -> Self {
        Self { started, on_mark }
    }

    /// Describes the timer for the device tree.
    #[must_use]
    pub fn describe(start: GuestAddress) -> MmioDeviceInfo {
        MmioDeviceInfo::new("boot-timer", start, None, &["granule,boot-timer"])
    }
}

impl MmioDevice for BootTimer {
    fn read(&mut self, _: u64, _: &mut [u8]) -> bool {
        false
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        let (0, [mark]) = (offset, data) else {
            return false;
        };
        (self.on_mark)(*mark, self.started.elapsed());
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn only_a_byte_at_the_first_address_is_reported() {
        let (sender, marks) = mpsc::channel();
        let on_mark = Box::new(move |mark, time| sender.send((mark, time)).unwrap());
        let mut timer = BootTimer::new(Instant::now(), on_mark);

        assert!(timer.write(0, &[BootTimer::INIT]));
        assert!(!timer.write(0, &[7, 0]));
        assert!(!timer.write(1, &[7]));
        assert!(!timer.read(0, &mut [9; 4]));
        assert!(timer.write(0, &[BootTimer::READY]));

        let (numbers, times): (Vec<_>, Vec<_>) = marks.try_iter().unzip();
        assert_eq!(numbers, [1, 2]);
        assert!(times[0] <= times[1]);
    }
}
