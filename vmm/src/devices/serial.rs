// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The 16550 serial port, by `vm-superio`: the guest's console.
//!
//! What the guest sends is written to the output at once; an [outlet](super::console_output) is one that
//! takes it without waiting. What comes in waits in a FIFO of 64 bytes, which a
//! [feed](super::console_input) fills. The port's registers are bytes.

use std::{fmt, io, sync::Arc};

use parking_lot::Mutex;
use vm_superio::{Trigger, serial::SerialEvents};
use vmm_sys_util::eventfd::EventFd;

use super::{MmioDevice, MmioDeviceInfo};

/// Where the guest's output goes.
pub type SerialOutput = Box<dyn io::Write + Send>;

/// The port.
pub struct Serial {
    port: vm_superio::Serial<Interrupt, Arc<DrainNotifier>, SerialOutput>,
    refused: u64,
    output_failed: bool,
}

struct Interrupt(EventFd);

impl Trigger for Interrupt {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// A serial port that can be fed.
pub trait SerialPort: MmioDevice {
    /// Takes as much of `input` as there is room for, and says how much that was.
    fn receive(&mut self, input: &[u8]) -> usize;

    /// What the port tells when the guest has read everything.
    fn drained(&self) -> &Arc<DrainNotifier>;
}

/// Tells who waits for it that the guest has read everything.
#[derive(Debug, Default)]
pub struct DrainNotifier(Mutex<Option<Arc<EventFd>>>);

impl DrainNotifier {
    /// `event` is to be written to, once, when the guest has read everything. Called with the port
    /// locked, so that the guest cannot read it in between.
    pub fn wake(&self, event: &Arc<EventFd>) {
        *self.0.lock() = Some(Arc::clone(event));
    }

    /// The guest has read everything.
    pub fn tell(&self) {
        if let Some(event) = self.0.lock().take()
            && let Err(error) = event.write(1)
        {
            log::debug!("serial input: {error}");
        }
    }
}

impl SerialEvents for DrainNotifier {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}

    fn in_buffer_empty(&self) {
        self.tell();
    }
}

impl fmt::Debug for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Serial").finish_non_exhaustive()
    }
}

impl Serial {
    /// Bytes of registers.
    pub const SIZE: u64 = 0x1000;

    /// A port that interrupts by `irq` and writes to `output`.
    #[must_use]
    pub fn new(irq: EventFd, output: SerialOutput) -> Self {
        let drained = Arc::new(DrainNotifier::default());
        Self {
            port: vm_superio::Serial::with_events(Interrupt(irq), drained, output),
            refused: 0,
            output_failed: false,
        }
    }

    /// For the device tree, with a register every byte. The node also needs `clock-frequency`.
    #[must_use]
    pub fn describe(start: u64, irq: u32) -> MmioDeviceInfo {
        MmioDeviceInfo {
            name: "serial".to_owned(),
            start,
            size: Self::SIZE,
            irq: Some(irq),
            compatible: &["ns16550a"],
        }
    }
}

impl SerialPort for Serial {
    fn receive(&mut self, input: &[u8]) -> usize {
        let room = self.port.fifo_capacity().min(input.len());
        if room == 0 {
            return 0;
        }
        self.port
            .enqueue_raw_bytes(&input[..room])
            .unwrap_or_else(|error| {
                log::debug!("serial input: {error}");
                0
            })
    }

    fn drained(&self) -> &Arc<DrainNotifier> {
        self.port.events()
    }
}

impl MmioDevice for Serial {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match (u8::try_from(offset), &mut *data) {
            (Ok(offset @ 0..=7), [byte]) => *byte = self.port.read(offset),
            _ => {
                data.fill(0);
                self.refused += 1;
            }
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let result = match (u8::try_from(offset), data) {
            (Ok(offset @ 0..=7), [byte]) => self.port.write(offset, *byte),
            _ => {
                self.refused += 1;
                return;
            }
        };
        if let Err(error) = result
            && !self.output_failed
        {
            self.output_failed = true;
            log::warn!("the guest's console output is lost from here on: {error}");
        }
    }

    fn refused(&self) -> u64 {
        self.refused
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::{super::testing::Page, *};

    struct Full;

    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn event() -> EventFd {
        EventFd::new(libc::EFD_NONBLOCK).unwrap()
    }

    #[test]
    fn what_the_guest_sends_comes_out() {
        let page = Page::default();
        let mut serial = Serial::new(event(), Box::new(page.clone()));

        for byte in b"login:" {
            serial.write(0, &[*byte]);
        }

        assert_eq!(*page.0.lock(), b"login:");
    }

    #[test]
    fn accesses_that_are_no_byte_registers_are_refused() {
        let mut serial = Serial::new(event(), Box::new(Page::default()));
        let mut data = [9; 4];

        serial.read(0, &mut data);
        serial.write(8, &[1]);
        serial.write(0x100, &[1]);

        assert_eq!((data, serial.refused()), ([0; 4], 3));
    }

    #[test]
    fn output_that_cannot_be_written_stops_nothing() {
        let mut serial = Serial::new(event(), Box::new(Full));

        serial.write(0, b"a");
        serial.write(0, b"b");

        assert!(serial.output_failed);
    }
}
