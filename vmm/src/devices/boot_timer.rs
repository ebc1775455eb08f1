// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A register by which the guest tells how far it has got.
//!
//! One byte, write-only: the guest's init writes a number, the device tells the machine this
//! number and how long ago the machine was started. The meaning of the numbers is the guest
//! image's; [`BootTimer::INIT`] is what `scripts/guest` has its init write first.

use std::{
    fmt,
    time::{Duration, Instant},
};

use super::{MmioDevice, MmioDeviceInfo};

/// The register, and whom to tell.
pub struct BootTimer {
    started: Instant,
    tell: Box<dyn FnMut(u8, Duration) + Send>,
    refused: u64,
}

impl fmt::Debug for BootTimer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BootTimer").finish_non_exhaustive()
    }
}

impl BootTimer {
    /// Bytes of registers.
    pub const SIZE: u64 = 0x1000;

    /// What the guest writes when its init starts.
    pub const INIT: u8 = 1;

    /// What the guest writes when it is up: services started, ready to log in.
    pub const READY: u8 = 2;

    /// A timer that counts from `started` and tells `tell` each number with its time.
    #[must_use]
    pub fn new(started: Instant, tell: Box<dyn FnMut(u8, Duration) + Send>) -> Self {
        Self {
            started,
            tell,
            refused: 0,
        }
    }

    /// For the device tree.
    #[must_use]
    pub fn describe(start: u64) -> MmioDeviceInfo {
        MmioDeviceInfo {
            name: "boot-timer".to_owned(),
            start,
            size: Self::SIZE,
            irq: None,
            compatible: &["granule,boot-timer"],
        }
    }
}

impl MmioDevice for BootTimer {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0);
        self.refused += 1;
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        match (offset, data) {
            (0, [mark]) => (self.tell)(*mark, self.started.elapsed()),
            _ => self.refused += 1,
        }
    }

    fn refused(&self) -> u64 {
        self.refused
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_byte_at_the_start_is_told_and_nothing_else() {
        let (sender, marks) = mpsc::channel();
        let tell = Box::new(move |mark, time| sender.send((mark, time)).unwrap());
        let mut timer = BootTimer::new(Instant::now(), tell);

        timer.write(0, &[BootTimer::INIT]);
        timer.write(0, &[7, 0]);
        timer.write(1, &[7]);
        let mut data = [9; 4];
        timer.read(0, &mut data);
        timer.write(0, &[BootTimer::READY]);

        let marks: Vec<_> = marks.try_iter().collect();
        assert_eq!(
            marks.iter().map(|(mark, _)| *mark).collect::<Vec<_>>(),
            [1, 2]
        );
        assert!(marks[0].1 <= marks[1].1);
        assert_eq!((timer.refused(), data), (3, [0; 4]));
    }
}
