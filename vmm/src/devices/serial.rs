// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! 16550 serial port, from `vm-superio`: the default console of a guest.
//!
//! The port writes the guest's bytes to the output at once;
//! [`ConsoleOutput`](super::console_output::ConsoleOutput) is an output that never blocks. [Console
//! input](super::console_input) fills a FIFO of 64 bytes. Registers are 8 bits wide.

use std::{fmt::Display, io, mem, sync::Arc};

use granule_types::units::GuestAddress;
use vm_superio::{Trigger, serial::SerialEvents};
use vmm_sys_util::eventfd::EventFd;

use super::{DeviceState, MmioDevice, MmioDeviceInfo, RestoreError, state::SerialState};

/// Offsets of registers.
const DATA: u8 = 0;
const INTERRUPT_ENABLE: u8 = 1;
const INTERRUPT_IDENTIFICATION: u8 = 2;
const LINE_CONTROL: u8 = 3;
const MODEM_CONTROL: u8 = 4;
/// Causes in the interrupt identification.
const SENT: u8 = 1 << 1;
const RECEIVED: u8 = 1 << 2;
/// Bit of the line control by which the first registers are those of the divisor.
const DIVISOR_ACCESS: u8 = 1 << 7;
/// Bit of the modem control by which the port receives what it sends.
const LOOPBACK: u8 = 1 << 4;

/// Destination of guest output.
pub type SerialOutput = Box<dyn io::Write + Send>;

/// 16550 serial port.
#[allow(missing_debug_implementations, reason = "it holds any output")]
pub struct Serial {
    port: vm_superio::Serial<InterruptLine, DrainEvent, SerialOutput>,
    /// Set when the guest has sent a byte to itself.
    has_own_input: bool,
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

    /// Returns the input that the guest has not read, and has not sent to itself.
    fn unread_input(&self) -> Vec<u8>;

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
        Ok(Self { port, has_own_input: false })
    }

    /// Describes the port for the device tree, with one register per byte. The node also needs
    /// `clock-frequency`.
    pub fn describe(start: GuestAddress, irq: u32) -> MmioDeviceInfo {
        MmioDeviceInfo::new("serial", start, Some(irq), &["ns16550a"])
    }
}

impl Serial {
    /// Returns the interrupt with the highest priority, as the hardware does. The port reports all causes
    /// and forgets them, and a driver that handles one cause at a time would lose the other one.
    fn identify_interrupt(&mut self) -> u8 {
        let causes = self.port.read(INTERRUPT_IDENTIFICATION);
        // With access to the divisor, the register that enables interrupts cannot be written.
        let has_both = causes & (RECEIVED | SENT) == RECEIVED | SENT;
        if !has_both || self.port.read(LINE_CONTROL) & DIVISOR_ACCESS != 0 {
            return causes;
        }
        // Enabling the interrupts again raises those whose cause remains.
        let enabled = self.port.read(INTERRUPT_ENABLE);
        if let Err(error) = self.port.write(INTERRUPT_ENABLE, enabled) {
            log::debug!("serial port: {error}");
        }
        causes & !SENT
    }
}

impl SerialPort for Serial {
    fn receive(&mut self, input: &[u8]) -> usize {
        // The call fails if the FIFO is full.
        self.port.enqueue_raw_bytes(input).unwrap_or(0)
    }

    fn unread_input(&self) -> Vec<u8> {
        // Bytes of the guest must not become input of another boot.
        match self.has_own_input {
            true => Vec::new(),
            false => self.port.state().in_buffer,
        }
    }

    fn drain_event(&self) -> Arc<EventFd> {
        Arc::clone(&self.port.events().0)
    }
}

impl MmioDevice for Serial {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> bool {
        match (u8::try_from(offset), data) {
            (Ok(INTERRUPT_IDENTIFICATION), [byte]) => *byte = self.identify_interrupt(),
            (Ok(offset @ 0..=7), [byte]) => *byte = self.port.read(offset),
            _ => return false,
        }
        true
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        let (Ok(offset @ 0..=7), [byte]) = (u8::try_from(offset), data) else {
            return false;
        };
        self.has_own_input |= offset == DATA && self.port.read(MODEM_CONTROL) & LOOPBACK != 0;
        if let Err(error) = self.port.write(offset, *byte) {
            log::debug!("serial port: {error}");
        }
        if offset == MODEM_CONTROL && *byte & LOOPBACK == 0 {
            // Input was refused in loopback mode, also by an empty FIFO, which no read drains.
            self.port.events().in_buffer_empty();
        }
        true
    }

