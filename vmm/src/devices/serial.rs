// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! 16550 serial port, from `vm-superio`: the default console of a guest.
//!
//! The port writes the guest's bytes to the output at once;
//! [`ConsoleOutput`](super::console_output::ConsoleOutput) is an output that never blocks. [Console
//! input](super::console_input) fills a FIFO of 64 bytes. Registers are 8 bits wide.

use std::{io, sync::Arc};

use granule_types::units::GuestAddress;
use vm_superio::{Trigger, serial::SerialEvents};
use vmm_sys_util::eventfd::EventFd;

use super::{MmioDevice, MmioDeviceInfo};

/// Destination of guest output.
pub type SerialOutput = Box<dyn io::Write + Send>;

/// 16550 serial port.
#[allow(missing_debug_implementations, reason = "it holds any output")]
pub struct Serial {
    port: vm_superio::Serial<InterruptLine, DrainEvent, SerialOutput>,
}

struct InterruptLine(EventFd);

impl Trigger for InterruptLine {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Serial port that accepts input.
pub trait SerialPort: MmioDevice {
    /// Accepts as many bytes of `input` as fit into the FIFO, and returns their number.
    fn receive(&mut self, input: &[u8]) -> usize;

    /// Returns the event that the port signals when the guest has read all input.
    fn drain_event(&self) -> Arc<EventFd>;
}

/// Event of [`SerialPort::drain_event`].
struct DrainEvent(Arc<EventFd>);

impl SerialEvents for DrainEvent {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}

    fn in_buffer_empty(&self) {
        // The write fails only if the counter is full; the event is then signalled already.
        let _ = self.0.write(1);
    }
}

impl Serial {
    /// Creates a port that interrupts through `irq` and writes to `output`.
    pub fn new(irq: EventFd, output: SerialOutput) -> io::Result<Self> {
        let drain_event = DrainEvent(Arc::new(EventFd::new(libc::EFD_NONBLOCK)?));
        let port = vm_superio::Serial::with_events(InterruptLine(irq), drain_event, output);
        Ok(Self { port })
    }

    /// Describes the port for the device tree, with one register per byte. The node also needs
    /// `clock-frequency`.
    pub fn describe(start: GuestAddress, irq: u32) -> MmioDeviceInfo {
        MmioDeviceInfo::new("serial", start, Some(irq), &["ns16550a"])
    }
}

impl SerialPort for Serial {
    fn receive(&mut self, input: &[u8]) -> usize {
        // The call fails if the FIFO is full.
        self.port.enqueue_raw_bytes(input).unwrap_or(0)
    }

    fn drain_event(&self) -> Arc<EventFd> {
        Arc::clone(&self.port.events().0)
    }
}

impl MmioDevice for Serial {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> bool {
        match (u8::try_from(offset), data) {
            (Ok(offset @ 0..=7), [byte]) => *byte = self.port.read(offset),
            _ => return false,
        }
        true
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        let (Ok(offset @ 0..=7), [byte]) = (u8::try_from(offset), data) else {
            return false;
        };
        if let Err(error) = self.port.write(offset, *byte) {
            log::debug!("serial port: {error}");
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    fn event() -> EventFd {
        EventFd::new(libc::EFD_NONBLOCK).unwrap()
    }

    #[test]
    fn transmitted_bytes_reach_the_output() {
        let (mut screen, output) = io::pipe().unwrap();
        let mut serial = Serial::new(event(), Box::new(output)).unwrap();

        for byte in b"login:" {
            assert!(serial.write(0, &[*byte]));
        }
        drop(serial);

        let mut shown = String::new();
        screen.read_to_string(&mut shown).unwrap();
        assert_eq!(shown, "login:");
    }

    #[test]
    fn only_byte_accesses_to_registers_are_accepted() {
        let mut serial = Serial::new(event(), Box::new(io::sink())).unwrap();

        assert!(!serial.read(0, &mut [9; 4]));
        assert!(!serial.write(8, &[1]));
        assert!(!serial.write(0x100, &[1]));
    }

    #[test]
    fn failed_output_does_not_stop_the_guest() {
        let (screen, output) = io::pipe().unwrap();
        drop(screen);
        let mut serial = Serial::new(event(), Box::new(output)).unwrap();

        assert!(serial.write(0, b"a"));
        assert!(serial.write(0, b"b"));
    }
}
