// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The PL031 real-time clock, by `vm-superio`: the guest's time of day at boot. It has no alarm
//! and so no interrupt. Its registers are words.

use std::fmt;

use super::{MmioDevice, MmioDeviceInfo};

/// The clock.
#[derive(Default)]
pub struct Rtc {
    clock: vm_superio::Rtc<vm_superio::rtc_pl031::NoEvents>,
    refused: u64,
}

impl fmt::Debug for Rtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rtc").finish_non_exhaustive()
    }
}

impl Rtc {
    /// Bytes of registers.
    pub const SIZE: u64 = 0x1000;

    /// A clock that shows the host's time.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// For the device tree. A `primecell` node also needs `clocks` and `clock-names`.
    #[must_use]
    pub fn describe(start: u64) -> MmioDeviceInfo {
        MmioDeviceInfo {
            name: "rtc".to_owned(),
            start,
            size: Self::SIZE,
            irq: None,
            compatible: &["arm,pl031", "arm,primecell"],
        }
    }
}

impl MmioDevice for Rtc {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match (u16::try_from(offset), <&mut [u8; 4]>::try_from(&mut *data)) {
            (Ok(offset), Ok(word)) => self.clock.read(offset, word),
            _ => {
                data.fill(0);
                self.refused += 1;
            }
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        match (u16::try_from(offset), <&[u8; 4]>::try_from(data)) {
            (Ok(offset), Ok(word)) => self.clock.write(offset, word),
            _ => self.refused += 1,
        }
    }

    fn refused(&self) -> u64 {
        self.refused
    }
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use super::*;

    #[test]
    fn it_shows_the_hosts_seconds() {
        let mut rtc = Rtc::new();
        let mut word = [0; 4];

        rtc.read(0, &mut word);

        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_secs();
        assert!(now - u64::from(u32::from_le_bytes(word)) <= 1);
    }

    #[test]
    fn anything_but_words_is_refused() {
        let mut rtc = Rtc::new();
        let mut data = [9; 8];

        rtc.read(0, &mut data);
        rtc.write(8, &[1]);

        assert_eq!((data, rtc.refused()), ([0; 8], 2));
    }
}