    fn suspend(&mut self) -> Result<Option<DeviceState>, String> {
        let state = self.port.state();
        Ok(Some(DeviceState::Serial(SerialState {
            divisor: [state.baud_divisor_low, state.baud_divisor_high],
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            input: state.in_buffer,
        })))
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), RestoreError> {
        let DeviceState::Serial(state) = state else {
            return Err(state.refused_by("a 16550"));
        };
        let state = vm_superio::SerialState {
            baud_divisor_low: state.divisor[0],
            baud_divisor_high: state.divisor[1],
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            in_buffer: state.input.clone(),
        };
        let failed = |error: &dyn Display| RestoreError(format!("its state is refused: {error}"));
        let irq = self.port.interrupt_evt().0.try_clone().map_err(|error| failed(&error))?;
        let drain_event = DrainEvent(self.drain_event());
        let output: SerialOutput = Box::new(io::sink());
        let mut port =
            vm_superio::Serial::from_state(&state, InterruptLine(irq), drain_event, output)
                .map_err(|error| failed(&error))?;
        mem::swap(port.writer_mut(), self.port.writer_mut());
        self.port = port;
        Ok(())
    }

    fn resume(&mut self) {
        /// Bit of the interrupt identification that is clear while an interrupt is pending.
        const NONE_PENDING: u8 = 1;
        let is_pending = self.port.state().interrupt_identification & NONE_PENDING == 0;
        if is_pending && let Err(error) = self.port.interrupt_evt().trigger() {
            log::debug!("serial interrupt: {error}");
        }
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
    fn bytes_that_the_guest_sends_to_itself_are_no_input_of_another_boot() {
        let mut serial = Serial::new(event(), Box::new(io::sink())).unwrap();
        assert_eq!(serial.receive(b"typed"), 5);
        assert_eq!(serial.unread_input(), b"typed");

        assert!(serial.write(MODEM_CONTROL.into(), &[LOOPBACK]));
        assert!(serial.write(DATA.into(), b"!"));

        assert!(serial.unread_input().is_empty());
    }

    #[test]
    fn input_that_loopback_refused_is_asked_for_again() {
        let mut serial = Serial::new(event(), Box::new(io::sink())).unwrap();
        assert!(serial.write(MODEM_CONTROL.into(), &[LOOPBACK]));
        assert_eq!(serial.receive(b"typed"), 0);
        assert!(serial.drain_event().read().is_err(), "loopback goes on");

        assert!(serial.write(MODEM_CONTROL.into(), &[0]));

        assert!(serial.drain_event().read().is_ok());
        assert_eq!(serial.receive(b"typed"), 5);
    }

    #[test]
    fn received_input_does_not_hide_that_output_was_sent() {
        let mut serial = Serial::new(event(), Box::new(io::sink())).unwrap();
        let read = |serial: &mut Serial, offset| {
            let mut byte = [0];
            assert!(serial.read(offset, &mut byte));
            byte[0]
        };
        assert!(serial.write(INTERRUPT_ENABLE.into(), &[3]));
        assert!(serial.write(0, b"a"));
        assert_eq!(serial.receive(b"x"), 1);

        let first = read(&mut serial, 2);
        assert_eq!(read(&mut serial, 0), b'x');
        let second = read(&mut serial, 2);

        assert_eq!([first & 0xf, second & 0xf], [RECEIVED, SENT]);
        assert_eq!(read(&mut serial, 2) & 1, 1, "no cause remains");

        assert!(serial.write(0, b"b"));
        assert_eq!(serial.receive(b"y"), 1);
        assert!(serial.write(LINE_CONTROL.into(), &[DIVISOR_ACCESS]));
        assert_eq!(read(&mut serial, 2) & 0xf, RECEIVED | SENT, "no cause is lost");
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

    #[test]
    fn a_restored_port_has_the_input_and_raises_its_interrupt_again() {
        let mut serial = Serial::new(event(), Box::new(io::sink())).unwrap();
        assert!(serial.write(1, &[1]));
        assert_eq!(serial.receive(b"key"), 3);
        let state = serial.suspend().unwrap().unwrap();
        let (mut screen, output) = io::pipe().unwrap();
        let irq = event();
        let mut restored = Serial::new(irq.try_clone().unwrap(), Box::new(output)).unwrap();

        restored.restore(&state).unwrap();
        restored.resume();

        assert!(irq.read().unwrap() > 0);
        let mut byte = [0];
        for expected in *b"key" {
            assert!(restored.read(0, &mut byte));
            assert_eq!(byte, [expected]);
        }
        assert!(restored.write(0, b"!"));
        drop(restored);
        let mut shown = String::new();
        screen.read_to_string(&mut shown).unwrap();
        assert_eq!(shown, "!");
    }
}
