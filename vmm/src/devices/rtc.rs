// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! PL031 real-time clock, from `vm-superio`: the guest reads its time of day at boot. The clock has
//! no alarm and no interrupt. Registers are words.

use std::fmt;

use granule_types::units::GuestAddress;

use super::{MmioDevice, MmioDeviceInfo};

/// PL031 real-time clock.
#[derive(Default)]
pub struct Rtc(vm_superio::Rtc<vm_superio::rtc_pl031::NoEvents>);

impl fmt::Debug for Rtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rtc").finish_non_exhaustive()
    }
}

impl Rtc {
    /// Creates a clock that shows the host's time.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Describes the clock for the device tree. A `primecell` node also needs `clocks` and
    /// `clock-names`.
    #[must_use]
    pub fn describe(start: GuestAddress) -> MmioDeviceInfo {
        MmioDeviceInfo::new("rtc", start, None, &["arm,pl031", "arm,primecell"])
    }
}

impl MmioDevice for Rtc {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> bool {
        let (Ok(offset), Ok(word)) = (u16::try_from(offset), data.try_into()) else {
            return false;
        };
        self.0.read(offset, word);
        true
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        let (Ok(offset), Ok(word)) = (u16::try_from(offset), data.try_into()) else {
            return false;
        };
        self.0.write(offset, word);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use super::*;

    #[test]
    fn the_clock_shows_the_seconds_of_the_host() {
        let mut word = [0; 4];

        assert!(Rtc::new().read(0, &mut word));

        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        assert!(now - u64::from(u32::from_le_bytes(word)) <= 1);
    }

    #[test]
    fn accesses_other_than_words_are_refused() {
        let mut rtc = Rtc::new();

        assert!(!rtc.read(0, &mut [9; 8]));
        assert!(!rtc.write(8, &[1]));
    }
}
