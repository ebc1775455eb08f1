// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! PL011 serial port (Arm DDI 0183G) of most arm64 machines, for guest kernels without a 16550
//! driver.
//!
//! Output is written at once: the port is never busy, and each byte raises the transmit interrupt.
//! A FIFO buffers input. Registers are 32 bits wide; drivers also access their low 16 or 8 bits.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    sync::Arc,
};

use granule_types::units::GuestAddress;
use vmm_sys_util::eventfd::EventFd;

use super::{
    DeviceState, MmioDevice, MmioDeviceInfo, RestoreError,
    serial::{SerialOutput, SerialPort},
    state::Pl011State,
};

const UARTDR: u64 = 0x00;
const UARTRSR: u64 = 0x04;
const UARTFR: u64 = 0x18;
const UARTILPR: u64 = 0x20;
const UARTCR: u64 = 0x30;
/// Registers that store a value without effect: UARTIBRD, UARTFBRD, UARTLCR_H, UARTCR, UARTIFLS,
/// UARTDMACR.
const SCRATCH_REGISTERS: [u64; 6] = [0x24, 0x28, 0x2c, UARTCR, 0x34, 0x48];
const UARTIMSC: u64 = 0x38;
const UARTRIS: u64 = 0x3c;
const UARTMIS: u64 = 0x40;
const UARTICR: u64 = 0x44;
/// First of the peripheral and cell identification registers, which hold one byte per word.
const UARTPERIPHID0: u64 = 0xfe0;
const IDENTIFICATION_BYTES: [u8; 8] = [0x11, 0x10, 0x14, 0x00, 0x0d, 0xf0, 0x05, 0xb1];

const RXFE: u32 = 1 << 4;
const TXFE: u32 = 1 << 7;
/// Interrupt causes in UARTIMSC, UARTRIS, UARTMIS and UARTICR.
const RXRIS: u32 = 1 << 4;
const TXRIS: u32 = 1 << 5;
const RTRIS: u32 = 1 << 6;

/// Size of the receive FIFO in bytes.
const FIFO_SIZE: usize = 32;

/// PL011 serial port.
#[allow(missing_debug_implementations, reason = "it holds any output")]
pub struct Pl011 {
    irq: EventFd,
    output: SerialOutput,
    drain_event: Arc<EventFd>,
    fifo: VecDeque<u8>,
    raw_interrupts: u32,
    interrupt_mask: u32,
    /// Values of the registers in `SCRATCH_REGISTERS`, by offset.
    scratch: BTreeMap<u64, u32>,
}

impl Pl011 {
    /// Creates a port that interrupts through `irq` and writes to `output`.
    pub fn new(irq: EventFd, output: SerialOutput) -> io::Result<Self> {
        let drain_event = Arc::new(EventFd::new(libc::EFD_NONBLOCK)?);
        let (fifo, scratch) = (VecDeque::new(), BTreeMap::new());
        Ok(Self { irq, output, drain_event, fifo, raw_interrupts: 0, interrupt_mask: 0, scratch })
    }

    /// Describes the port for the device tree.
    pub fn describe(start: GuestAddress, irq: u32) -> MmioDeviceInfo {
        MmioDeviceInfo::new("serial", start, Some(irq), &["arm,pl011", "arm,primecell"])
    }

    /// Signals the interrupt if an unmasked cause is pending.
    fn update_interrupt(&self) {
        if self.raw_interrupts & self.interrupt_mask != 0
            && let Err(error) = self.irq.write(1)
        {
            log::debug!("serial interrupt: {error}");
        }
    }

    fn read_data(&mut self) -> u32 {
        let byte = self.fifo.pop_front().unwrap_or(0);
        if self.fifo.is_empty() {
            self.raw_interrupts &= !(RXRIS | RTRIS);
            // The write fails only if the counter is full; the event is then signalled already.
            let _ = self.drain_event.write(1);
        }
        byte.into()
    }

    fn write_data(&mut self, byte: u8) {
        if let Err(error) = self.output.write_all(&[byte]) {
            log::debug!("serial output: {error}");
        }
        self.raw_interrupts |= TXRIS;
        self.update_interrupt();
    }

    fn load(&mut self, offset: u64) -> Option<u32> {
        Some(match offset {
            UARTDR => self.read_data(),
            UARTFR if self.fifo.is_empty() => TXFE | RXFE,
            UARTFR => TXFE,
            UARTIMSC => self.interrupt_mask,
            UARTRIS => self.raw_interrupts,
            UARTMIS => self.raw_interrupts & self.interrupt_mask,
            UARTPERIPHID0.. => {
                let index = usize::try_from((offset - UARTPERIPHID0) / 4).ok()?;
                u32::from(*IDENTIFICATION_BYTES.get(index)?)
            }
            UARTRSR | UARTILPR => 0,
            _ if SCRATCH_REGISTERS.contains(&offset) => *self.scratch.get(&offset).unwrap_or(&0),
            _ => return None,
        })
    }

    fn store(&mut self, offset: u64, value: u32) -> bool {
        match offset {
            UARTDR => self.write_data(value.to_le_bytes()[0]),
            UARTIMSC => {
                self.interrupt_mask = value;
                self.update_interrupt();
            }
            UARTICR => self.raw_interrupts &= !value,
            UARTRSR | UARTILPR => {}
            _ if SCRATCH_REGISTERS.contains(&offset) => {
                self.scratch.insert(offset, value);
            }
            _ => return false,
        }
        true
    }
}

