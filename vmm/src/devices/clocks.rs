// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Clocks of a guest: a PL031 real-time clock, from which the guest reads the time of day at boot,
//! and a boot timer, to which the guest reports its boot progress. Neither has an interrupt.

use granule_types::units::GuestAddress;

use vm_superio::rtc_pl031::{self, NoEvents};

use super::{DeviceState, MmioDevice, MmioDeviceInfo, RestoreError, state::RtcState};

/// PL031 real-time clock from `vm-superio`, without its alarm. Reads return the host's time.
/// Registers are 32 bits wide.
#[allow(missing_debug_implementations, reason = "`vm_superio::Rtc` does not implement Debug")]
#[derive(Default)]
pub struct Rtc(vm_superio::Rtc<NoEvents>);

impl Rtc {
    /// Describes the clock for the device tree. A `primecell` node also needs `clocks` and
    /// `clock-names`.
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

    fn suspend(&mut self) -> Result<Option<DeviceState>, String> {
        let state = self.0.state();
        Ok(Some(DeviceState::Rtc(RtcState {
            load: state.lr,
            offset: state.offset,
            compare: state.mr,
            interrupt_mask: state.imsc,
            raw_interrupts: state.ris,
        })))
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), RestoreError> {
        let DeviceState::Rtc(state) = state else {
            return Err(state.refused_by("a real-time clock"));
        };
        let state = rtc_pl031::RtcState {
            lr: state.load,
            offset: state.offset,
            mr: state.compare,
            imsc: state.interrupt_mask,
            ris: state.raw_interrupts,
        };
        self.0 = vm_superio::Rtc::from_state(&state, NoEvents);
        Ok(())
    }
}

/// Handler called with each byte that the guest writes to the boot timer.
pub type BootMarkHandler = Box<dyn FnMut(u8) + Send>;

/// Boot timer: one write-only 8-bit register.
///
/// The guest's init writes boot marks, which the device passes to its handler. The guest image
/// defines their values; the init of `scripts/guest` writes [`BootTimer::INIT_MARK`] first.
#[allow(missing_debug_implementations, reason = "it holds a closure")]
pub struct BootTimer(BootMarkHandler);

impl BootTimer {
    /// Boot mark written when the guest's init starts.
    pub const INIT_MARK: u8 = 1;
    /// Boot mark written when the guest is ready for a login.
    pub const READY_MARK: u8 = 2;

    /// Creates a timer that calls `on_mark` for each boot mark.
    pub fn new(on_mark: BootMarkHandler) -> Self {
        Self(on_mark)
    }

    /// Describes the timer for the device tree.
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
        (self.0)(*mark);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::mpsc,
        time::{SystemTime, UNIX_EPOCH},
    };

    use super::*;

    #[test]
    fn the_clock_returns_the_time_of_the_host() {
        let mut word = [0; 4];

        assert!(Rtc::default().read(0, &mut word));

        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        assert!(now - u64::from(u32::from_le_bytes(word)) <= 1);
    }

    #[test]
    fn the_clock_refuses_accesses_other_than_words() {
        let mut rtc = Rtc::default();

        assert!(!rtc.read(0, &mut [9; 8]));
        assert!(!rtc.write(8, &[1]));
    }

    #[test]
    fn only_a_byte_at_the_first_address_of_the_timer_is_reported() {
        let (sender, marks) = mpsc::channel();
        let mut timer = BootTimer::new(Box::new(move |mark| sender.send(mark).unwrap()));

        assert!(timer.write(0, &[BootTimer::INIT_MARK]));
        assert!(!timer.write(0, &[7, 0]));
        assert!(!timer.write(1, &[7]));
        assert!(!timer.read(0, &mut [9; 4]));
        assert!(timer.write(0, &[BootTimer::READY_MARK]));

        assert_eq!(marks.try_iter().collect::<Vec<_>>(), [1, 2]);
    }
}