impl SerialPort for Pl011 {
    fn receive(&mut self, input: &[u8]) -> usize {
        let space = (FIFO_SIZE - self.fifo.len()).min(input.len());
        self.fifo.extend(&input[..space]);
        if !self.fifo.is_empty() {
            self.raw_interrupts |= RXRIS | RTRIS;
            self.update_interrupt();
        }
        space
    }

    fn unread_input(&self) -> Vec<u8> {
        self.fifo.iter().copied().collect()
    }

    fn drain_event(&self) -> Arc<EventFd> {
        Arc::clone(&self.drain_event)
    }
}

impl MmioDevice for Pl011 {
    fn read(&mut self, offset: u64, data: &mut [u8]) -> bool {
        let value = match data.len() {
            1 | 2 | 4 if offset.is_multiple_of(4) => self.load(offset),
            _ => None,
        };
        if let Some(value) = value {
            data.copy_from_slice(&value.to_le_bytes()[..data.len()]);
        }
        value.is_some()
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        let mut value = [0; 4];
        match data.len() {
            length @ (1 | 2 | 4) if offset.is_multiple_of(4) => {
                value[..length].copy_from_slice(data);
                self.store(offset, u32::from_le_bytes(value))
            }
            _ => false,
        }
    }

    fn suspend(&mut self) -> Result<Option<DeviceState>, String> {
        Ok(Some(DeviceState::Pl011(Pl011State {
            input: self.unread_input(),
            raw_interrupts: self.raw_interrupts,
            interrupt_mask: self.interrupt_mask,
            scratch: self.scratch.iter().map(|(offset, value)| (*offset, *value)).collect(),
        })))
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), RestoreError> {
        let DeviceState::Pl011(state) = state else {
            return Err(state.refused_by("a PL011"));
        };
        let is_scratch = |(offset, _): &(u64, u32)| SCRATCH_REGISTERS.contains(offset);
        if state.input.len() > FIFO_SIZE || !state.scratch.iter().all(is_scratch) {
            let text = format!("its state is refused: more than {FIFO_SIZE} bytes, or a register");
            return Err(RestoreError(text));
        }
        self.fifo = state.input.iter().copied().collect();
        self.raw_interrupts = state.raw_interrupts;
        self.interrupt_mask = state.interrupt_mask;
        self.scratch = state.scratch.iter().copied().collect();
        Ok(())
    }

    fn resume(&mut self) {
        self.update_interrupt();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    fn new_port() -> (Pl011, io::PipeReader, EventFd) {
        let (screen, output) = io::pipe().unwrap();
        let irq = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        (Pl011::new(irq.try_clone().unwrap(), Box::new(output)).unwrap(), screen, irq)
    }

    fn read_word(port: &mut Pl011, offset: u64) -> u32 {
        let mut data = [9; 4];
        assert!(port.read(offset, &mut data));
        u32::from_le_bytes(data)
    }

    #[test]
    fn transmitted_bytes_reach_the_output_and_raise_an_unmasked_interrupt() {
        let (mut port, mut screen, irq) = new_port();

        assert!(port.write(UARTDR, b"a"));
        assert!(irq.read().is_err());
        assert!(port.write(UARTIMSC, &TXRIS.to_le_bytes()));

        assert_eq!(irq.read().unwrap(), 1);
        assert_eq!(read_word(&mut port, UARTMIS), TXRIS);
        assert!(port.write(UARTICR, &TXRIS.to_le_bytes()));
        assert_eq!(read_word(&mut port, UARTRIS), 0);
        drop(port);
        let mut shown = String::new();
        screen.read_to_string(&mut shown).unwrap();
        assert_eq!(shown, "a");
    }

    #[test]
    fn the_fifo_keeps_input_up_to_its_size() {
        let (mut port, _, irq) = new_port();
        assert!(port.write(UARTIMSC, &RXRIS.to_le_bytes()));

        assert_eq!(port.receive(&[7; 40]), FIFO_SIZE);

        assert_eq!(irq.read().unwrap(), 1);
        assert_eq!(read_word(&mut port, UARTFR), TXFE);
        let read: Vec<u32> = (0..FIFO_SIZE).map(|_| read_word(&mut port, UARTDR)).collect();
        assert_eq!(read, [7; FIFO_SIZE]);
        assert_eq!(read_word(&mut port, UARTFR), TXFE | RXFE);
        assert_eq!(read_word(&mut port, UARTRIS), 0);
    }

    #[test]
    fn accesses_to_missing_registers_are_refused() {
        let (mut port, ..) = new_port();

        for offset in [0x08, 0x4c, 0x800, 0xffe] {
            assert!(!port.write(offset, &[1; 4]), "{offset:#x}");
        }
        assert!(!port.write(UARTCR, &[1; 8]));
        assert!(!port.read(UARTCR + 2, &mut [9; 2]));
    }

    #[test]
    fn a_restored_port_has_the_input_and_raises_its_interrupt_again() {
        let (mut port, ..) = new_port();
        assert!(port.write(UARTIMSC, &RXRIS.to_le_bytes()));
        assert!(port.write(UARTCR, &7_u32.to_le_bytes()));
        assert_eq!(port.receive(b"key"), 3);
        let state = port.suspend().unwrap().unwrap();
        let (mut restored, _, irq) = new_port();

        restored.restore(&state).unwrap();
        restored.resume();

        assert_eq!(irq.read().unwrap(), 1);
        assert_eq!(read_word(&mut restored, UARTCR), 7);
        let input = [(); 3].map(|()| read_word(&mut restored, UARTDR));
        assert_eq!(input, b"key".map(u32::from));
    }
}
